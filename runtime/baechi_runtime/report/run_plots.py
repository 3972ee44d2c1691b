"""`baechi plot`: a run as figures for papers: timelines, memory, busy shares, and methods where several were compared."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from baechi_ext.errors import FileError
from baechi_ext.explain.memory import memory_courses
from baechi_ext.explain.path import critical_ops
from baechi_ext.ir.files import make_folder
from baechi_ext.ir.made_by import MadeBy
from baechi_runtime.files.run_folder import SHARD_PLAN, RunFolder, is_sharded_run
from baechi_runtime.report.figure import require_matplotlib, save_figure
from baechi_runtime.report.palette import LIMIT, device_colour
from baechi_runtime.report.reading import comparison_in, results_of
from baechi_runtime.report.report import Run, Variant
from baechi_runtime.report.run_steps import PREDICTED, steps_of
from baechi_runtime.report.sharded_summary import ShardedRun
from baechi_runtime.report.tables import size_unit, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".pdf")
WIDTH_INCHES = 7.0
_TRANSFER, _PATH, _MEASURED = "#7b8794", "#111111", "#111111"
_MOST_ROWS = 64
"""So many devices, the busiest, have a row: a figure of hundreds is read by nobody, and matplotlib has no room for it."""
_MANY = 20_000
"""From this many ops on a PDF holds them as an image."""


def write_plots(folder: str, out: str | None, command: tuple[str, ...] = ()) -> list[Path]:
    """Writes each plot as PNG and PDF to the folder `out`, by default the run's own, and returns their paths. The run's command and
    versions are in the files as text, and `command`, by which it is plotted.

    Raises MissingBackendError without matplotlib, and what reading the run's folder raises.
    """
    require_matplotlib()
    target = Path(folder if out is None else out)
    title, made_by, figures = _sharded(folder) if is_sharded_run(Path(folder)) else _placed(folder)
    make_folder(target)
    paths: list[Path] = []
    for name, figure in figures.items():
        for suffix in FORMATS:
            paths.append(target / f"{name}{suffix}")
            save_figure(figure, paths[-1], f"{title}: {name}", f"{made_by}; plotted by {MadeBy(command)}")
    return paths


def _placed(folder: str) -> tuple[str, MadeBy, dict[str, "Figure"]]:
    run, compared = RunFolder.load(folder), comparison_in(folder)
    report = results_of(run, compared)
    figures = {"timeline": timeline_figure(run), "memory": memory_figure(run, report), "busy": busy_figure(run)}
    if compared.rows:
        figures["methods"] = methods_figure(compared.rows)
    return f"{run.graph.name}, {run.plan.method}", run.made_by, figures


def _sharded(folder: str) -> tuple[str, MadeBy, dict[str, "Figure"]]:
    run = ShardedRun.load(folder)
    if run.report is None or not run.strategies:
        raise FileError(f"{folder!r} has a shard plan, and no steps to plot; baechi train --sharding={folder}/{SHARD_PLAN} measures some")
    return f"{run.title}, sharded", run.report.made_by, {"strategies": methods_figure(run.strategies)}


def timeline_figure(run: RunFolder) -> "Figure":
    """Every device's ops in a row over time, and in a thin one the tensors it sends; above those of the critical path, which is predicted,
    is a line."""
    steps, path, shown = steps_of(run), critical_ops(run.timeline), _shown(run)
    names = _names(run, shown)
    placement, most_us = run.plan.placement, max(step.step_us for step in steps)
    scale, unit = time_unit(most_us)
    figure = require_matplotlib()(figsize=(WIDTH_INCHES, (0.45 + 0.34 * len(names)) * len(steps) + 0.35), layout="constrained")
    grid = figure.subplots(len(steps), sharex=True, squeeze=False)
    for axes, step in zip(grid[:, 0], steps, strict=True):
        for row, d in enumerate(shown):
            on_path = path if step.kind == PREDICTED else ()
            ops, critical = ([step.span[v] for v in some if v in step.span and placement[v] == d] for some in (step.span, on_path))
            _bars(axes, ops, scale, (row - 0.36, 0.5), device_colour(d), 0.75)
            _bars(axes, critical, scale, (row - 0.42, 0.06), _PATH)
            _bars(axes, [(c.start_us, c.end_us) for c in step.copies if c.source == d], scale, (row + 0.2, 0.14), _TRANSFER)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.55)
        axes.set_title(f"{step.kind}: {step.step_us / scale:.4g} {unit}", loc="left", fontsize=9)
        _quiet(axes)
    grid[-1, 0].set_xlabel(unit + _more(run))
    grid[-1, 0].set_xlim(0, most_us / scale or 1)
    return figure


def memory_figure(run: RunFolder, report: Run) -> "Figure":
    """The memory that every device holds over the predicted step, with its limit, and the peak that was found, where one was."""
    courses, devices, shown = memory_courses(run.timeline), run.plan.cluster.devices, _shown(run)
    scale, unit = time_unit(run.timeline.makespan_us)
    size, size_name = size_unit(max(held for course in courses for _, held in course))
    figure = require_matplotlib()(figsize=(WIDTH_INCHES, 1.1 * len(shown) + 0.4), layout="constrained")
    grid = figure.subplots(len(shown), sharex=True, squeeze=False)[:, 0]
    for i, axes in zip(shown, grid, strict=True):
        device, course = devices[i], courses[i]
        at = [at_us / scale for at_us, _ in course] + [run.timeline.makespan_us / scale]
        held = [bytes_ / size for _, bytes_ in course] + [course[-1][1] / size]
        axes.fill_between(at, held, step="post", color=device_colour(i), alpha=0.25, linewidth=0)
        axes.step(at, held, where="post", color=device_colour(i), linewidth=1.2, label="predicted")
        if i < len(measured := report.peaks.measured or []):
            axes.axhline(measured[i] / size, color=_MEASURED, linestyle=":", linewidth=1, label=f"{report.peaks.found} peak")
        if device.memory_bytes is not None and device.memory_bytes / size < 3 * max(held):
            axes.axhline(device.memory_bytes / size, color=LIMIT, linestyle="--", linewidth=1, label="limit")
        axes.set_ylim(bottom=0)
        axes.set_ylabel(f"{_plain(device.name)}\n{size_name}", fontsize=8)
        _quiet(axes)
    axes.set_xlabel(unit + _more(run))
    axes.set_xlim(0, max(at) or 1)
    axes.legend(loc="lower right", fontsize=7, frameon=False, ncols=3)
    return figure


def busy_figure(run: RunFolder) -> "Figure":
    """The part of the step that every device is busy: predicted, and of the ops of the step that was recorded."""
    steps, shown = steps_of(run), _shown(run)
    figure = require_matplotlib()(figsize=(WIDTH_INCHES, 0.36 * len(shown) * len(steps) + 0.6), layout="constrained")
    axes = figure.subplots()
    labels: list[str] = []
    for d, name in zip(shown, _names(run, shown), strict=True):
        for i, step in enumerate(steps):
            y, part = len(labels), 100 * step.busy_us[d] / step.step_us if step.step_us else 0.0
            axes.barh(y, 100, 0.7, color="#e8eaed")
            axes.barh(y, part, 0.7, color=device_colour(d), alpha=0.6 if i else 1)
            axes.text(101, y, f"{part:.0f}%", va="center", fontsize=8)
            labels.append(f"{name}, {'recorded' if i else step.kind}")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set(xlim=(0, 108), xlabel="busy, % of the step" + _more(run))
    _quiet(axes)
    return figure


def methods_figure(rows: Sequence[Variant]) -> "Figure":
    """The measured steps of every method, or strategy, their median, and the prediction; methods without either are left empty."""
    known = [us for row in rows for us in (*_samples(row), row.predicted_step_us) if us is not None]
    scale, unit = time_unit(max(known, default=1.0))
    figure = require_matplotlib()(figsize=(WIDTH_INCHES, 0.32 * len(rows) + 0.9), layout="constrained")
    axes = figure.subplots()
    for y, row in enumerate(rows):
        axes.plot([us / scale for us in _samples(row)], [y] * len(_samples(row)), "o", color=device_colour(0), alpha=0.4, markersize=4)
        if row.measured_step_us is not None:
            axes.plot(row.measured_step_us.median / scale, y, "|", color=_MEASURED, markersize=14, markeredgewidth=2)
        if row.predicted_step_us is not None:
            axes.plot(row.predicted_step_us / scale, y, "o", color=_TRANSFER, markersize=8, fillstyle="none")
    axes.set_yticks(range(len(rows)), [_plain(row.name) for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel(f"step, {unit}: measured (dots, median a bar) and predicted (ring)")
    _quiet(axes)
    return figure


def _samples(row: Variant) -> tuple[float, ...]:
    return () if row.measured_step_us is None else row.measured_step_us.us


def _shown(run: RunFolder) -> list[int]:
    """The devices that have a row."""
    busy_us = run.timeline.busy_us
    return sorted(sorted(range(len(busy_us)), key=lambda d: -busy_us[d])[:_MOST_ROWS])


def _more(run: RunFolder) -> str:
    """Says how many devices have none."""
    more = len(run.plan.cluster) - _MOST_ROWS
    return f"; the {_MOST_ROWS} busiest devices, {more} more are not shown" if more > 0 else ""


def _names(run: RunFolder, shown: Sequence[int]) -> list[str]:
    return [_plain(run.plan.cluster.devices[d].name) for d in shown]


def _plain(name: str) -> str:
    """A name that matplotlib takes for no formula."""
    return name.replace("$", r"\$")


def _bars(
    axes: "Axes", spans: Sequence[tuple[float, float]], scale: float, y: tuple[float, float], colour: str, alpha: float = 1.0
) -> None:
    """Bars from start to end at the height `y`."""
    scaled = [(start / scale, (end - start) / scale) for start, end in spans]
    if scaled:
        axes.broken_barh(scaled, y, facecolors=colour, alpha=alpha, linewidth=0.15, edgecolor="white", rasterized=len(scaled) > _MANY)


def _quiet(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.xaxis.label.set_fontsize(8)
