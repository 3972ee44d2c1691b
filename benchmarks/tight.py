"""Which methods find a plan where memory is tight: limits of planted plans, so that every case has one.

    python -m benchmarks.tight [--set=tuning,held_out] [--cases=training-] [--methods=auto,m_etf] [--slack=1.02,1.05] [--out=FILE.json]

The plans of benchmarks/results/planted.json were pressed: from chunks of equal bytes on, the search for plans that fit
(`baechi_ext.place.fitting`) ran again and again under limits some percent below those it last kept, until it failed. The two sets share
no graph; TUNING is for looking at while a method is made, HELD_OUT for the final comparison alone.

`auto` runs until it has a plan, at most for --time_limit seconds; its seconds are those until then. Other methods know no limit but
their own. Every plan is simulated again here. Slack 1 leaves exactly the bytes of the planted plan.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from baechi_ext.errors import InfeasibleError
from baechi_ext.ir import Cluster, OpGraph, Plan
from baechi_ext.ir.files import read_json
from baechi_ext.place.common import PlaceOptions, SearchProgress
from baechi_ext.place.registry import METHODS, place
from baechi_ext.simulate import simulate
from benchmarks.families import Case, cases_of, link_of_ratio, make_cluster
from benchmarks.quality import simulated
from benchmarks.runner import ROOT, Benchmark, Row, markdown, progress, some_of, timed

SEARCH = "auto"


class Planted(Case):
    """One graph on one cluster; `memory` is equal or unequal: the limits of devices beside each other's."""

    @cached_property
    def unlimited(self) -> Cluster:
        return make_cluster(self.devices, link_of_ratio(self.graph, self.ccr))

    def limited_to(self, plan: Row, slack: float) -> Cluster:
        """The cluster with `slack` (1 and more) times the memory that the plan needs."""
        peaks = simulate(self.graph, self.unlimited, *decoded(plan)).peak_memory_bytes
        needed = [max(peaks)] * len(peaks) if self.memory == "equal" else peaks
        devices = zip(self.unlimited.devices, needed, strict=True)
        return replace(self.unlimited, devices=tuple(replace(d, memory_bytes=int(slack * peak)) for d, peak in devices))


def decoded(plan: Row) -> tuple[list[int], list[float]]:
    """The placement and the priorities of a planted plan: a digit per op, and the ops in their order."""
    return [int(d) for d in plan["placement"]], np.argsort(plan["order"]).astype(float).tolist()


def planted_plans() -> Row:
    """The plans by the name of their case."""
    return read_json(ROOT / "benchmarks" / "results" / "planted.json", "planted plans")["plans"]


TUNING = cases_of(
    "planted 1",
    """
    20: random 1 2 equal
    60: training 1 3 unequal
    100: layered 1 4 equal
    200: layered 1 4 equal; training 1 4 equal; transformer 0.1 8 equal; wavefront 10 3 unequal
    200: series_parallel 1 8 unequal
    500: fork_join 1 4 equal; recurrent 1 4 unequal; training 10 8 equal
    1000: random 1 4 equal; training 1 2 equal
    5000: layered 1 4 equal
    """,
    Planted,
)
HELD_OUT = cases_of(
    "planted 2",
    """
    20: training 1 2 equal
    60: wavefront 1 3 unequal
    100: transformer 1 4 equal
    200: random 1 4 equal; training 0.1 4 unequal; recurrent 1 8 equal; fork_join 10 3 unequal; layered 1 6 equal
    500: layered 1 4 unequal
    """,
    Planted,
)
SETS: dict[str, tuple[Planted, ...]] = {"tuning": TUNING, "held_out": HELD_OUT}
FLAGS = {
    "--set": some_of(SETS),
    "--cases": (),
    "--methods": some_of(METHODS, (SEARCH, "m_etf", "m_sct", "heft")),
    "--slack": (1.0, 1.02, 1.05),
    "--time_limit": 10.0,
}


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """A row per case and slack."""
    plans = planted_plans()
    for name, case in ((group, case) for group in args.set for case in SETS[group]):
        for slack in args.slack if not args.cases or any(part in case.name for part in args.cases) else ():
            cluster = case.limited_to(plans[case.name], slack)
            cells = {method: placed(method, case.graph, cluster, args) for method in args.methods}
            row = {"set": name, "case": case.name, "ops": len(case.graph), "slack": slack, "cells": cells}
            told = (f"{method} {cell['status']} {cell['seconds']:.1f} s" for method, cell in cells.items())
            progress("  ".join((name, case.name, f"{slack:g}", *told)))
            yield {"options": {"time_limit": args.time_limit}, "rows": [row]}


def placed(method: str, graph: OpGraph, cluster: Cluster, args: argparse.Namespace) -> Row:
    """The status of the method's search for a plan, its seconds, and the plan's makespan."""
    options = PlaceOptions(time_limit_seconds=args.time_limit, watch=until_it_fits if method == SEARCH else None)

    def search() -> Plan | str:
        try:
            return place(method, graph, cluster, options).plan
        except InfeasibleError as e:
            return e.status

    plan, seconds = timed(search)
    if isinstance(plan, str):
        return {"status": plan, **seconds}
    makespan_us, wrong = simulated(graph, cluster, plan.placement, plan.priority)
    return {"status": "invalid" if wrong else "feasible", "makespan_us": makespan_us, **seconds}


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
