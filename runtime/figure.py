"""Figures, for which matplotlib is an optional dependency."""

import io
from pathlib import Path
from typing import Any

from baechi_ext.errors import MissingBackendError
from baechi_ext.ir.files import write_bytes

_NO_DATE = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}
"""By format: metadata without what differs from run to run."""


def require_matplotlib(otherwise: str = "") -> Any:
    """Its class Figure, which needs no display. Raises MissingBackendError, saying what can be done `otherwise`, without it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise MissingBackendError("plots need matplotlib; pip install 'baechi-ext[plots]'" + otherwise) from e
    return Figure


def save_figure(figure: Any, path: Path) -> None:
    """Writes a figure as the format that the path's suffix says; the same file for the same figure. Raises FileError where it can't be."""
    import matplotlib as mpl

    drawn = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": path.stem, "pdf.fonttype": 42}):
        figure.savefig(drawn, format=path.suffix.removeprefix("."), metadata=_NO_DATE[path.suffix], dpi=200)
    write_bytes(path, drawn.getvalue())
