"""Plots, for which matplotlib is an optional dependency."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baechi_ext.errors import FileError, MissingBackendError


def require_matplotlib() -> Any:
    """Its class Figure, which needs no display. Raises MissingBackendError where it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise MissingBackendError("plots need matplotlib; pip install 'baechi-ext[plots]', or leave out --plot") from e
    return Figure


def save_figure(figure: Any, path: Path) -> None:
    """Writes a figure as the format that the path's suffix says; the same file for the same figure. Raises FileError where it can't be."""
    import matplotlib as mpl

    try:
        with mpl.rc_context({"svg.hashsalt": path.stem}):
            figure.savefig(path, metadata={"Date": None})
    except OSError as e:
        raise FileError(f"cannot write {str(path)!r}: {e.strerror}; choose another --out") from e


def save_distributions(path: Path, title: str, curves: Mapping[str, Sequence[float]]) -> None:
    """Writes the distribution functions of sorted values, by name. Raises MissingBackendError without matplotlib, FileError."""
    figure = require_matplotlib()(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, values in curves.items():
        if values:
            axes.step([values[0], *values], [i / len(values) for i in range(len(values) + 1)], where="post", label=name)
    axes.set(title=title, xlabel="step / lower bound", ylabel="share of the graphs")
    axes.legend()
    save_figure(figure, path)
