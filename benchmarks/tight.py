"""Which methods find a plan where memory is tight: limits of planted plans (benchmarks/planted.py), so that every case has one.

    python -m benchmarks.tight [--set=tuning,held_out] [--cases=training-] [--methods=auto,m_etf] [--slack=1.02,1.05] [--out=FILE.json]

`auto` runs until it has a plan, at most for --time_limit seconds; its seconds are those until then. Other methods know no limit but
their own. Every plan is simulated again here. Slack 1 leaves exactly the bytes of the plan that a search of minutes came to.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence

from baechi_ext.errors import InfeasibleError
from baechi_ext.ir import Cluster, OpGraph, Plan
from baechi_ext.ir.files import read_json
from baechi_ext.ir.plan import memory_violations, placement_violations
from baechi_ext.place.common import PlaceOptions, SearchProgress
from baechi_ext.place.registry import METHODS, place
from baechi_ext.simulate import simulate
from benchmarks.planted import PLANS, SETS
from benchmarks.runner import Benchmark, Row, markdown, progress, some_of, timed

SEARCH = "auto"
FLAGS = {
    "--set": some_of(SETS),
    "--cases": (),
    "--methods": some_of(METHODS, (SEARCH, "m_etf", "m_sct", "heft")),
    "--slack": (1.0, 1.02, 1.05),
    "--time_limit": 10.0,
    "--seed": 0,
}


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """A row per case and slack."""
    plans = read_json(PLANS, "planted plans")["plans"]
    rows: list[Row] = []
    for name, case in ((group, case) for group in args.set for case in SETS[group]):
        for slack in args.slack if not args.cases or any(part in case.name for part in args.cases) else ():
            cluster = case.limited_to(plans[case.name], slack)
            cells = {method: placed(method, case.graph, cluster, args) for method in args.methods}
            rows.append({"set": name, "case": case.name, "ops": len(case.graph), "slack": slack, "cells": cells})
            told = (f"{method} {cell['status']} {cell['seconds']:.1f} s" for method, cell in cells.items())
            progress("  ".join((name, case.name, f"{slack:g}", *told)))
            yield {"options": {"time_limit": args.time_limit, "seed": args.seed}, "rows": rows}


def placed(method: str, graph: OpGraph, cluster: Cluster, args: argparse.Namespace) -> Row:
    """The status of the method's search for a plan, its seconds, and the plan's makespan."""
    options = PlaceOptions(args.seed, time_limit_seconds=args.time_limit, watch=until_it_fits if method == SEARCH else None)

    def search() -> Plan | str:
        try:
            return place(method, graph, cluster, options).plan
        except InfeasibleError as e:
            return e.status

    plan, seconds = timed(search)
    if isinstance(plan, str):
        return {"status": plan, **seconds}
    timeline = simulate(graph, cluster, plan.placement, plan.priority)
    wrong = placement_violations(graph, cluster, plan.placement) + memory_violations(cluster, timeline.peak_memory_bytes)
    return {"status": "invalid" if wrong else "feasible", "makespan_us": timeline.makespan_us, **seconds}


def until_it_fits(progress: SearchProgress) -> None:
    if progress.excess_bytes == 0:
        raise KeyboardInterrupt


def report(found: Row) -> str:
    """By set and slack: how many cases each method has a plan for, and the median and the most seconds of those."""
    rows = found.get("rows", [])
    methods = list(rows[0]["cells"]) if rows else []
    lines = []
    for kind in dict.fromkeys((row["set"], row["slack"]) for row in rows):
        cases = [row["cells"] for row in rows if (row["set"], row["slack"]) == kind]
        lines.append([kind[0], f"{kind[1]:g}", str(len(cases)), *(_summary([cells[m] for cells in cases]) for m in methods)])
    return markdown(["set", "slack", "cases", *methods], lines, "plans found (median seconds, most seconds)")


def _summary(cells: Sequence[Row]) -> str:
    seconds = [cell["seconds"] for cell in cells if cell["status"] in ("feasible", "optimal")]
    return f"{len(seconds)} ({statistics.median_high(seconds):.1f}, {max(seconds):.1f})" if seconds else "0"


main = Benchmark("tight", __doc__, FLAGS, measure, report).main

if __name__ == "__main__":
    main()
