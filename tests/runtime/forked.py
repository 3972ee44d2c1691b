"""Commands as processes of their own that are forked from one which has imported their framework: the tests' side of `fork_server`.

They are what `python ...` starts, but for the seconds that it takes to import PyTorch or TensorFlow, in the command and in every worker
process of it. What depends on a new interpreter (its environment variables, its hash seed) is tested with those of `subprocess`.
"""

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TextIO

from tests.runtime.fork_server import NUMBER
from tests.runtime.workers import ROOT, finish

STACKS_SECONDS = 10


class Forked:
    """A process that another one has forked; its methods are Popen's. It reads nothing, or what `stdin` can be read from."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        framework: str = "torch",
        folder: Path = ROOT,
        *,
        stdin: int | None = None,
    ) -> None:
        ends = [os.pipe() for _ in range(3)]
        message = json.dumps([["python", *command], dict(environment), str(folder)])
        passed = [writing for _, writing in ends] + ([] if stdin is None else [stdin])
        socket.send_fds(server(framework), [message.encode()], passed)
        for each in passed:
            os.close(each)
        out, err, self._told = (reading for reading, _ in ends)
        self.stdout, self.stderr = (os.fdopen(descriptor, errors="replace") for descriptor in (out, err))
        self.args, self.returncode = command, None
        self.pid: int = self._next_number()

    def _next_number(self) -> int:
        told = os.read(self._told, NUMBER.size)
        assert told, "the process that forks has ended"
        return NUMBER.unpack(told)[0]

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = self._next_number()
            os.close(self._told)
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Also waits until nobody else writes there. What takes longer is ended, and its error has the stacks of its threads."""
        deadline = None if timeout is None else time.monotonic() + timeout
        texts: dict[TextIO, str] = {}
        readers = [threading.Thread(target=lambda s=s: texts.update({s: s.read()}), daemon=True) for s in (self.stdout, self.stderr)]
        for reader in readers:
            reader.start()
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired as e:
            self.send_signal(signal.SIGABRT)
            readers[1].join(STACKS_SECONDS)
            e.add_note(texts.get(self.stderr, "no stacks"))
            raise
        for reader in readers:
            reader.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout)
        self.stdout.close()
        self.stderr.close()
        return texts[self.stdout], texts[self.stderr]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(*flags: str, module: str = "baechi_ext", folder: Path = ROOT, **environment: str) -> Forked:
    """`python -m baechi_ext FLAGS`, in that folder."""
    framework = "tensorflow" if "--framework=tensorflow" in flags else "torch"
    return Forked(["-m", module, *flags], {**os.environ, **environment}, framework, folder)


def run(*flags: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`python -m baechi_ext FLAGS`, ended."""
    return subprocess.CompletedProcess(flags, *finish(start(*flags, folder=folder)))


def python(*words: str, folder: Path = ROOT, framework: str = "torch") -> subprocess.CompletedProcess[str]:
    """`python WORDS`, ended: -m and a module, -c and a program, or a script."""
    return subprocess.CompletedProcess(words, *finish(Forked(words, os.environ, framework, folder)))


def output(*flags: str, folder: Path = ROOT) -> str:
    """The output of `python -m baechi_ext FLAGS`, which ends well."""
    done = run(*flags, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def torchrun(*flags: str) -> Forked:
    """`baechi` on two workers as torchrun starts them."""
    return start("--standalone", "--nproc-per-node=2", "-m", "baechi_ext", *flags, module="torch.distributed.run")


@cache
def server(framework: str) -> socket.socket:
    """The connection to a process that forks; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.runtime.fork_server", str(theirs.fileno()), framework]
    process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours
