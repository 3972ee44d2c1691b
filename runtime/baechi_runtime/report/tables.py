"""Short tables for people; programs read --json.

rich is imported where something is printed: `baechi doctor`, which also says that it is missing, has to do without.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from baechi_ext.datasets import SPLITS
from baechi_ext.place.common import SearchProgress
from baechi_ext.simulate import Timeline

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 140


def print_timeline(timeline: Timeline, lower_bound_us: float, facts: Mapping[str, str]) -> None:
    """Prints on stdout what a simulated step takes, how far that is from its lower bound, and what each device does and holds."""
    out, step = console(), timeline.makespan_us
    gap = f"{step / lower_bound_us - 1:.1%}" if lower_bound_us > 0 else "0.0%"
    lines = {
        "predicted step": as_time(step),
        "lower bound": f"{as_time(lower_bound_us)} (the step is {gap} above it)",
        "transfers": f"{len(timeline.transfers)} ({as_size(timeline.bytes_moved)})",
        **facts,
    }
    width = max(map(len, lines))
    say(out, *(f"{name:<{width}}  {value}" for name, value in lines.items()))
    out.print(_devices(timeline))


def console(width: int = WIDTH) -> "Console":
    """A console on stdout: as wide as the terminal, or, without one, wide enough for all tables."""
    from rich.console import Console

    terminal = Console(file=sys.stdout, highlight=False)
    return terminal if terminal.is_terminal else Console(file=sys.stdout, highlight=False, width=width)


def say(out: "Console", *lines: str) -> None:
    """Prints lines as they are."""
    from rich.text import Text

    for line in lines:
        out.print(Text(line), soft_wrap=True)


def table_of(*names: str) -> "Table":
    """An empty table. Text to the left in the first column, which goes on in a further line where it is long, numbers to the right in the
    others."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i else "left", overflow="fold", no_wrap=i > 0)
    return table


def search_news(search: SearchProgress) -> str:
    """A line on how a search stands."""
    speed = f", {search.evaluations / search.seconds:.0f} plans/s" if search.evaluations and search.seconds > 0 else ""
    best = as_time(search.best_us) if not search.excess_bytes else f"{as_size(search.excess_bytes)} over the limits"
    gap = f"{search.best_us / search.bound_us - 1:.1%}" if search.bound_us > 0 else "0.0%"
    return f"best {best}, bound {as_time(search.bound_us)}, gap {gap}{speed}"


def _devices(timeline: Timeline) -> "Table":
    from rich.text import Text

    table = table_of("device", "ops", "busy", "peak memory", "limit")
    rows = zip(timeline.cluster.devices, timeline.device_order(), timeline.busy_us, timeline.peak_memory_bytes, strict=True)
    for device, order, busy, peak in rows:
        limit = "-" if device.memory_bytes is None else as_size(device.memory_bytes)
        table.add_row(Text(device.name), str(len(order)), share_of(busy, timeline.makespan_us), as_size(peak), limit)
    return table


def print_families(indexes: Iterable[Mapping[str, Any]]) -> None:
    """Prints on stdout the sizes of the graphs of each family: the least, the median and the greatest."""
    table = table_of("family", "train", "test", "captured ops", "nodes", "edges", "compute", "longest path")
    for index in indexes:
        graphs = index["graphs"]
        count = Counter(g["split"] for g in graphs)
        sizes = [_spread([g[key] for g in graphs], "d") for key in ("captured_ops", "nodes", "edges")]
        step = _spread([g["compute_us"] / 1000 for g in graphs], ".0f") + " ms"
        path = _spread([100 * g["longest_path_us"] / g["compute_us"] for g in graphs if g["compute_us"]], ".0f") + " %"
        table.add_row(index["family"], *(str(count[split]) for split in SPLITS), *sizes, step, path)
    console().print(table)


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    middle = sorted(values)[len(values) // 2]
    return " ".join(format(v, form) for v in (min(values), middle, max(values)))


def as_time(us: float) -> str:
    """Microseconds with the unit a person would choose."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.4g} {unit}"
    return f"{us:.4g} us"


def as_range(us: Sequence[float]) -> str:
    """The least and the largest time."""
    return f"{as_time(min(us))} to {as_time(max(us))}"


def share_of(us: float, step_us: float) -> str:
    """As a percentage."""
    if not step_us:
        return "-"
    share = us / step_us
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def as_size(size: float) -> str:
    """Bytes with the unit a person would choose."""
    for unit, power in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if size >= 1024**power:
            return f"{size / 1024**power:.4g} {unit}"
    return f"{size:.4g} B"
