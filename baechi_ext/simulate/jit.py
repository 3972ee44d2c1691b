"""Kernels: functions compiled by numba that hold no interpreter lock, kept on disk between processes.

Set-up compiles them ahead of time (`baechi_ext.place.kernels`); what is not there is compiled at its first call. The name of the folder
says what they are made of: all kernel files, those named *kernel.py, and the numba, Python and processor that they are for. So it never
holds what is out of date, and may be moved with the package; numba's own caches go by paths and dates, and overlook changes in what a
function calls.
"""

import contextlib
import hashlib
import os
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, cast

import numba
from numba.core import caching, event, types
from numba.core.registry import cpu_target

F = TypeVar("F", bound=Callable[..., Any])
_njit: Any = numba.njit
_caching: Any = caching
"""Untyped: numba declares neither all options nor the parts of its cache."""
_OPTIONS = {"nogil": True, "error_model": "numpy", "_nrt": False}
"""Kernels allocate nothing, so they need no reference counts (NRT); those cost more than the simulation itself."""
_ALLOCATING = {"nogil": True}
_CALLED_BY_KERNELS = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Without an entry for Python a function takes a third less to compile."""
_UNFINISHED_SECONDS = 3600.0
_MODE = 0o755
"""The folder's mode, whatever the umask: others may not write there."""


def kernel(function: F) -> F:
    """`function`, loaded from the cache or compiled at its first call; in each process where no folder can be written.

    It cannot make arrays.
    """
    return cast(F, _kept(_njit(**_OPTIONS)(function)))


def allocating_kernel(function: F) -> F:
    """The same for functions that make arrays."""
    return cast(F, _kept(_njit(**_ALLOCATING)(function)))


def part(function: F) -> F:
    """A kernel's part, called by kernels alone; the cache has it as a part of them."""
    return cast(F, _of_wide_integers(_njit(**_OPTIONS, **_CALLED_BY_KERNELS)(function)))


def allocating_part(function: F) -> F:
    """The same for functions that make arrays."""
    return cast(F, _of_wide_integers(_njit(**_ALLOCATING, **_CALLED_BY_KERNELS)(function)))


def inlined(function: F) -> F:
    """A kernel's part that is compiled into its callers: for what is called all the time."""
    return cast(F, _of_wide_integers(_njit(**_OPTIONS, **_CALLED_BY_KERNELS, forceinline=True)(function)))


def _of_wide_integers(dispatcher: Any) -> Any:
    """The same, compiled once for integers of all widths, constants too: numba would do so for each, and for guesses while it infers."""
    template_for = dispatcher.get_call_template

    def get_call_template(args: Sequence[types.Type], kws: Mapping[str, types.Type]) -> Any:
        return template_for([types.int64 if isinstance(t, types.Integer) else t for t in map(types.unliteral, args)], kws)

    dispatcher.get_call_template = get_call_template
    return dispatcher


class _Locator(_caching._CacheLocator):  # type: ignore[misc]  # untyped
    """Finds each kernel in the one folder of all, whatever the path and date of its own file."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._module = function.__module__

    @classmethod
    def from_function(cls, function: Callable[..., Any], _: str) -> "_Locator":
        return cls(function)

    def get_cache_path(self) -> str:
        return str(cache_folder())

    def get_source_stamp(self) -> str:
        return Path(self.get_cache_path()).name

    def get_disambiguator(self) -> str:
        return self._module


class _Format(_caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = [_Locator]


class _Cache(_caching.FunctionCache):  # type: ignore[misc]
    """A kernel's files as numba keeps them, where they can be read: a power cut leaves files that are cut short, or empty."""

    _impl_class = _Format

    def load_overload(self, signature: Any, target: Any) -> Any:
        try:
            return super().load_overload(signature, target)
        except Exception:  # noqa: BLE001 - unpickling raises anything; it is compiled again, and saved over what is damaged
            return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        with contextlib.suppress(OSError):  # a folder that came with the package cannot be written everywhere
            try:
                super().save_overload(signature, compiled)
            except OSError:
                raise
            except Exception:  # noqa: BLE001 - the index, which lists what is kept, is damaged
                self.flush()
                super().save_overload(signature, compiled)
            _remove_unfinished(Path(self.cache_path))


def _remove_unfinished(folder: Path) -> None:
    """Removes files whose writing began long before the newest one was written: who wrote them was killed."""
    written = {path: path.stat().st_mtime for path in folder.iterdir()}
    for path, seconds in written.items():
        if ".tmp." in path.name and seconds < max(written.values()) - _UNFINISHED_SECONDS:
            path.unlink(missing_ok=True)


def _kept(dispatcher: Any) -> Any:
    if cache_folder() is not None and dispatcher.py_func.__module__.endswith("kernel"):  # what the folder's name speaks of
        dispatcher._cache = _Cache(dispatcher.py_func)
    return dispatcher


@cache
def cache_folder() -> Path | None:
    """Where compiled kernels are kept: NUMBA_CACHE_DIR, else beside the sources, else the user's cache; None where none is writable.

    Where they are all there it need not be. A folder in which somebody else may put code is passed over: what is in it is run.
    """
    name = f"kernels-{_digest()}"
    folders = [folder / name for folder in _candidates()]
    return next((folder for folder in folders if (_is_filled(folder) or _is_writable(folder)) and _is_trusted(folder)), None)


_compiling = event.TimingListener()
event.register("numba:compile", _compiling)


class _InterruptedAfterwards(event.Listener):
    """While kernels are compiled, a first Ctrl-C takes effect when that is done, some seconds later: LLVM calls back to Python, where a
    KeyboardInterrupt is lost, and numba makes other errors of one. A second Ctrl-C does not wait. Where Ctrl-C is ignored, as in what a
    shell started in the background, SIGTERM may have a handler that raises the same."""

    def __init__(self) -> None:
        self._compiling = 0
        self._number = signal.SIGINT
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._pressed = False

    def on_start(self, event: event.Event) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._compiling += 1
        if self._compiling > 1:
            return
        self._number = signal.SIGINT if callable(signal.getsignal(signal.SIGINT)) else signal.SIGTERM
        handler = signal.getsignal(self._number)
        if callable(handler):
            self._handler, self._pressed = handler, False
            signal.signal(self._number, self._remember)

    def _remember(self, *_: object) -> None:
        self._pressed = True
        signal.signal(self._number, self._handler)

    def on_end(self, event: event.Event) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._compiling -= 1
        if self._compiling == 0 and self._handler is not None:
            handler, self._handler = self._handler, None
            signal.signal(self._number, handler)
            if self._pressed:
                handler(self._number, sys._getframe())


event.register("numba:compile", _InterruptedAfterwards())  # behind the clock, which it may keep from nothing


def compiling_seconds() -> float:
    """Time that this process has spent on compiling so far; loading from the cache is not in it."""
    return _compiling.duration if _compiling.done else 0.0


def is_first_use() -> bool:
    """True if no kernel is kept yet, so that what runs next has to be compiled: some ten seconds each for bound, scheduler and search."""
    folder = cache_folder()
    return folder is None or not _is_filled(folder)


def _candidates() -> Iterator[Path]:
    if given := getattr(numba.config, "CACHE_DIR", ""):
        yield Path(given)
    yield Path(__file__).parent / "__pycache__"
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(home):
        yield Path(home) / "baechi-ext"


def _is_filled(folder: Path) -> bool:
    return any(folder.glob("*.nbi"))


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(_MODE, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _is_trusted(folder: Path) -> bool:
    """True if it belongs to this user, to root, or to whoever has these sources, and others cannot write there."""
    status = folder.lstat()
    owners = (os.geteuid(), 0, os.stat(__file__).st_uid)
    return stat.S_ISDIR(status.st_mode) and not status.st_mode & stat.S_IWOTH and status.st_uid in owners


def _digest() -> str:
    """The digest of the kernel files, of this one, which says how to compile them, and of whose machine code that is."""
    package = Path(__file__).parent.parent
    contents = [path.read_bytes() for path in (Path(__file__), *sorted(package.rglob("*kernel.py")))]
    target = (numba.__version__, sys.implementation.cache_tag, cpu_target.target_context.codegen().magic_tuple())
    return hashlib.sha256(b"\0".join([repr(target).encode(), *contents])).hexdigest()[:16]
