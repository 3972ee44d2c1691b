"""The words of a worker on its stderr: lines in which it says why it failed, which begin with its launcher's mark, and everything else."""

import contextlib
import locale
import os
import sys
import threading
from codecs import getincrementaldecoder
from typing import IO

_AT_ONCE = 1 << 16
_LATE_SECONDS = 2.0
_KEPT_CHARACTERS, _KEPT_LINES = 1 << 13, 30


class Words:
    """Reads a pipe to its end, in a thread. What comes without the mark is shown at once, of rank 0, or its end kept."""

    def __init__(self, pipe: IO[bytes], mark: str, *, shown: bool) -> None:
        self._pipe, self._mark, self._shown = pipe, mark, shown
        self._errors: list[str] = []
        self._end = ""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def errors(self) -> list[str]:
        """The messages of its error lines, all read."""
        self.wait()
        return self._errors

    @property
    def ending(self) -> list[str]:
        """The last lines besides those."""
        self.wait()
        return [line for line in map(str.rstrip, self._end.splitlines()) if line][-_KEPT_LINES:]

    def wait(self) -> None:
        """Waits a while until all that was said is read: a process that a script left behind may go on for long."""
        self._thread.join(timeout=_LATE_SECONDS)

    def _read(self) -> None:
        decoder = getincrementaldecoder(locale.getencoding())("backslashreplace")  # a script may write any bytes
        left, at_end = "", False
        with self._pipe as pipe:
            while not at_end:
                content = os.read(pipe.fileno(), _AT_ONCE)
                at_end = not content
                left = self._taken(left + decoder.decode(content, final=at_end), at_end=at_end)
        if self._end and not self._end.endswith("\n"):  # cut off in mid-line when it died
            self._say("\n")

    def _taken(self, text: str, *, at_end: bool) -> str:
        """Takes in what is complete; returns the rest, which begins with the mark, or a part of it."""
        before, mark, after = text.partition(self._mark)
        while mark:
            self._say(before)
            line, newline, after = after.partition("\n")
            if not newline and not at_end:
                return mark + line
            self._errors.append(line.removeprefix("error:").strip())
            before, mark, after = after.partition(self._mark)
        begun = 0 if at_end else next((n for n in range(len(self._mark) - 1, 0, -1) if before.endswith(self._mark[:n])), 0)
        self._say(before[: len(before) - begun])
        return before[len(before) - begun :]

    def _say(self, text: str) -> None:
        if not text:
            return
        self._end = (self._end + text)[-_KEPT_CHARACTERS:]
        if self._shown:
            show(text)


def show(text: str) -> None:
    """Writes to stderr. Nobody may read it any more, or it is closed: the worker must not wait."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


def new_mark() -> str:
    """A mark that nobody else writes."""
    return f"<{os.urandom(8).hex()}> "
