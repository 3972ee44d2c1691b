"""Ctrl-C; and SIGTERM, with which Slurm and Kubernetes end a job, and SIGHUP, with which a lost connection does. Both are taken for Ctrl-C,
but for the exit code and a limit of time. What is said of SIGTERM below holds for SIGHUP, too; nohup has that ignored, and it stays so.

Ctrl-C while a library is imported, or the guards of a compiled call are checked, takes effect when that is done; in a destructor, or a weak
reference's callback, where Python drops exceptions, soon after.

A KeyboardInterrupt in the midst of an import leaves half a module behind, and some libraries go on with that: torch's own extension imports
numpy and takes any error for numpy's absence. In a guard TorchDynamo takes any error for a guard that failed, and the script goes on.
"""

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import PurePath
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any, TypeVar

from baechi_runtime.host.error_line import error_line

T = TypeVar("T")

INTERRUPTED = 128 + signal.SIGINT
"""The exit code."""
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_PRESS_AGAIN_SECONDS = 0.05
_TERM_SECONDS = 9.0
"""Time to end in after SIGTERM; then the process is ended, whatever it does. Docker kills it after 10, Slurm and Kubernetes after 30."""
_INSTALLED = {"site-packages", "dist-packages"}
_OURS = {"__main__", "baechi_ext", "baechi_runtime"}
"""Left to the caller: nothing goes on with half of these, and what is run as a script may train for hours."""
_GUARDS = {"torch._dynamo.guards", "baechi_ext.capture.torch_guards"}


def signal_name(number: int) -> str:
    """SIGKILL, or where a signal has no name, as those that programs may use as they like, its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def wait_for_imports() -> None:
    """From here on a first Ctrl-C waits until no installed package is being imported and no guard checked; a second one does not. Other
    modules, where a script may train, are interrupted at once, as they are by Python; where Python drops that, once more. SIGTERM is the
    same. To be called in the main thread."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _Waiting())
        sys.unraisablehook = _or_pressed_again(sys.unraisablehook)
    ours = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _term)
    if ours:
        os.register_at_fork(after_in_child=_as_it_was)


class _Term:
    """The state of ending by SIGTERM."""

    came = 0
    """The signal that did."""
    is_left_to_others = False
    """Another process of the run ends it."""


def was_terminated() -> bool:
    """True if SIGTERM came."""
    return bool(_Term.came)


def exit_code(otherwise: int = INTERRUPTED) -> int:
    """The exit code of a process that was interrupted, or failed: that of SIGTERM where that came."""
    return 128 + _Term.came if _Term.came else otherwise


def unmasked(function: Callable[..., T], *arguments: Any) -> T:
    """The function's answer. Raises KeyboardInterrupt, too, where an error came of one: TensorFlow's tracing asserts, on the way out, that
    nobody was in its way."""
    try:
        return function(*arguments)
    except Exception as e:
        interrupt = next((cause for cause in _causes(e) if isinstance(cause, KeyboardInterrupt)), None)
        if interrupt is None:
            raise
        raise KeyboardInterrupt(*interrupt.args) from e


def raise_if_asked_for(error: BaseException) -> None:
    """Raises the exception that a signal handler raised, where `error` is it or was raised from it. Scripts end themselves so: by SIGALRM
    where their time is up, or SIGUSR1 where Slurm is about to end them. One that a script is handling already is no error's cause."""
    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    for cause in _causes(error, contexts=False):
        if any(frame.f_code in codes for frame, _ in walk_tb(cause.__traceback__)):
            raise cause from cause.__cause__


class PutOff:
    """Signals whose handlers, other than those of Ctrl-C and SIGTERM as they are here, wait while a library is at work that drops what they
    raise, as TorchDynamo does with errors of a trace. To be used in the main thread; elsewhere nothing waits."""

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._came: list[int] = []

    def begin(self) -> None:
        """From here on, signals are noted."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in [(number, signal.getsignal(number)) for number in signal.valid_signals()]:
            if callable(handler) and handler not in (signal.default_int_handler, _term, self._note) and not isinstance(handler, _Waiting):
                self._handlers[number] = signal.signal(number, self._note)

    def end(self) -> None:
        """From here on, signals have their handlers again."""
        while self._handlers:
            number, handler = self._handlers.popitem()
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)

    def hand_out(self) -> None:
        """Run the handlers of what was noted. Raises what they raise."""
        self.end()
        while self._came:
            signal.raise_signal(self._came.pop(0))

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number not in self._came:
            self._came.append(number)


def _code_of(handler: Any) -> CodeType | None:
    called: Any = handler.func if isinstance(handler, partial) else handler
    return getattr(called, "__code__", getattr(called.__call__, "__code__", None)) if callable(called) else None


def _causes(error: BaseException, *, contexts: bool = True) -> Iterator[BaseException]:
    """An error, and all that it came of, each once: an error that is raised again can be among its own causes. Those that were merely being
    handled when it was raised are among them with `contexts`."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and not any(cause is other for other in seen):
        yield cause
        seen.append(cause)
        cause = cause.__cause__ or (cause.__context__ if contexts else None)


def leave_to_others() -> None:
    """From here on neither Ctrl-C nor SIGTERM interrupts this process: another one, of the same run, is told as well, and ends this one. It
    has a few seconds for that; a second Ctrl-C does not wait."""
    if signal.getsignal(signal.SIGTERM) is not _term or threading.current_thread() is not threading.main_thread():
        return  # a program of the user's
    _Term.is_left_to_others = True
    handler = signal.getsignal(signal.SIGINT)

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, handler)
        _thread.start_new_thread(_end_late, ())

    if callable(handler):
        signal.signal(signal.SIGINT, leave)


@contextlib.contextmanager
def ended_at_once() -> Iterator[None]:
    """While its body waits in a library, where no handler of Python's runs, SIGTERM ends the process: for one that has nothing to save."""
    if signal.getsignal(signal.SIGTERM) is not _term or threading.current_thread() is not threading.main_thread():
        yield  # a program of the user's
        return
    ours = [number for number in _ENDING if signal.getsignal(number) is _term]
    for number in ours:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, _term)


@contextlib.contextmanager
def finished_first(seconds: float) -> Iterator[Callable[[], bool]]:
    """While its body runs, Ctrl-C is noted, which the yielded function says, and interrupts it only after so many seconds, or the second
    time. SIGTERM is the same, also where Ctrl-C is ignored. Outside of the main thread nothing changes."""
    handler = signal.getsignal(signal.SIGINT)
    noted, done = threading.Event(), threading.Event()
    if threading.current_thread() is not threading.main_thread() or not (callable(handler) or handler == signal.SIG_IGN):
        yield noted.is_set
        return

    def press_again() -> None:
        if not done.wait(seconds):
            os.kill(os.getpid(), signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        if handler == signal.SIG_IGN and not _Term.came:
            return
        if noted.is_set():
            signal.signal(signal.SIGINT, handler)
            (handler if callable(handler) else signal.default_int_handler)(number, frame)
        else:
            noted.set()
            _thread.start_new_thread(press_again, ())

    signal.signal(signal.SIGINT, note)
    try:
        yield noted.is_set
    finally:
        done.set()
        signal.signal(signal.SIGINT, handler)


def _term(number: int, frame: FrameType | None) -> None:
    """Presses Ctrl-C, once."""
    if _Term.came:
        return
    _Term.came = number
    if number == signal.SIGHUP:
        _leave_terminal()
    _thread.start_new_thread(_end_late, ())
    if _Term.is_left_to_others:
        return
    if callable(signal.getsignal(signal.SIGINT)):
        signal.raise_signal(signal.SIGINT)
    else:  # it is ignored, as by what a shell started in the background
        raise KeyboardInterrupt


def _leave_terminal() -> None:
    """Sends what is still said on a terminal that is gone to nowhere: it would be an error, amid what is saved."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _end_late() -> None:
    time.sleep(_TERM_SECONDS)
    with contextlib.suppress(OSError, ValueError):
        line = error_line("interrupted; it was ended since it did not end by itself")
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode())
    os._exit(exit_code())


def _as_it_was() -> None:
    """In a fork, which whoever forked it ends by SIGTERM."""
    for number in _ENDING:
        if signal.getsignal(number) is _term:
            signal.signal(number, signal.SIG_DFL)


def _or_pressed_again(report: Callable[[Any], Any]) -> Callable[[Any], None]:
    """A hook for exceptions that Python drops, which `report` says, but for a KeyboardInterrupt: that is raised again, somewhere else."""

    def press() -> None:
        time.sleep(_PRESS_AGAIN_SECONDS)
        os.kill(os.getpid(), signal.SIGINT)

    def dropped(of: Any) -> None:
        if issubclass(of.exc_type, KeyboardInterrupt):
            _thread.start_new_thread(press, ())
        else:
            report(of)

    return dropped


class _Waiting:
    """The handler. It takes no locks: the main thread may hold any when it is called."""

    def __init__(self) -> None:
        self._is_due = self._looks_again = False

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        ours, self._looks_again = self._looks_again, False
        if ours and not self._is_due:  # the user's second Ctrl-C has been answered
            return
        pressed_again = self._is_due and not ours
        if _is_lost_in(frame) and not pressed_again:
            self._is_due = True
            _thread.start_new_thread(self._look_again, ())
            return
        self._is_due = False
        signal.default_int_handler(number, frame)

    def _look_again(self) -> None:
        time.sleep(_PRESS_AGAIN_SECONDS)
        self._looks_again = True
        os.kill(os.getpid(), signal.SIGINT)


def _is_lost_in(frame: FrameType | None) -> bool:
    """True where what is raised in `frame` may never reach the caller."""
    while frame is not None:
        if frame.f_globals.get("__name__") in _GUARDS or (frame.f_code.co_name == "<module>" and _is_library(frame)):
            return True
        frame = frame.f_back
    return False


def _is_library(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__")).split(".")[0]
    return package not in _OURS and bool(_INSTALLED & set(PurePath(frame.f_code.co_filename).parts))
