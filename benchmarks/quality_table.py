"""The tables of benchmarks.quality: what each method reached in each case, and a summary of each method.

    python -m benchmarks.quality_table benchmarks/results/quality_*.json > benchmarks/results/quality.md
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from baechi_ext.ir.files import read_json
from benchmarks.runner import Row, markdown, parsed, table

ANNEALING = "annealing"
SAME = 1 + 1e-9
"""Makespans that differ less are equal."""
Cases = Mapping[str, Row]


def summaries(cases: Cases) -> list[Row]:
    """Results of each method that ran, in the order of the columns; ratios are geometric means over its cases with a plan."""
    return [_summary(method, {name: row for name, row in cases.items() if method in row["cells"]}) for method in methods_of(cases)]


def _summary(method: str, cases: Cases) -> Row:
    solved = {name: row for name, row in cases.items() if makespan_us(row, method) is not None}
    to_best = {name: ratio for name, row in solved.items() if (ratio := _ratio(row, method, best_us(row))) is not None}
    worst = max(to_best, key=lambda name: to_best[name], default="")
    to_annealing = [ratio for row in solved.values() if (ratio := _ratio(row, method, makespan_us(row, ANNEALING))) is not None]
    return {
        "method": method,
        "plans": len(solved),
        "without": dict(Counter(row["cells"][method]["status"] for name, row in cases.items() if name not in solved)),
        "over_bound": geometric_mean(_ratio(row, method, row["lower_bound_us"]) or math.nan for row in solved.values()),
        "over_annealing": geometric_mean(to_annealing),
        "over_best": geometric_mean(to_best.values()),
        "wins": sum(ratio <= SAME for ratio in to_best.values()),
        "worst": to_best.get(worst, math.nan),
        "worst_case": worst,
        "median_seconds": statistics.median([row["cells"][method]["placement_seconds"] for row in solved.values()] or [math.nan]),
    }


def methods_of(cases: Cases) -> list[str]:
    return list(dict.fromkeys(method for row in cases.values() for method in row["cells"]))


def makespan_us(row: Row, method: str) -> float | None:
    return row["cells"].get(method, {}).get("makespan_us")


def best_us(row: Row) -> float | None:
    """The shortest step any method found; annealing is not one."""
    return min((us for m in row["cells"] if m != ANNEALING and (us := makespan_us(row, m)) is not None), default=None)


def geometric_mean(ratios: Iterable[float]) -> float:
    """NaN of nothing."""
    found = list(ratios)
    return statistics.geometric_mean(found) if found else math.nan


def _ratio(row: Row, method: str, base_us: float | None) -> float | None:
    us = makespan_us(row, method)
    return us / base_us if us is not None and base_us else None


SUMMARY = {
    "method": "{method}",
    "plans": "{plans}",
    "no plan": lambda row: ", ".join(f"{count} {status}" for status, count in row["without"].items()) or "0",
    "over bound": "{over_bound:.3f}",
    "over annealing": "{over_annealing:.3f}",
    "over best": "{over_best:.3f}",
    "best in": "{wins}",
    "worst over best": "{worst:.3f} ({worst_case})",
    "median s": "{median_seconds:.3g}",
}


def report(cases: Cases) -> str:
    """Three Markdown tables: steps over the bound, seconds to place, and the summary."""
    methods = methods_of(cases)
    steps, seconds = [], []
    for name, row in cases.items():
        best = best_us(row)
        winners = [m for m in methods if m != ANNEALING and best is not None and (us := makespan_us(row, m)) and us <= best * SAME]
        size = [name, str(row["ops"]), str(row["devices"])]
        steps.append([*size, f"{row['lower_bound_us']:.6g}", ", ".join(winners) or "-", *(_step(row, method) for method in methods)])
        seconds.append([*size, *(_seconds(row, method) for method in methods)])
    tables = (
        markdown(["case", "ops", "devices", "bound us", "winner", *methods], steps, "Predicted step over the proven lower bound"),
        markdown(["case", "ops", "devices", *methods], seconds, "Seconds to place"),
        table(SUMMARY, summaries(cases), "Geometric means over the cases with a plan"),
    )
    return "\n".join(tables)


def _step(row: Row, method: str) -> str:
    cell = row["cells"].get(method, {"status": "-"})
    ratio = _ratio(row, method, row["lower_bound_us"])
    return cell["status"] if ratio is None else f"{ratio:.3f}"


def _seconds(row: Row, method: str) -> str:
    seconds = row["cells"].get(method, {}).get("placement_seconds")
    return "-" if seconds is None else f"{seconds:.3g}"


def main(argv: Sequence[str] | None = None) -> None:
    paths = parsed(__doc__, {"results": {"type": Path, "nargs": "+"}}, argv).results
    results = [read_json(path, "result of benchmarks.quality") for path in paths]
    for result in results:
        hardware, versions = result["hardware"], ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        print(f"{result['date']}, {hardware['processor']}, {hardware['cores']} cores, {versions}: `{result['command']}`  ")
    print(report({name: row for result in results for name, row in result["cases"].items()}))


if __name__ == "__main__":
    main()
