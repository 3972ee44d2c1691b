"""Tasks in this process and in others."""

import contextlib
import math
import os
import select
import signal
import subprocess
import sys
from contextlib import closing

import pytest

from baechi_ext.errors import ExecutionError
from baechi_runtime.host.parallel import each
from tests.runtime.workers import ROOT

SOON = 60.0
"""Seconds; generous, since the machine may be busy."""


def test_in_this_process_one_after_the_other() -> None:
    assert list(each(math.factorial, [3, 1, 2], 1)) == [(3, 6), (1, 1), (2, 2)]


def test_in_other_processes() -> None:
    assert sorted(each(math.factorial, [3, 1, 2], 2)) == [(1, 1), (2, 2), (3, 6)]
    with closing(each(math.factorial, range(1000), 2)) as found:
        task, value = next(found)  # whichever was done first
        assert value == math.factorial(task)


def test_a_worker_that_dies() -> None:
    with pytest.raises(ExecutionError, match=r"one of 2 workers died \(.*\); the same command goes on"):
        list(each(os._exit, [7], 2))


def test_workers_end_with_the_process_that_waits_for_them() -> None:
    """However it ends: their stdout is at its end when the last of them has gone."""
    code = (
        "import math, os, signal\nfrom multiprocessing import active_children\nfrom baechi_runtime.host.parallel import each\n"
        "found = each(math.factorial, range(1000), 2)\nnext(found)\n"
        "print(*(worker.pid for worker in active_children()), flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT) as waiting:
        assert waiting.stdout is not None
        workers = [int(word) for word in waiting.stdout.readline().split()]
        assert len(workers) == 2
        try:
            assert select.select([waiting.stdout], [], [], SOON)[0], "a worker is left"
        finally:
            for worker in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize(("gone", "code"), [(False, 0), (True, -signal.SIGKILL)])
def test_a_process_ends_whose_parent_was_gone_before_it_asked(gone: bool, code: int) -> None:
    text = f"import os\nfrom baechi_ext.die_with_parent import die_with_parent\ndie_with_parent(os.getppid() + {gone:d})"
    assert subprocess.run([sys.executable, "-c", text], cwd=ROOT).returncode == code


def test_what_a_task_raises_is_raised() -> None:
    with pytest.raises(ValueError, match="not defined for negative"):
        list(each(math.factorial, [-1], 2))
