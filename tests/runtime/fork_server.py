"""The process that forks commands for the tests (`forked`): it has imported what they take longest for.

    python -m tests.runtime.fork_server SOCKET FRAMEWORK

Each message on the socket is a JSON list of a command line of Python, its environment and its folder. With it come the command's stdout
and stderr, a pipe for its process id and, once it has ended, its exit code, and its stdin where it has one. Worker processes that the
command starts are forks, too.
"""

import atexit
import contextlib
import faulthandler
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from baechi_ext.die_with_parent import die_with_parent
from tests.runtime.warm import warm_up

LONGEST_MESSAGE = 2**20
NUMBER = struct.Struct("i")


class Fork(subprocess.Popen):
    """A Popen of Python whose process goes on from here instead, as a new one would but for what is imported."""

    kept: frozenset[int] = frozenset()
    """Descriptors of what is imported; a process has no others of this one's."""

    def __init__(self, args: Sequence[str], *, env: Mapping[str, str] | None = None, preexec_fn: Any = None, **options: Any) -> None:
        def instead() -> NoReturn:
            if preexec_fn is not None:
                preexec_fn()
            become(args[1:], os.environ.copy() if env is None else env, passed=options.get("pass_fds", ()))

        super().__init__(args, env=env, preexec_fn=instead, **options)


def become(arguments: Sequence[str], environment: Mapping[str, str], passed: Sequence[int] = ()) -> NoReturn:
    """Does what `python ARGUMENTS` does with the descriptors that are passed on to it, and ends this process, a fork."""
    for descriptor in open_descriptors() - Fork.kept - {0, 1, 2, *passed}:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python does when it begins; Popen undoes it
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)))
    err = io.BufferedWriter(io.FileIO(2, "w", closefd=False))
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(err, errors="backslashreplace", line_buffering=True)
    faulthandler.enable(2)  # Forked.communicate asks for the stacks of what does not end
    gc.enable()  # Popen disables it where it forks
    os.environ.clear()
    os.environ.update(environment)
    if "RANK" in environment:  # /proc says the environment of a process as it was executed
        Path("/proc/self/comm").write_text(f"RANK={environment['RANK']}")
    code = 1
    try:
        code = ran(arguments)
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.current_thread():
                thread.join()
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def ran(arguments: Sequence[str]) -> int:
    """The exit code of `python ARGUMENTS`: [-u or -P] -m MODULE, -c PROGRAM or SCRIPT, and what these take."""
    first, *rest = arguments[arguments[0] in ("-u", "-P") :]
    try:
        if first == "-m":
            sys.argv, sys.path[0] = rest, os.getcwd()
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            sys.argv, sys.path[0] = ["-c", *rest[1:]], os.getcwd()
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv, sys.path[0] = [first, *rest], os.path.dirname(os.path.abspath(first))
            runpy.run_path(first, run_name="__main__")
    except SystemExit as e:
        if e.code is not None and not isinstance(e.code, int):
            print(e.code, file=sys.stderr)
        return e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:  # noqa: BLE001 - the process ends here, whatever happened
        traceback.print_exc()
        return 1
    return 0


def open_descriptors() -> frozenset[int]:
    return frozenset(map(int, os.listdir("/proc/self/fd")))


def attend(command: Sequence[str], environment: Mapping[str, str], folder: str, *descriptors: int) -> None:
    """Forks the command, and tells its process id and its exit code."""
    out, err, told, given = (*descriptors, subprocess.DEVNULL)[:4]
    die_with_parent()
    streams = {"stdin": given, "stdout": out, "stderr": err}
    process = Fork(command, cwd=folder, env=environment, preexec_fn=die_with_parent, **streams)
    for each in {*streams.values()} - {subprocess.DEVNULL}:
        os.close(each)
    os.write(told, NUMBER.pack(process.pid))
    os.write(told, NUMBER.pack(process.wait()))


def main(descriptor: int, framework: str) -> None:
    warm_up(framework)
    if framework == "torch":
        importlib.import_module("baechi_runtime.torch.processes.launch").subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": Fork})
        importlib.import_module("torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler").Popen = Fork
    gc.collect()
    gc.freeze()
    Fork.kept = open_descriptors() - {descriptor}
    with socket.socket(fileno=descriptor) as requests:
        while True:
            message, descriptors, *_ = socket.recv_fds(requests, LONGEST_MESSAGE, 4)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if not message:
                return
            if os.fork() == 0:
                attend(*json.loads(message), *descriptors)
                os._exit(0)
            for each in descriptors:
                os.close(each)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
