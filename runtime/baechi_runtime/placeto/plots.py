"""The distributions of a comparison of placers as a plot."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from baechi_ext.ir.made_by import MadeBy
from baechi_runtime.report.figure import require_matplotlib, save_figure


def save_distributions(path: Path, title: str, curves: Mapping[str, Sequence[float]], made_by: MadeBy) -> None:
    """Writes the distribution functions of sorted values, by name. Raises MissingBackendError without matplotlib, FileError."""
    figure = require_matplotlib()(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, values in curves.items():
        if values:
            axes.step([values[0], *values], [i / len(values) for i in range(len(values) + 1)], where="post", label=name)
    axes.set(title=title, xlabel="step / lower bound", ylabel="share of the graphs")
    axes.legend()
    save_figure(figure, path, title, str(made_by))
