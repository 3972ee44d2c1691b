"""Kernels: functions compiled by numba that hold no interpreter lock, kept on disk between processes.

Numba compiles a cached function again when its own file changed, and overlooks changes in what it calls. So the cache has a folder
for each state of all kernel files together: those named *kernel.py.
"""

import hashlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import numba
from numba.core import event, types

F = TypeVar("F", bound=Callable)


_OPTIONS = {"nogil": True, "error_model": "numpy", "_nrt": False}
"""Kernels allocate nothing, so they need no reference counts (NRT); those cost more than the simulation itself."""


def kernel(function: F, **options: bool) -> F:
    """`function`, compiled at its first call or loaded from the cache; compiled in each process where no folder can be written.

    It cannot make arrays.
    """
    return _compiled(function, {**_OPTIONS, **options})


def allocating_kernel(function: F) -> F:
    """The same for functions that make arrays."""
    return _compiled(function, {"nogil": True})


def _compiled(function: F, options: dict[str, object]) -> F:
    folder = cache_folder()
    if folder is None:
        return numba.njit(**options)(function)
    given = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)
    try:
        return numba.njit(cache=True, **options)(function)
    finally:
        numba.config.CACHE_DIR = given


def inlined(function: F) -> F:
    """A kernel's part that is compiled into its callers: for what is called all the time."""
    return kernel(function, forceinline=True)


def part(function: F) -> F:
    """A kernel's part that is called by kernels alone: without an entry for Python it takes a third less to compile."""
    return _of_wide_integers(kernel(function, no_cpython_wrapper=True, no_cfunc_wrapper=True))


def _of_wide_integers(dispatcher: Any) -> Any:
    """The same, compiled once for integers of all widths, constants too: numba would do so for each, and for guesses while it infers."""
    template_for = dispatcher.get_call_template

    def get_call_template(args: Sequence[types.Type], kws: Mapping[str, types.Type]) -> Any:
        return template_for([types.int64 if isinstance(types.unliteral(t), types.Integer) else t for t in args], kws)

    dispatcher.get_call_template = get_call_template
    return dispatcher


@cache
def cache_folder() -> Path | None:
    """Where compiled kernels are kept: NUMBA_CACHE_DIR, else beside the sources, else the user's cache; None where none is writable."""
    name = f"kernels-{_digest()}"
    return next((folder / name for folder in _candidates() if _is_writable(folder / name)), None)


_compiling = event.TimingListener()
event.register("numba:compile", _compiling)


class _InterruptedAfterwards(event.Listener):
    """While kernels are compiled, a first Ctrl-C takes effect when that is done, some seconds later: LLVM calls back to Python, where a
    KeyboardInterrupt is lost, and numba makes other errors of one. A second Ctrl-C does not wait."""

    def __init__(self) -> None:
        self._compiling = 0
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._pressed = False

    def on_start(self, event: event.Event) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._compiling += 1
        handler = signal.getsignal(signal.SIGINT)
        if self._compiling == 1 and callable(handler):
            self._handler, self._pressed = handler, False
            signal.signal(signal.SIGINT, self._remember)

    def _remember(self, *_: object) -> None:
        self._pressed = True
        signal.signal(signal.SIGINT, self._handler)

    def on_end(self, event: event.Event) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._compiling -= 1
        if self._compiling == 0 and self._handler is not None:
            handler, self._handler = self._handler, None
            signal.signal(signal.SIGINT, handler)
            if self._pressed:
                handler(signal.SIGINT, sys._getframe())


event.register("numba:compile", _InterruptedAfterwards())  # behind the clock, which it may keep from nothing


def compiling_seconds() -> float:
    """What this process has compiled for so far; loading from the cache is not in it."""
    return _compiling.duration if _compiling.done else 0.0


def is_first_use() -> bool:
    """Whether no kernel is kept yet, so that what runs next has to be compiled: some ten seconds each for bound, simulator and search."""
    folder = cache_folder()
    return folder is None or not any(folder.iterdir())


def _candidates() -> Iterator[Path]:
    if numba.config.CACHE_DIR:
        yield Path(numba.config.CACHE_DIR)
        return
    yield Path(__file__).parent / "__pycache__"
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(home):
        yield Path(home) / "baechi-ext"


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _digest() -> str:
    package = Path(__file__).parent.parent
    contents = [path.read_bytes() for path in sorted(package.rglob("*kernel.py"))]
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]
