"""Processes that end with the one that started them."""

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable
from functools import partial

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when the thread that started it ends, whatever happens to that; at once where process `parent`
    has been replaced by another, as it ended before. Linux alone can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def with_this_process() -> Callable[[], None] | None:
    """The `preexec_fn` of a process that is to end with this one: none in other threads than the main one, which may end before."""
    return partial(die_with_parent, os.getpid()) if threading.current_thread() is threading.main_thread() else None
