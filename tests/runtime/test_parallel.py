"""Tasks in this process and in others."""

import math
import os
from contextlib import closing

import pytest

from baechi_ext.errors import ExecutionError
from baechi_runtime.host.parallel import each


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


def test_what_a_task_raises_is_raised() -> None:
    with pytest.raises(ValueError, match="not defined for negative"):
        list(each(math.factorial, [-1], 2))
