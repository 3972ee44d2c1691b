"""Ctrl-C while a library is imported: it takes effect when that is done.

A KeyboardInterrupt in the midst of an import leaves half a module behind, and some libraries go on with that: torch's own extension imports
numpy and takes any error for numpy's absence.
"""

import _thread
import os
import signal
import time
from pathlib import PurePath
from types import FrameType
from typing import Any

_LOOK_AGAIN_SECONDS = 0.05
_INSTALLED = {"site-packages", "dist-packages"}
_OURS = {"__main__", "baechi_ext", "runtime"}
"""Left to the caller: nothing goes on with half of these, and what is run as a script may train for hours."""


def wait_for_imports() -> None:
    """From here on a first Ctrl-C waits until no installed package is being imported; a second one does not. Other modules, where a
    script may train, are interrupted at once, as they are by Python. To be called in the main thread."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _Waiting())


class _Waiting:
    """The handler. It takes no locks: the main thread may hold any when it is called."""

    def __init__(self) -> None:
        self._is_due = self._looks_again = False

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        ours, self._looks_again = self._looks_again, False
        if ours and not self._is_due:  # the user's second Ctrl-C has been answered
            return
        pressed_again = self._is_due and not ours
        if _imports_library(frame) and not pressed_again:
            self._is_due = True
            _thread.start_new_thread(self._look_again, ())
            return
        self._is_due = False
        signal.default_int_handler(number, frame)

    def _look_again(self) -> None:
        time.sleep(_LOOK_AGAIN_SECONDS)
        self._looks_again = True
        os.kill(os.getpid(), signal.SIGINT)


def _imports_library(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and _is_library(frame):
            return True
        frame = frame.f_back
    return False


def _is_library(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__")).split(".")[0]
    return package not in _OURS and bool(_INSTALLED & set(PurePath(frame.f_code.co_filename).parts))
