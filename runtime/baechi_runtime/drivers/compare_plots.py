"""A comparison to look at: a table and bars on a terminal, and a picture by matplotlib."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from baechi_ext.ir.made_by import MadeBy
from baechi_runtime.drivers.comparison import UNPLACED, Comparison, Contender
from baechi_runtime.report.figure import save_figure
from baechi_runtime.report.report import SINGLE
from baechi_runtime.report.run_plots import methods_figure
from baechi_runtime.report.tables import as_range, as_time, console, table_of
from baechi_runtime.report.tables import show as show_table

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH, _BAR, _TIME = 170, 60, len("  123.4 ms")
_LETTERS = 110
"""Letters in a line of small print in the picture."""
_COLUMNS = ("method", "predicted", "measured", "min to max", "speed-up", "interval", "one device", "best", "note")
_PLAIN, _BLOCKS = ("#", "+", "-"), ("\u2588", "\u2593", "\u2591")


def show(comparison: Comparison) -> None:
    """Prints the table, the bars and the recommendation on stdout."""
    out = console(_WIDTH)
    show_table(steps_table(comparison), width=_WIDTH)
    for line in ("", *bars(comparison, _PLAIN if out.options.ascii_only else _BLOCKS, out.width), ""):
        out.print(Text(line), no_wrap=True)
    *found, recommendation = comparison.lines()
    for line in found:
        out.print(Text(line), soft_wrap=True)
    out.print(Text(recommendation), soft_wrap=True, style="bold")


def steps_table(comparison: Comparison) -> "Table":
    """The methods, after the unplaced step where that was measured: predicted, measured, and what can be told of the differences."""
    rows = [_cells(comparison, contender) for contender in comparison.contenders]
    if UNPLACED in comparison.measurement.samples:
        rows.insert(0, (comparison.unplaced, "-", *_seen(comparison, UNPLACED), "unplaced"))
    return table_of(_COLUMNS, rows, words=["note"])


def _cells(comparison: Comparison, contender: Contender) -> tuple[str, ...]:
    method, predicted = contender.method, comparison.predicted_us(contender)
    before = (method, "-" if predicted is None else as_time(predicted))
    if method not in comparison.measured:
        return *before, "-", "-", "-", "-", "-", "-", f"not measured: {contender.refusal}"
    return *before, *_seen(comparison, method), comparison.note(contender)


def _seen(comparison: Comparison, name: str) -> tuple[str, ...]:
    """The cells of what was measured."""
    samples, gain = comparison.samples(name), comparison.gain(name)
    best = comparison.best or name
    return (
        as_time(samples.median),
        as_range(samples.us),
        "-" if gain is None else f"{gain.median:.2f}",
        "-" if gain is None or name == SINGLE else f"{gain.low:.2f} to {gain.high:.2f}",
        "-" if gain is None or name == SINGLE else beside(comparison, name, SINGLE),
        "the best" if name == best else beside(comparison, name, best),
    )


def beside(comparison: Comparison, method: str, other: str) -> str:
    """Says "faster", "slower" or "can't tell" of a method's step beside another's."""
    if not comparison.differ(method, other):
        return "can't tell"
    return "faster" if comparison.median(method) < comparison.median(other) else "slower"


def bars(comparison: Comparison, marks: tuple[str, str, str] = _BLOCKS, most: int = _WIDTH) -> list[str]:
    """A bar for each variant that was measured: up to its least step, its median and its longest. No line is longer than `most`."""
    named = {comparison.unplaced: comparison.measurement.samples.get(UNPLACED)}
    named |= {method: comparison.samples(method) for method in comparison.measured}
    there = {name: samples for name, samples in named.items() if samples is not None}
    if not there:
        return []
    longest = max(max(samples.us) for samples in there.values())
    width = max(map(len, there))
    full = max(1, min(_BAR, most - width - 2 - _TIME))
    lines = []
    for name, samples in there.items():
        ends = [round(full * us / longest) for us in (samples.min, samples.median, max(samples.us))]
        parts = zip(marks, (ends[0], ends[1] - ends[0], ends[2] - ends[1]), strict=True)
        lines.append(f"{name:<{width}}  {''.join(mark * length for mark, length in parts):<{full}}  {as_time(samples.median)}")
    return [*lines, f"{'':<{width}}  {marks[0]} least  {marks[1]} to the median  {marks[2]} to the longest"]


def save_steps(path: Path, comparison: Comparison, made_by: MadeBy) -> None:
    """Writes all steps, their medians, what was predicted, and the recommendation. Raises MissingBackendError without matplotlib,
    FileError."""
    said, title = textwrap.wrap(comparison.recommendation(), _LETTERS), f"{comparison.model}, {comparison.executor}"
    figure = methods_figure([row for row in comparison.report().rows if row.measured_step_us is not None])
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.3 + 0.16 * len(said))
    figure.axes[0].set_title(title, parse_math=False)
    figure.supxlabel("\n".join(said), x=0.01, ha="left", fontsize=8, parse_math=False)
    save_figure(figure, path, title, str(made_by))
