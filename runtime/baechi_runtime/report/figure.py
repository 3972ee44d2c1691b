"""Figures, for which matplotlib is an optional dependency."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baechi_ext.errors import MissingBackendError
from baechi_ext.ir.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SAID = {".svg": ("Description", "Date"), ".pdf": ("Subject", "CreationDate"), ".png": ("Description", "Creation Time")}
"""By format: where it is said who made the figure, and what is left out, for it differs from run to run."""


def require_matplotlib(otherwise: str = "") -> "type[Figure]":
    """Its class Figure, which needs no display. Raises MissingBackendError, saying what can be done `otherwise`, without it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise MissingBackendError("plots need matplotlib; pip install 'baechi-ext[plots]'" + otherwise) from e
    return Figure


def save_figure(figure: Any, path: Path, title: str, made_by: str) -> None:
    """Writes a figure as the format that the path's suffix says, with its title and who made it as text in the file; the same file for the
    same figure and text. Raises FileError where it can't be."""
    import matplotlib as mpl

    drawn = io.BytesIO()
    who, when = _SAID[path.suffix]
    about = {"Title": title, who: made_by, when: None}
    with mpl.rc_context({"svg.hashsalt": path.stem, "pdf.fonttype": 42}):
        figure.savefig(drawn, format=path.suffix.removeprefix("."), metadata=about, dpi=200)
    write_bytes(path, drawn.getvalue())
