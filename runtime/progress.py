"""Progress: what is being done, said on stderr where it takes over a second. stdout is for results alone."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

from rich.console import Console
from rich.text import Text

_FIRST_PAUSE_SECONDS = 2.0
_LONGER_PAUSE = 1.5


@contextmanager
def progress(message: str, delay_seconds: float = 1.0) -> Iterator[Callable[[str], None]]:
    """While its body runs, a spinner on a terminal or one plain line elsewhere, first seen after `delay_seconds`.

    The body gets a function that takes news. They follow the message: at once on a terminal, elsewhere in lines of their own that
    become ever rarer. NO_COLOR and TERM=dumb are respected (by rich).
    """
    console = Console(file=sys.stderr, highlight=False)
    spinner = console.status(Text(f"{message} ...")) if console.is_terminal and not console.is_dumb_terminal else None
    timer = Timer(delay_seconds, spinner.start if spinner else lambda: _write_line(f"{message} ..."))
    timer.daemon = True
    timer.start()
    try:
        yield (lambda news: spinner.update(Text(f"{message}: {news}"))) if spinner else _SparseLines(delay_seconds).show
    finally:
        timer.cancel()
        timer.join()
        if spinner:
            spinner.stop()


def rounds(show: Callable[[str], None], total: int) -> Callable[[int], None]:
    """Tells `show` before round number i (from 0) of `total` how many are done, and about how long the rest takes."""
    begin = time.monotonic()

    def news(i: int) -> None:
        spent = time.monotonic() - begin
        left = f", about {_seconds(spent / i * (total - i))} left" if i else ""
        show(f"round {i + 1} of {total}{left}")

    return news


def _seconds(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


class _SparseLines:
    """News as lines, with pauses that grow."""

    def __init__(self, delay_seconds: float) -> None:
        self.pause_seconds = _FIRST_PAUSE_SECONDS
        self.next_seconds = time.monotonic() + delay_seconds + self.pause_seconds

    def show(self, news: str) -> None:
        if time.monotonic() >= self.next_seconds:
            _write_line(f"  {news}")
            self.pause_seconds *= _LONGER_PAUSE
            self.next_seconds = time.monotonic() + self.pause_seconds


def _write_line(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
