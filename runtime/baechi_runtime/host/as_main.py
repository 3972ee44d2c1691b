"""Running a script as `python SCRIPT ARGUMENTS` does."""

import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from baechi_ext.errors import BaechiError, FileError


class EndedError(BaseException):
    """Ends a script in the middle. The script's own `except Exception` does not catch it."""


def require_script(path: str) -> None:
    """Raises FileError where there is no such file."""
    if not Path(path).is_file():
        raise FileError(f"cannot read script {path!r}; name a Python file before the arguments that follow --")


def run_as_main(path: Path, arguments: tuple[str, ...]) -> Any:
    """The script's exit code, as sys.exit takes it. An exception of its own is shown as Python shows it, and its exit code is 1.

    Raises BaechiError where placing says why nothing, or nothing more, is placed, and KeyboardInterrupt.
    """
    try:
        with _main(path, arguments):
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as e:
        return e.code
    except (BaechiError, KeyboardInterrupt):
        raise
    except Exception as e:  # noqa: BLE001 - whatever the script raises
        traceback.print_exception(_from_script(e, path))
        return 1
    return 0


@contextmanager
def _main(path: Path, arguments: tuple[str, ...]) -> Iterator[None]:
    """Sets sys.argv and sys.path as `python SCRIPT ARGUMENTS` does, and puts them back afterwards."""
    argv, search = sys.argv, sys.path
    sys.argv, sys.path = [str(path), *arguments], [str(path.resolve().parent), *search[1:]]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, search


def _from_script(error: Exception, path: Path) -> Exception:
    """The error with a traceback that begins in the script."""
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename != str(path):
        step = step.tb_next
    return error.with_traceback(step) if step is not None else error
