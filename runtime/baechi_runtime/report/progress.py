"""Progress: what is being done, said on stderr, or in a notebook's cell, where it takes over a second. stdout is for results alone."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import TYPE_CHECKING, Any

from baechi_ext.errors import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_FIRST_PAUSE_SECONDS = 0.5
_LONGER_PAUSE = 2.0
_LONG_SECONDS = 10.0
"""Work that took at least this long says so at its end, where no clock was seen running."""
_BETWEEN_NEWS_SECONDS = 0.2
"""No eye needs them sooner in a cell, where each is a message."""
_SHOW_CURSOR = "\x1b[?25h"
_shown: list["Progress"] = []
"""The displays on the terminal now."""
_loudness = {"quiet": False, "verbose": False}


def set_loudness(*, quiet: bool, verbose: bool) -> None:
    """From here on progress says nothing, or with `verbose` a line for everything, with how long it took."""
    _loudness.update(quiet=quiet, verbose=verbose and not quiet)


def one_line(text: str) -> str:
    """The text as a line of a terminal: names in it, of files and ops, may hold line ends, and what a terminal would obey."""
    return text if text.isprintable() else " ".join(printable(text).splitlines())


@contextmanager
def progress(message: str, delay_seconds: float = 1.0) -> Iterator[Callable[[str], None]]:
    """While its body runs, a spinner with a clock on a terminal, a line in a notebook's cell, or one plain line elsewhere, first seen after
    `delay_seconds`.

    The body gets a function that takes news. They follow the message: at once on a terminal and in a notebook, elsewhere in lines of their
    own that become ever rarer. NO_COLOR and TERM=dumb are respected (by rich).
    """
    message = one_line(message)
    if _loudness["quiet"]:
        yield lambda news: None
        return
    if _loudness["verbose"]:
        with _every_line(message) as show:
            yield lambda news: show(one_line(news))
        return
    shown = _shown_by(message, delay_seconds)
    timer = Timer(delay_seconds, shown.begin)
    timer.daemon = True
    timer.start()
    try:
        yield lambda news: shown.show(one_line(news))
    finally:
        timer.cancel()
        timer.join()
        shown.end()


@contextmanager
def _every_line(message: str) -> Iterator[Callable[[str], None]]:
    begin, lines = time.monotonic(), _SparseLines(message, 0.0)
    lines.begin()
    try:
        yield lines.show
    finally:
        _write_line(f"  took {time.monotonic() - begin:.2f} s")


def _shown_by(message: str, delay_seconds: float) -> "_Spinner | _CellLine | _SparseLines":
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if hasattr(shell, "kernel"):
        return _CellLine(message)
    console = _terminal()
    return _SparseLines(message, delay_seconds) if console is None else _Spinner(message, console)


def _terminal() -> "Console | None":
    """The console that a spinner can be shown on; None where stderr is no terminal, or rich is missing, which `baechi doctor` is to say."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(file=sys.stderr, highlight=False)
    return console if console.is_terminal and not console.is_dumb_terminal else None


def rounds(show: Callable[[str], None], total: int) -> Callable[[int], None]:
    """Tells `show` before round number i (from 0) of `total` how many are done, and about how long the rest takes."""
    begin = time.monotonic()

    def news(i: int) -> None:
        spent = time.monotonic() - begin
        left = f", about {_seconds(spent / i * (total - i))} left" if i else ""
        show(f"round {i + 1} of {total}{left}")

    return news


def restore_terminal() -> None:
    """Takes all progress off the terminal, and shows its cursor again: for the end, however it comes. Ctrl-C may come while a spinner is
    being put away."""
    if not _shown:
        return
    while _shown:
        _shown.pop().stop()
    sys.stderr.write(_SHOW_CURSOR)
    sys.stderr.flush()


def _seconds(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


class _Spinner:
    """A line on a terminal: what is being done, the last news, and how long it has taken so far."""

    def __init__(self, message: str, console: "Console") -> None:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.table import Column

        # Where the line is too long the words give way: rich would take the room from the spinner and the clock.
        self._width = max(console.width - len("⠋  0:00:00"), 1)
        column = Column(no_wrap=True, overflow="ellipsis", max_width=self._width)
        words = TextColumn("{task.description}", markup=False, table_column=column)
        self._message = message
        self._live = Progress(SpinnerColumn(), words, TimeElapsedColumn(), console=console, transient=True)
        self._task = self._live.add_task(f"{message} ...", total=None)

    def begin(self) -> None:
        _shown.append(self._live)
        self._live.start()

    def show(self, news: str) -> None:
        self._live.update(self._task, description=_fitted(f"{self._message}: {news}", self._width))

    def end(self) -> None:
        self._live.stop()
        if self._live in _shown:
            _shown.remove(self._live)


def _fitted(line: str, width: int) -> str:
    """The line without the last of its news, which have commas between them, where it is too long: half a number would be another one."""
    while len(line) > width and ", " in line.rpartition(": ")[2]:
        line = line.rpartition(", ")[0]
    return line


class _CellLine:
    """A line in the cell of a notebook: what is being done, the last news, and how long it has taken by then; empty at the end."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._begin = time.monotonic()
        self._next_seconds = 0.0
        self._handle: Any = None

    def begin(self) -> None:
        from IPython.display import display

        self._handle = display({"text/plain": f"{self._message} ..."}, raw=True, display_id=True)

    def show(self, news: str) -> None:
        if self._handle is not None and time.monotonic() >= self._next_seconds:
            self._update(f"{self._message}: {news} ({_seconds(time.monotonic() - self._begin)})")
            self._next_seconds = time.monotonic() + _BETWEEN_NEWS_SECONDS

    def end(self) -> None:
        if self._handle is not None:
            self._update("")

    def _update(self, text: str) -> None:
        self._handle.update({"text/plain": text}, raw=True)


class _SparseLines:
    """Plain lines, with pauses that grow."""

    def __init__(self, message: str, delay_seconds: float) -> None:
        self._message = message
        self._begin = time.monotonic()
        self._said = False
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        self._next_seconds = self._begin + delay_seconds + self._pause_seconds

    def begin(self) -> None:
        self._said = True
        _write_line(f"{self._message} ...")

    def show(self, news: str) -> None:
        if time.monotonic() >= self._next_seconds:
            _write_line(f"  {news}")
            self._pause_seconds *= _LONGER_PAUSE
            self._next_seconds = time.monotonic() + self._pause_seconds

    def end(self) -> None:
        spent = time.monotonic() - self._begin
        if self._said and spent >= _LONG_SECONDS:
            _write_line(f"  took {_seconds(spent)}")


def _write_line(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
