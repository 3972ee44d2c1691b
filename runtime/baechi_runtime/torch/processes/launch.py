"""Starting worker processes, and ending them: one goes down, all go down, and nothing is left running.

It does for one machine what torchrun does for several: the environment variables are the same, so a worker does not know who started it.
It loads no framework, which takes seconds: the workers do that at once, and rank 0 has the store that they meet at.
"""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, cast

from baechi_ext.die_with_parent import die_with_parent
from baechi_ext.errors import BaechiError, ExecutionError, OptionError
from baechi_ext.python_process import command_of, surroundings
from baechi_runtime.host.error_line import MARK
from baechi_runtime.host.interrupts import INTERRUPTED, signal_name, was_terminated
from baechi_runtime.torch.processes import environment
from baechi_runtime.torch.processes.crash_log import CrashLog
from baechi_runtime.torch.processes.words import Words, new_mark, show

_POLL_SECONDS = 0.05
_PLAN_SECONDS, _TERM_SECONDS = 60.0, 8.0
"""Time for rank 0, once interrupted, to end its search and write the plan; and to come to its end where another worker has. After SIGTERM
there is less."""
_LAST_WORDS_SECONDS = 2.0
"""Time for a dead worker's peers to be found dead too, so that the first cause is reported and not its echo."""
_QUOTED_LINES = 2
"""Lines of stderr that are quoted of a worker that aborted: C++ says what was thrown, and then what it held."""
_FILES, _FILES_A_WORKER = 24, 4
"""Files that rank 0 opens: 31 were counted with two workers, 39 with four. With too few gloo aborts, or waits for its peers in vain."""
_USAGE_ERROR = 2
"""The exit code of a worker that finds the flags at fault; see baechi_runtime.cli.main."""


@dataclass
class Worker:
    """A running worker. Rank 0's stderr is passed on, of the others' its end is kept; its own error lines are held back until the cause is
    known."""

    rank: int
    process: subprocess.Popen[bytes]
    words: Words

    @property
    def failure(self) -> int:
        """The exit code that it failed with; 0 where it runs, or ended well."""
        return self.process.poll() or 0


def run_workers(arguments: Sequence[str], count: int, module: str = "baechi_ext") -> int:
    """Runs `python -m MODULE ARGUMENTS` as `count` workers and waits for rank 0, whose stdout is this process's, and whose exit code comes
    back: 0, or what a script of the user's ended with.

    Raises ExecutionError where a worker fails or dies, OptionError where it finds the flags at fault; all others are ended first.
    An interrupt is passed on to rank 0, which may still have a plan to write, and raised again with what rank 0 says of it.
    """
    _require_files(count)
    crash = CrashLog.make(count)
    shared = {MARK: f"{os.getpid()} {new_mark()}", **({} if crash.address is None else {environment.CRASH_LOG: crash.address})}
    workers: list[Worker] = []
    try:
        with socket.socket(fileno=environment.listen_at("127.0.0.1")) as meeting:
            for rank in range(count):
                workers.append(_start([module, *arguments], rank, count, meeting, shared))
        return _wait(workers, crash)
    except KeyboardInterrupt as e:
        raise KeyboardInterrupt(_interrupted(workers)) from e
    finally:
        _end(workers)


def _require_files(count: int) -> None:
    """Raises ExecutionError where a worker may not open as many files as it takes."""
    limit, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], _FILES + _FILES_A_WORKER * count
    if resource.RLIM_INFINITY != limit < needed:
        raise ExecutionError(
            f"{count} workers open up to {needed} files each, and a process may open no more than {limit}; raise the limit (ulimit -n), or "
            "use fewer devices"
        )


def _start(arguments: Sequence[str], rank: int, count: int, meeting: socket.socket, shared: Mapping[str, str]) -> Worker:
    """Starts a worker. Rank 0 is given the socket: no other process can take its port meanwhile, nor does a worker come too early. Sets of
    text have the same order in all workers: scripts number their words by it."""
    store = {environment.STORE_SOCKET: str(meeting.fileno())} if rank == 0 else {}
    process = subprocess.Popen(
        command_of(*arguments),
        env={"PYTHONHASHSEED": "0", **surroundings(), **environment.of_worker(rank, count, meeting.getsockname()[1]), **store, **shared},
        stdin=subprocess.DEVNULL,
        stdout=None if rank == 0 else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=[meeting.fileno()] if rank == 0 else [],
        process_group=0,  # an interrupt at the terminal is for us
        preexec_fn=partial(_begin_worker, os.getpid()),  # noqa: PLW1509 - two system calls, no locks
    )
    return Worker(rank, process, Words(cast("IO[bytes]", process.stderr), shared[MARK].partition(" ")[2], shown=rank == 0))


def _begin_worker(launcher: int) -> None:
    """The worker ends with its launcher, and writes to the launcher's terminal where `stty tostop` would stop it: it is in a group of its
    own."""
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    die_with_parent(launcher)


def _wait(workers: Sequence[Worker], crash: CrashLog) -> int:
    """Rank 0's exit code, when it is done; raises the cause where a worker failed, KeyboardInterrupt where rank 0 alone was interrupted."""
    while workers[0].process.poll() != 0:
        if any(w.failure for w in workers):
            code = _code_of_a_script(workers)
            if code is None:
                raise KeyboardInterrupt if workers[0].failure == INTERRUPTED else _cause(workers, crash)
            return code
        time.sleep(_POLL_SECONDS)
    return 0


def _code_of_a_script(workers: Sequence[Worker]) -> int | None:
    """Rank 0's exit code where all that ended did so with that code and no error of ours, as a script of the user's does; None where they
    did not, or rank 0 does not end soon. Waits a while, so that what happened is known."""
    deadline = time.monotonic() + _LAST_WORDS_SECONDS
    while any(w.process.poll() is None for w in workers) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    codes = {w.failure for w in workers} - {0}
    if min(codes) < 0 or len(codes) > 1 or any(w.words.errors for w in workers if w.process.poll() is not None):
        return None
    with contextlib.suppress(subprocess.TimeoutExpired):
        workers[0].process.wait(timeout=_PLAN_SECONDS)
    return workers[0].process.poll() if {workers[0].process.poll()} == codes and not workers[0].words.errors else None


def _interrupted(workers: Sequence[Worker]) -> str:
    """Interrupt rank 0, and return what it says; empty where it does not end soon. Workers that were stopped go on, to end."""
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGCONT)
    for rank_0 in workers[:1]:
        rank_0.process.send_signal(signal.SIGTERM if was_terminated() else signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank_0.process.wait(timeout=_TERM_SECONDS if was_terminated() else _PLAN_SECONDS)
            return "".join(rank_0.words.errors[:1])
    return ""


def _cause(workers: Sequence[Worker], crash: CrashLog) -> BaechiError:
    """A worker that was killed by a signal, or ended without an error of ours as by what a script raised in it, is the cause, and what the
    others say an echo of it; though a script may have caught what another worker said. Otherwise rank 0 says what happened."""
    for worker in workers:
        if worker.failure < 0 and not worker.words.errors:
            killer, quoted = signal_name(-worker.failure), " ".join(map(str.strip, worker.words.ending[-_QUOTED_LINES:]))
            return ExecutionError(
                f"the worker of device {worker.rank} was killed by {killer}{crash.at(worker.rank)}{crash.planned(worker.rank)}; check "
                "whether the machine ran out of memory" + (f" (it ended with: {quoted})" if quoted and killer != "SIGKILL" else "")
            )
    failed = [w for w in workers if w.failure]
    said = [(worker, error) for worker in failed for error in worker.words.errors[:1]]
    silent = next((w for w in failed if not w.words.errors), None)
    if silent is None:
        worker, error = said[0]
        return OptionError(error) if worker.failure == _USAGE_ERROR else ExecutionError(error)
    lines = silent.words.ending
    if silent.rank:
        show("".join(f"{line}\n" for line in lines))
    how = f"the worker of device {silent.rank} ended with exit code {silent.failure} and "
    how += "its last words are above" if lines else "said nothing"
    return ExecutionError("; ".join([how, *(f"the worker of device {worker.rank} said: {error}" for worker, error in said[:1])]))


def _end(workers: Sequence[Worker]) -> None:
    """Ends whoever still runs, stopped ones too, with all processes that a worker has started, unless it ended well: those of a script
    may go on then, as without us. They keep nothing that would have to be written."""
    for worker in workers:
        if worker.process.poll() != 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):  # it is in the system, which may wait for a disk or a GPU for ever
            worker.process.wait(timeout=_TERM_SECONDS)
        worker.words.wait()
