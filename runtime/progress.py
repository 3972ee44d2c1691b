"""Progress: what is being done, said on stderr where it takes over a second. stdout is for results alone."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

from rich.console import Console
from rich.text import Text


@contextmanager
def progress(message: str, delay_seconds: float = 1.0) -> Iterator[None]:
    """While its body runs, a spinner on a terminal or one plain line elsewhere, first seen after `delay_seconds`.

    NO_COLOR and TERM=dumb are respected (by rich).
    """
    console = Console(file=sys.stderr, highlight=False)
    spinner = console.status(Text(f"{message} ...")) if console.is_terminal and not console.is_dumb_terminal else None
    timer = Timer(delay_seconds, spinner.start if spinner else lambda: _write_line(f"{message} ..."))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if spinner:
            spinner.stop()


def _write_line(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
