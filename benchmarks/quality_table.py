"""The tables of benchmarks.quality: what each method reached in each case, and a summary of each method.

    python -m benchmarks.quality_table benchmarks/results/quality_*.json > benchmarks/results/quality.md
"""

import argparse
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from baechi_ext.ir.files import read_json

ANNEALING = "annealing"
SAME = 1 + 1e-9
"""Makespans that differ less are equal."""
Row = Mapping[str, Any]
_WIDTH = 400
"""Of a printed line, at most: nothing is cut."""


@dataclass(frozen=True)
class Summary:
    """What one method reached over all cases it ran in; ratios are geometric means over those with a plan."""

    method: str
    plans: int
    without: Mapping[str, int]
    """How many gave no plan, by status."""
    over_bound: float
    over_annealing: float
    over_best: float
    """To the best method of each case; annealing is not one."""
    wins: int
    """Cases in which no method is better."""
    worst: float
    """The largest ratio to the best method."""
    worst_case: str
    median_seconds: float


def summaries(cases: Mapping[str, Row]) -> list[Summary]:
    """One for each method that ran, in the order of the columns."""
    return [_summary(method, {name: row for name, row in cases.items() if method in row["cells"]}) for method in methods_of(cases)]


def methods_of(cases: Mapping[str, Row]) -> list[str]:
    return list(dict.fromkeys(method for row in cases.values() for method in row["cells"]))


def makespan_us(row: Row, method: str) -> float | None:
    return row["cells"].get(method, {}).get("makespan_us")


def best_us(row: Row) -> float | None:
    """The shortest step any method found; annealing is not one."""
    return min((us for m in row["cells"] if m != ANNEALING and (us := makespan_us(row, m)) is not None), default=None)


def geometric_mean(ratios: Iterable[float]) -> float:
    """NaN of nothing."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(statistics.fmean(logs)) if logs else math.nan


def _summary(method: str, cases: Mapping[str, Row]) -> Summary:
    solved = {name: row for name, row in cases.items() if makespan_us(row, method) is not None}
    without: dict[str, int] = {}
    for row in cases.values():
        if makespan_us(row, method) is None:
            status = row["cells"][method]["status"]
            without[status] = without.get(status, 0) + 1
    to_best = {name: ratio for name, row in solved.items() if (ratio := _ratio(row, method, best_us(row))) is not None}
    worst = max(to_best, key=lambda name: to_best[name], default="")
    ratios = [ratio for row in solved.values() if (ratio := _ratio(row, method, makespan_us(row, ANNEALING))) is not None]
    return Summary(
        method=method,
        plans=len(solved),
        without=without,
        over_bound=geometric_mean(_ratio(row, method, row["lower_bound_us"]) or math.nan for row in solved.values()),
        over_annealing=geometric_mean(ratios),
        over_best=geometric_mean(to_best.values()),
        wins=sum(ratio <= SAME for ratio in to_best.values()),
        worst=to_best.get(worst, math.nan),
        worst_case=worst,
        median_seconds=statistics.median([row["cells"][method]["placement_seconds"] for row in solved.values()] or [math.nan]),
    )


def _ratio(row: Row, method: str, base_us: float | None) -> float | None:
    us = makespan_us(row, method)
    return us / base_us if us is not None and base_us else None


def show(cases: Mapping[str, Row], console: Console) -> None:
    """Prints three Markdown tables: steps over the bound, seconds to place, and the summary."""
    methods = methods_of(cases)
    steps, seconds = (Table("case", "ops", "devices", *extra, *methods, box=box.MARKDOWN) for extra in (["bound us", "winner"], []))
    for name, row in cases.items():
        best = best_us(row)
        winners = [m for m in methods if m != ANNEALING and best is not None and (us := makespan_us(row, m)) and us <= best * SAME]
        size = name, str(row["ops"]), str(row["devices"])
        steps.add_row(*size, f"{row['lower_bound_us']:.6g}", ", ".join(winners) or "-", *(_step(row, method) for method in methods))
        seconds.add_row(*size, *(_seconds(row, method) for method in methods))
    console.print("\nPredicted step over the proven lower bound\n")
    console.print(steps)
    console.print("\nSeconds to place\n")
    console.print(seconds)
    console.print("\nGeometric means over the cases with a plan\n")
    console.print(_summary_table(summaries(cases)))


def _step(row: Row, method: str) -> str:
    cell = row["cells"].get(method)
    if cell is None:
        return "-"
    ratio = _ratio(row, method, row["lower_bound_us"])
    return cell["status"] if ratio is None else f"{ratio:.3f}"


def _seconds(row: Row, method: str) -> str:
    cell = row["cells"].get(method, {})
    return f"{cell['placement_seconds']:.3g}" if "placement_seconds" in cell else "-"


def _summary_table(found: Iterable[Summary]) -> Table:
    columns = ("method", "plans", "no plan", "over bound", "over annealing", "over best", "best in", "worst over best", "median s")
    table = Table(*columns, box=box.MARKDOWN)
    for s in found:
        none = ", ".join(f"{count} {status}" for status, count in s.without.items()) or "0"
        ratios = (f"{ratio:.3f}" for ratio in (s.over_bound, s.over_annealing, s.over_best))
        worst = f"{s.worst:.3f} ({s.worst_case})"
        table.add_row(s.method, str(s.plans), none, *ratios, str(s.wins), worst, f"{s.median_seconds:.3g}")
    return table


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    results = [read_json(path, "result of benchmarks.quality") for path in parser.parse_args(argv).results]
    for result in results:
        hardware, versions = result["hardware"], ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        print(f"{result['date']}, {hardware['processor']}, {hardware['cores']} cores, {versions}: `{result['command']}`  ")
    text = io.StringIO()
    show({name: row for result in results for name, row in result["cases"].items()}, Console(width=_WIDTH, file=text))
    print("\n".join(line.rstrip() for line in text.getvalue().splitlines()))


if __name__ == "__main__":
    main()
