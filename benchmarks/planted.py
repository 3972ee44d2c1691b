"""Memory limits at the edge: cases whose limits are the peaks of a plan that is kept with them, so that each is known to be feasible.

    python -m benchmarks.planted [--set=tuning] [--cases=training-] --out=FILE.json     presses plans anew

A plan is pressed: from chunks of equal bytes on, the search for plans that fit (`baechi_ext.place.fitting`) runs again and again under
limits some percent below those it last kept, until it fails; then in smaller steps and with more effort. That takes about a minute.
The plans that are kept were pressed while this was made, by earlier forms of it; to press anew gives others. What counts is that they fit.

The two sets share no graph; TUNING is for looking at while a method is made, HELD_OUT for the final comparison alone.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from baechi_ext.ir import Cluster
from baechi_ext.place.fitting import Effort, fit
from baechi_ext.place.trial import Trial
from baechi_ext.simulate import Simulator, simulate
from benchmarks.families import Case, cases_of, known_plan, link_of_ratio, make_cluster
from benchmarks.runner import Benchmark, Row, progress, some_of

PLANS = Path(__file__).parent / "results" / "planted.json"
PRESSING = ((0.05, 4e6), (0.02, 8e6), (0.01, 24e6))
"""Shares by which limits shrink at a time, and the ops that are simulated before a search counts as failed."""
SMALLEST_SHARE = 0.5
"""The last device's limit as a share of the first one's, where limits are unequal."""


class Planted(Case):
    """One graph on one cluster; `memory` is equal or unequal: the limits of devices beside each other's."""

    @cached_property
    def unlimited(self) -> Cluster:
        return make_cluster(self.devices, link_of_ratio(self.graph, self.ccr))

    @property
    def shares(self) -> list[float]:
        """Each device's limit as a share of the largest one."""
        return np.linspace(1.0, 1.0 if self.memory == "equal" else SMALLEST_SHARE, int(self.devices)).tolist()

    def limited(self, limits: Sequence[float]) -> Cluster:
        devices = zip(self.unlimited.devices, limits, strict=True)
        return replace(self.unlimited, devices=tuple(replace(d, memory_bytes=int(limit)) for d, limit in devices))

    def limited_to(self, plan: Row, slack: float) -> Cluster:
        """The cluster with `slack` (1 and more) times the memory that the plan needs."""
        placement, priority = decoded(plan)
        peaks = simulate(self.graph, self.unlimited, placement, priority).peak_memory_bytes
        needed = [max(peaks)] * len(peaks) if self.memory == "equal" else peaks
        return self.limited([slack * peak for peak in needed])


def encoded(placement: Sequence[int], priority: Sequence[float]) -> Row:
    """A plan, short: a digit per op, and the ops in their order."""
    return {"placement": "".join(map(str, placement)), "order": sorted(range(len(priority)), key=priority.__getitem__)}


def decoded(plan: Row) -> tuple[list[int], list[float]]:
    """The placement and the priorities of a plan."""
    priority = [0.0] * len(plan["order"])
    for rank, v in enumerate(plan["order"]):
        priority[v] = float(rank)
    return [int(d) for d in plan["placement"]], priority


def pressed(case: Planted) -> Trial:
    """A plan that needs so little memory that the search for a smaller one failed at the last."""
    placement, priority, peaks = known_plan(case.graph, case.unlimited)
    limit = max(peak / share for peak, share in zip(peaks, case.shares, strict=True))
    best = Trial(tuple(placement), tuple(map(float, priority)), Simulator(case.graph, case.unlimited))
    for shrinking, simulated_ops in PRESSING:
        while True:
            cluster = case.limited([limit * (1 - shrinking) * share for share in case.shares])
            start = Trial(best.placement, best.priority, Simulator(case.graph, cluster))
            found = fit(start, 0, Effort(simulated_ops))
            if not found.valid:
                break
            best, limit = found, limit * (1 - shrinking)
    return best


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


def measure(args: argparse.Namespace) -> Iterator[Row]:
    plans: Row = {}
    for case in (case for name in args.set for case in SETS[name] if args.cases in case.name):
        found = pressed(case)
        plans[case.name] = encoded(found.placement, found.priority or ())
        progress(f"{case.name}  {max(found.timeline.peak_memory_bytes):.0f} bytes")
        yield {"plans": plans}


main = Benchmark("planted", __doc__, {"--set": some_of(SETS), "--cases": ""}, measure, lambda found: f"{len(found['plans'])} plans").main

if __name__ == "__main__":
    main()
