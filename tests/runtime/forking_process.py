"""The process that forks workers for the tests (`forked_workers`).

For each line of stdin, a JSON list of a module, a number of workers, and arguments, `MODULE.prepared(number, *arguments)` is called, and
what it returns is called in every worker; what comes back there is its exit code, None being 0. A line with the exit codes and with what
rank 0 printed answers it.
"""

import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from tempfile import TemporaryFile
from typing import Any, TextIO

import torch.distributed as dist

from baechi_runtime.torch.processes import environment
from tests.runtime.warm import warm_up
from tests.runtime.workers import threads_of_a_group

Work = Callable[[], int | None]


def main() -> None:
    warm_up("torch")
    for line in sys.stdin:
        module, count, *arguments = json.loads(line)
        work = importlib.import_module(module).prepared(count, *arguments)
        gc.freeze()
        with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
            codes = fork(work, count, (out, err))
            printed = [file.read() for file in (out, err) if file.seek(0) == 0]
        print(json.dumps([codes, *printed]), flush=True)


def fork(work: Work, count: int, printed: Sequence[TextIO]) -> list[int]:
    """The exit codes of `work` in this many workers. Once one fails, the others are ended."""
    with socket.socket(fileno=environment.listen_at("127.0.0.1")) as meeting:
        ranks = {_forked(partial(_work, work, (rank, count), meeting, printed)): rank for rank in range(count)}
    codes = [0] * count
    while ranks:
        pid, status = os.wait()
        codes[ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return codes


def _work(work: Work, place: tuple[int, int], meeting: socket.socket, printed: Sequence[TextIO]) -> int:
    """Runs a worker and returns its exit code."""
    os.environ.update(environment.of_worker(*place, meeting.getsockname()[1]))
    if place[0] == 0:
        os.environ[environment.STORE_SOCKET] = str(os.dup(meeting.fileno()))
        for file, stream in zip(printed, (1, 2), strict=True):
            os.dup2(file.fileno(), stream)
    meeting.close()
    code = work() or 0
    if (joined := _joined()) is not None:
        joined.leave()  # as where Python ends, which these processes do at once
    elif code == 0 and not dist.is_initialized():
        assert not threads_of_a_group(), "a group of workers was left, and somebody holds it"
    return code


def _joined() -> Any:
    """This worker's place among those of a script, to which torch.distributed says nothing of its group; None where there is none."""
    calls = sys.modules.get("baechi_runtime.torch.calls.workers")
    return calls._JOINED[0] if calls is not None and calls._JOINED else None


def _forked(whole: Callable[[], int]) -> int:
    """The process id of a new process that does this."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = whole()
    except BaseException:  # noqa: BLE001 - the process ends here, whatever happened
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
