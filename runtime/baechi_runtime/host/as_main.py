"""Running a script as `python SCRIPT ARGUMENTS` does."""

import os
import runpy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from baechi_ext.errors import BaechiError, FileError
from baechi_runtime.host.interrupts import INTERRUPTED


class EndedError(BaseException):
    """Ends a script in the middle. The script's own `except Exception` does not catch it."""


def require_script(path: str) -> None:
    """Raises FileError where there is no such file."""
    if not Path(path).is_file():
        raise FileError(f"cannot read script {path!r}; name a Python file before the arguments that follow --")


def run_as_main(path: Path, arguments: tuple[str, ...]) -> Any:
    """The script's exit code, as sys.exit takes it. An exception of its own is shown as Python shows it, and its exit code is 1.

    Raises BaechiError where placing says why nothing, or nothing more, is placed, and KeyboardInterrupt; SystemExit in a process that the
    script has forked and that comes to its end, as it would without us: what there is to say is the other one's.
    """
    owner = os.getpid()
    try:
        code = _code_of(path, arguments)
    except KeyboardInterrupt:
        if os.getpid() == owner:
            raise
        code = INTERRUPTED
    if os.getpid() != owner:
        raise SystemExit(code)
    return code


def _code_of(path: Path, arguments: tuple[str, ...]) -> Any:
    try:
        with _main(path, arguments):
            _leave(runpy.run_path(str(path), run_name="__main__"))
    except (BaechiError, KeyboardInterrupt):
        raise
    except (SystemExit, Exception) as e:  # noqa: BLE001 - whatever the script raises
        begun = _in_script(e.__traceback__, path)
        if begun is not None:
            _leave(begun.tb_frame.f_globals)
        if isinstance(e, SystemExit):
            return e.code
        # As Python itself leaves what nobody caught: whoever ends with the process looks there.
        sys.last_type, sys.last_value, sys.last_traceback = type(e), e, begun or e.__traceback__
        sys.excepthook(type(e), e.with_traceback(begun or e.__traceback__), e.__traceback__)
        return 1
    return 0


def _leave(names: Mapping[str, Any]) -> None:
    """Leave the script's classes where pickle looks for them: its threads and what it has given to atexit go on when it has ended."""
    vars(sys.modules["__main__"]).update({name: value for name, value in names.items() if not name.startswith("__")})


@contextmanager
def _main(path: Path, arguments: tuple[str, ...]) -> Iterator[None]:
    """Sets sys.argv and sys.path as `python SCRIPT ARGUMENTS` does, and puts them back afterwards. The path begins with the folder of this
    command, or the one it is started in, unless Python was told to leave that out."""
    argv, search = sys.argv, sys.path
    sys.argv, sys.path = [str(path), *arguments], [str(path.resolve().parent), *search[not sys.flags.safe_path :]]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, search


def _in_script(step: TracebackType | None, path: Path) -> TracebackType | None:
    """The first step of a traceback that is in the script; None where there is none."""
    while step is not None and step.tb_frame.f_code.co_filename != str(path):
        step = step.tb_next
    return step
