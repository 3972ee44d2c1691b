"""The line with which a command says why it failed. A worker's begins with a mark that its launcher gave it: a script may begin lines with
`error:`, too, and those are not for the launcher."""

import os

MARK = "BAECHI_ERROR_MARK"
"""The launcher's process id, and the mark of its workers' lines. What a worker starts inherits the variable, and is of another parent."""


def error_line(message: str) -> str:
    """The line, with its end."""
    launcher, _, mark = os.environ.get(MARK, "").partition(" ")
    return f"{mark if launcher == str(os.getppid()) else ''}error: {message}\n"
