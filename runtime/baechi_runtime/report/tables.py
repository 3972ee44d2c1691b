"""Short tables for people; programs read --json.

rich is imported where something is printed: `baechi doctor`, which also says that it is missing, has to do without.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

from baechi_ext.datasets import SPLITS
from baechi_ext.errors import printable
from baechi_ext.place.common import SearchProgress
from baechi_ext.simulate import Timeline

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 140


def print_timeline(timeline: Timeline, lower_bound_us: float, facts: Mapping[str, str]) -> None:
    """Prints on stdout what a simulated step takes, how far that is from its lower bound, and what each device does and holds."""
    step = timeline.makespan_us
    gap = f"{step / lower_bound_us - 1:.1%}" if lower_bound_us > 0 else "0.0%"
    step_facts = {
        "predicted step": as_time(step),
        "lower bound": f"{as_time(lower_bound_us)} (the step is {gap} above it)",
        "transfers": f"{len(timeline.transfers)} ({as_size(timeline.bytes_moved)})",
    }
    columns = zip(timeline.cluster.devices, timeline.device_order(), timeline.busy_us, timeline.peak_memory_bytes, strict=True)
    rows = ((d.name, str(len(order)), share_of(busy, step), as_size(peak), as_limit(d.memory_bytes)) for d, order, busy, peak in columns)
    show(*aligned(step_facts | dict(facts)), table_of(("device", "ops", "busy", "peak memory", "limit"), rows))


def console(width: int = WIDTH) -> "Console":
    """A console on stdout: as wide as the terminal, or, without one, wide enough for all tables."""
    from rich.console import Console

    terminal = Console(file=sys.stdout, highlight=False)
    return terminal if terminal.is_terminal else Console(file=sys.stdout, highlight=False, width=width)


def text_of(*parts: "str | Table", width: int = WIDTH) -> str:
    """Lines and tables as text of this width."""
    from rich.console import Console

    out = StringIO()
    show(*parts, out=Console(file=out, highlight=False, width=width, force_jupyter=False))
    return out.getvalue()


def show(*parts: "str | Table", width: int = WIDTH, out: "Console | None" = None) -> None:
    """Prints lines, as they are, and tables on stdout, or on `out`."""
    from rich.text import Text

    out = out or console(width)
    for part in parts:
        for shown in (part,) if isinstance(part, str) else fitting(part, out.width):
            out.print(Text(printable(shown)) if isinstance(shown, str) else shown, soft_wrap=isinstance(shown, str))


def fitting(table: "Table", width: int) -> Iterator["str | Table"]:
    """The table, or where a cell would be cut at this width, its rows below each other, with a line for each cell that is not empty."""
    names = [str(column.header) for column in table.columns]
    cells = [list(map(str, column.cells)) for column in table.columns]
    least = 0
    for column, texts in zip(table.columns, cells, strict=True):
        whole = texts if column.no_wrap else [word for text in texts for word in text.split()]
        least += max(map(len, [str(column.header), *whole])) + len("  ")
    if least - len("  ") <= width:
        yield table
        return
    aside = max(map(len, names[1:]), default=0)
    for head, *row in zip(*cells, strict=True):
        yield head
        yield from (f"  {name:<{aside}}  {cell}" for name, cell in zip(names[1:], row, strict=True) if cell not in ("", "-"))


def aligned(facts: Mapping[str, str]) -> list[str]:
    """A line for each fact, its name before it; the facts stand below each other."""
    width = max(map(len, facts))
    return [f"{name:<{width}}  {value}" for name, value in facts.items()]


def table_of(names: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[str] = ()) -> "Table":
    """A table whose cells are shown as they are. Text to the left in the first column and those of `words`, which go on in a further line
    where they are long, numbers to the right in the others."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        is_text = name in (names[0], *words)
        table.add_column(name, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def search_news(search: SearchProgress) -> str:
    """A line on how a search stands."""
    speed = f", {search.evaluations / search.seconds:.0f} plans/s" if search.evaluations and search.seconds > 0 else ""
    best = as_time(search.best_us) if not search.excess_bytes else f"{as_size(search.excess_bytes)} over the limits"
    gap = f"{search.best_us / search.bound_us - 1:.1%}" if search.bound_us > 0 else "0.0%"
    return f"best {best}, gap {gap}, bound {as_time(search.bound_us)}{speed}"


def print_families(indexes: Iterable[Mapping[str, Any]]) -> None:
    """Prints on stdout the sizes of the graphs of each family: the least, the median and the greatest."""
    names = ("family", *SPLITS, "captured ops", "nodes", "edges", "compute", "longest path")
    show(table_of(names, map(_family, indexes)))


def _family(index: Mapping[str, Any]) -> list[str]:
    graphs = index["graphs"]
    count = Counter(g["split"] for g in graphs)
    sizes = [_spread([g[key] for g in graphs], "d") for key in ("captured_ops", "nodes", "edges")]
    step = _spread([g["compute_us"] / 1000 for g in graphs], ".0f") + " ms"
    path = _spread([100 * g["longest_path_us"] / g["compute_us"] for g in graphs if g["compute_us"]], ".0f") + " %"
    return [index["family"], *(str(count[split]) for split in SPLITS), *sizes, step, path]


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    middle = sorted(values)[len(values) // 2]
    return " ".join(format(v, form) for v in (min(values), middle, max(values)))


def time_unit(us: float) -> tuple[float, str]:
    """The microseconds in the unit that a person would choose for this time, and its name."""
    return next(((size, unit) for size, unit in ((1e6, "s"), (1e3, "ms")) if us >= size), (1.0, "us"))


def as_time(us: float) -> str:
    """Microseconds with the unit a person would choose."""
    size, unit = time_unit(us)
    return f"{us / size:.4g} {unit}"


def as_range(us: Sequence[float]) -> str:
    """The least and the largest time."""
    return f"{as_time(min(us))} to {as_time(max(us))}"


def share_of(us: float, step_us: float) -> str:
    """As a percentage."""
    if not step_us:
        return "-"
    share = us / step_us
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def size_unit(size: float) -> tuple[float, str]:
    """The bytes in the unit that a person would choose for this size, and its name."""
    units = ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB"))
    return next(((1024.0**power, unit) for power, unit in units if size >= 1024**power), (1.0, "B"))


def as_size(size: float) -> str:
    """Bytes with the unit a person would choose."""
    unit, name = size_unit(size)
    return f"{size / unit:.4g} {name}"


def as_limit(memory_bytes: float | None) -> str:
    """A device's memory limit; "-" where there is none."""
    return "-" if memory_bytes is None else as_size(memory_bytes)
