"""Bazel starts programs with the system's python3, which knows none of the packages they need: here they start again in .venv."""

import os
import sys
from pathlib import Path
from typing import NoReturn

RUNFILES = Path(__file__).absolute().parents[2]
"""Files declared in the BUILD files, as links into the checkout."""
CHECKOUT = Path(__file__).resolve().parents[2]


def launch(*arguments: str) -> NoReturn:
    """Replaces this process by `python ARGUMENTS` of the checkout's .venv, importing the project from the runfiles alone."""
    python = CHECKOUT / ".venv" / "bin" / "python"
    if not os.access(python, os.X_OK):
        sys.exit(f"error: there is no {python}; run `make .venv/installed` in {CHECKOUT} first")
    path = [str(RUNFILES), str(RUNFILES / "runtime"), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Without PYTHONSAFEPATH `-m` would look in the current folder first, which may be the checkout.
    os.execve(python, [str(python), *arguments], {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"})
