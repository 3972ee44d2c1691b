"""Plots of a study: box plots of its steps, its learning curves, and what it improves over where runs begin; and of a comparison of
placers its distributions."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from baechi_ext.ir.made_by import MadeBy
from baechi_runtime.placeto.study_table import CONTROLS, LOCAL_SEARCH, UNTRAINED, StudyTable
from baechi_runtime.report.figure import require_matplotlib, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN_INCHES, HEIGHT_INCHES = 4.0, 3.6
STYLES = {UNTRAINED: "--", LOCAL_SEARCH: ":"}


def write_plots(folder: Path, table: StudyTable, made_by: MadeBy) -> list[Path]:
    """Writes boxes.svg, curves.svg and improvement.svg, an axis for each source, and returns their paths."""
    paths = [folder / f"{name}.svg" for name in PLOTS]
    for path, draw in zip(paths, PLOTS.values(), strict=True):
        save_figure(_drawn(table, draw), path, path.stem, str(made_by))
    return paths


def _drawn(table: StudyTable, draw: "Callable[[Axes, StudyTable, str], None]") -> "Figure":
    figure = require_matplotlib()(figsize=(COLUMN_INCHES * len(table.sources), HEIGHT_INCHES), layout="constrained")
    for axes, source in zip(figure.subplots(1, len(table.sources), squeeze=False)[0], table.sources, strict=True):
        axes.set_title(source)
        draw(axes, table, source)
    return figure


def _boxes(axes: "Axes", table: StudyTable, source: str) -> None:
    names = (*table.orders, *CONTROLS)
    values = [[points[-1].best_us / points[0].best_us for points in table.of(source, name).values()] for name in names]
    axes.boxplot(values)
    axes.set_xticks(range(1, len(names) + 1), names, rotation=90)
    axes.set_ylabel("step over that on one device, by run")


def _curves(axes: "Axes", table: StudyTable, source: str) -> None:
    for name in (*table.orders, *CONTROLS):
        runs = list(table.of(source, name).values())
        if runs:
            logs = np.log([[point.best_us / points[0].best_us for point in points] for points in runs])
            style: dict[str, Any] = {"linestyle": STYLES[name], "color": "0.5"} if name in CONTROLS else {}
            axes.plot([point.episodes for point in runs[0]], np.exp(logs.mean(axis=0)), label=name, **style)
    axes.set_xlabel("episodes")
    axes.set_ylabel("best step over that on one device")
    axes.legend(fontsize="x-small")


def _improvement(axes: "Axes", table: StudyTable, source: str) -> None:
    rows = [row for row in table.rows if row.source == source]
    gains = np.array([[1 - row.ratio, row.ratio - row.low, row.high - row.ratio] for row in rows]).reshape(-1, 3) * 100
    places = range(len(rows))
    axes.barh(places, gains[:, 0], xerr=gains[:, [2, 1]].T, color=["0.7" if row.order in CONTROLS else "C0" for row in rows])
    axes.set_yticks(places, [row.order for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("% less than on one device")


PLOTS = {"boxes": _boxes, "curves": _curves, "improvement": _improvement}


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
