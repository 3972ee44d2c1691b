"""Starting worker processes, and ending them: one goes down, all go down, and nothing is left running.

What torchrun does for several machines, for one: the same environment variables, so that a worker does not know who started it.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import IO

import torch.distributed as dist

from baechi_ext.errors import BaechiError, ExecutionError, OptionError
from runtime.processes import op_board
from runtime.processes.op_board import OpBoard

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 3.0
_PLAN_SECONDS = 60.0
"""What rank 0 may take, once interrupted, to end its search and write the plan; and to come to its end where another worker has."""
_LAST_WORDS_SECONDS = 2.0
"""How long a dead worker's peers may take to be found dead too, so that the first cause is reported and not its echo."""
_PR_SET_PDEATHSIG = 1
_USAGE_ERROR = 2
"""The exit code of a worker that finds the flags at fault; see runtime.cli."""


@dataclass
class Worker:
    """A running worker. Its stderr is passed on, its `error:` lines held back until the cause is known."""

    rank: int
    process: subprocess.Popen[str]
    errors: list[str] = field(default_factory=list)

    def watch(self) -> None:
        """Starts passing on what it says."""
        if self.process.stderr is not None:
            self._thread = threading.Thread(target=self._pass_on, args=(self.process.stderr,), daemon=True)
            self._thread.start()

    def _pass_on(self, stream: IO[str]) -> None:
        with contextlib.suppress(ValueError):  # closed under us
            for line in stream:
                if line.startswith("error:"):
                    self.errors.append(line.rstrip("\n"))
                elif self.rank == 0:
                    sys.stderr.write(line if line.endswith("\n") else line + "\n")  # cut off in mid-line when it died
                    sys.stderr.flush()

    def last_words(self) -> list[str]:
        """Its error lines, all read."""
        self._thread.join(timeout=_LAST_WORDS_SECONDS)
        return self.errors


def run_workers(arguments: Sequence[str], count: int, timeout_seconds: float, module: str = "runtime") -> int:
    """Runs `python -m MODULE ARGUMENTS` as `count` workers and waits for rank 0, whose stdout is this process's, and whose exit code comes
    back: 0, or what a script of the user's ended with.

    Raises ExecutionError where a worker fails or dies, OptionError where it finds the flags at fault; all others are ended first.
    An interrupt is passed on to rank 0, which may still have a plan to write, and raised again with what rank 0 says of it.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_seconds))
    board = OpBoard.make(count)
    workers: list[Worker] = []
    try:
        for rank in range(count):
            workers.append(_start([module, *arguments], rank, count, {"MASTER_PORT": str(store.port), **_told(board)}))
        return _wait(workers, board)
    except KeyboardInterrupt as e:
        raise KeyboardInterrupt(_interrupted(workers)) from e
    finally:
        _end(workers)


def _told(board: OpBoard) -> dict[str, str]:
    return {} if board.address is None else {op_board.VARIABLE: board.address}


def _start(arguments: Sequence[str], rank: int, count: int, meeting: Mapping[str, str]) -> Worker:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        **meeting,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=None if rank == 0 else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,  # an interrupt at the terminal is for us
        preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, no locks
    )
    worker = Worker(rank, process)
    worker.watch()
    return worker


def _die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(workers: Sequence[Worker], board: OpBoard) -> int:
    """Rank 0's exit code, when it is done; raises the cause where a worker failed."""
    while workers[0].process.poll() != 0:
        ended = [w for w in workers if w.process.poll() not in (None, 0)]
        if ended:
            code = _code_of_a_script(workers)
            if code is not None:
                return code
            raise _cause(workers, board)
        time.sleep(_POLL_SECONDS)
    return 0


def _code_of_a_script(workers: Sequence[Worker]) -> int | None:
    """Rank 0's exit code where all that ended did so with that code and no error of ours, as a script of the user's does; None where they
    did not, or rank 0 does not end soon. Waits a while, so that what happened is known."""
    time.sleep(_LAST_WORDS_SECONDS)
    codes = {w.process.poll() for w in workers} - {None, 0}
    if min(codes) < 0 or len(codes) > 1 or any(w.last_words() for w in workers if w.process.poll() is not None):
        return None
    with contextlib.suppress(subprocess.TimeoutExpired):
        workers[0].process.wait(timeout=_PLAN_SECONDS)
    return workers[0].process.poll() if {workers[0].process.poll()} == codes and not workers[0].last_words() else None


def _interrupted(workers: Sequence[Worker]) -> str:
    """What rank 0 says where it is interrupted; nothing where it does not end soon."""
    for rank_0 in workers[:1]:
        rank_0.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank_0.process.wait(timeout=_PLAN_SECONDS)
            return "".join(rank_0.last_words()[:1]).removeprefix("error:").strip()
    return ""


def _cause(workers: Sequence[Worker], board: OpBoard) -> BaechiError:
    """A worker killed by a signal is a cause, unless it had said one; what the others say is an echo of it. Otherwise rank 0 says what
    happened."""
    for worker in workers:
        code = worker.process.poll()
        if code is not None and code < 0 and not worker.last_words():
            return ExecutionError(
                f"the worker of device {worker.rank} was killed by {signal.Signals(-code).name}{board.at(worker.rank)}; see whether the "
                "machine ran out of memory"
            )
    for worker in workers:
        said = worker.last_words() if worker.process.poll() not in (None, 0) else []
        if said:
            kind = OptionError if worker.process.poll() == _USAGE_ERROR else ExecutionError
            return kind(said[0].removeprefix("error:").strip())
    failed = next(w for w in workers if w.process.poll() not in (None, 0))
    return ExecutionError(f"the worker of device {failed.rank} ended with exit code {failed.process.poll()} and said nothing")


def _end(workers: Sequence[Worker]) -> None:
    """Ends whoever still runs: politely first, and stopped ones too."""
    for worker in workers:
        if worker.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                worker.process.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    for worker in workers:
        try:
            worker.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
        if worker.process.stderr is not None:
            worker.process.stderr.close()
