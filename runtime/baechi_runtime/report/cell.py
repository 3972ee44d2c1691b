"""A plan's step, and tables, as the cell of a notebook shows them: HTML that needs nothing else. Text and lines are in the colour of the
cell's own text, and a device has a colour that is seen on light and on dark ground."""

from collections.abc import Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING

from baechi_ext.ir.op_graph import PHASES
from baechi_ext.simulate import Timeline
from baechi_runtime.report.palette import device_colour
from baechi_runtime.report.tables import as_size, as_time, share_of

if TYPE_CHECKING:
    from rich.table import Table

MOST_DEVICES = 16
"""Rows of the timeline."""
_NAMES, _WIDTH, _ROW, _BAR, _SHARPNESS = 110, 600, 24, 15, 2
"""Pixels: of a device's name, the step, a device's row and its bar; and how many parts of a pixel are told apart."""
_TABLE = '<table style="color:inherit">'
"""Where a page says nothing of its kind, tables are black."""
_SHADES = dict(zip(PHASES, (1.0, 0.65, 0.4), strict=True))


def page_of(title: str, *parts: str) -> str:
    """The parts of a cell below its title."""
    return f"<div><p><b>{escape(title)}</b></p>{''.join(parts)}</div>"


def facts_of(facts: Mapping[str, str]) -> str:
    """Names above their values, side by side."""
    cells = "".join(f'<td style="text-align:left"><small>{escape(name)}</small><br/>{escape(value)}</td>' for name, value in facts.items())
    return f"{_TABLE}<tr>{cells}</tr></table>"


def lines_of(lines: Iterable[str]) -> str:
    """A paragraph for each line."""
    return "".join(f"<p><small>{escape(line)}</small></p>" for line in lines)


def html_of(table: "Table") -> str:
    """A table of `tables.table_of`."""
    columns = [(column, "right" if column.justify == "right" else "left") for column in table.columns]
    head = "".join(f'<th style="text-align:{side}">{escape(str(column.header))}</th>' for column, side in columns)
    rows = zip(*([f'<td style="text-align:{side}">{escape(str(cell))}</td>' for cell in c.cells] for c, side in columns), strict=True)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f"{_TABLE}<tr>{head}</tr>{body}</table>"


def timeline_of(timeline: Timeline) -> str:
    """A picture of the step: for each device a bar where it computes, and below it a thinner one where it receives tensors."""
    step_us, devices = timeline.makespan_us, timeline.cluster.devices
    shown = range(min(len(devices), MOST_DEVICES))
    height = _ROW * len(shown) + 20
    rows = "".join(_row(timeline, d) for d in shown)
    axis = "".join(
        f'<text x="{x}" y="{height - 5}" text-anchor="{anchor}" fill="currentColor">{text}</text>'
        for x, anchor, text in ((_NAMES, "start", "0"), (_NAMES + _WIDTH, "end", as_time(step_us)))
    )
    more = [f"{len(devices) - len(shown)} more devices"] if len(devices) > len(shown) else []
    legend = "; ".join([f"{', '.join(PHASES)} from strong to faint", "thin: tensors on their way to the device", *more])
    return (
        f'<svg role="img" aria-label="timeline of the step" viewBox="0 0 {_NAMES + _WIDTH} {height}" style="max-width:{_NAMES + _WIDTH}px" '
        f'font-size="12" font-family="sans-serif">{rows}{axis}</svg>{lines_of([legend])}'
    )


def _row(timeline: Timeline, device: int) -> str:
    """One device's name and bars, with what it does and holds where the mouse is on it."""
    ops, y, name = timeline.device_order()[device], _ROW * device, timeline.cluster.devices[device].name
    busy, peak = timeline.busy_us[device], timeline.peak_memory_bytes[device]
    said = f"{name}: {len(ops)} ops, {share_of(busy, timeline.makespan_us)} busy, {as_size(peak)} at most"
    bars = ""
    for phase, shade in _SHADES.items():
        times = ((timeline.start_us[v], timeline.end_us[v]) for v in ops if timeline.graph.ops[v].phase == phase)
        bars += _bars(times, timeline.makespan_us, y + 2, _BAR, f'fill="{device_colour(device)}" fill-opacity="{shade}"')
    coming = ((t.start_us, t.end_us) for t in timeline.transfers if t.target == device)
    bars += _bars(coming, timeline.makespan_us, y + 3 + _BAR, 3, 'fill="currentColor" fill-opacity="0.6"')
    shown = name if len(name) <= 16 else f"{name[:7]}…{name[-8:]}"
    return f'<g><title>{escape(said)}</title><text x="0" y="{y + 14}" fill="currentColor">{escape(shown)}</text>{bars}</g>'


def _bars(times: Iterable[tuple[float, float]], step_us: float, y: int, height: int, paint: str) -> str:
    """One path: what is so near that no eye tells it apart is one bar, so thousands of ops take little room; what is alone is seen, however
    short it is."""
    scale = _WIDTH * _SHARPNESS / step_us if step_us > 0 else 0.0
    merged: list[list[int]] = []
    for start_us, end_us in sorted((start, end) for start, end in times if end > start):
        start, end = int(start_us * scale), int(end_us * scale)
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([start, max(end, start + 1)])
    if not merged:
        return ""
    path = "".join(f"M{_NAMES + a / _SHARPNESS:g} {y}h{(b - a) / _SHARPNESS:g}v{height}h{(a - b) / _SHARPNESS:g}z" for a, b in merged)
    return f'<path d="{path}" {paint}/>'
