"""Memory limits at the edge: cases whose limits are the peaks of a plan that is kept with them, so that each is known to be feasible.

    python -m benchmarks.planted [--set=tuning] [--cases=training-] --out=FILE.json     presses plans anew

A plan is pressed: from chunks of equal bytes on, the search for plans that fit (`baechi_ext.place.fitting`) runs again and again under
limits some percent below those it last kept, until it fails; then in smaller steps and with more effort. That takes about a minute.
The plans that are kept were pressed while this was made, by earlier forms of it; to press anew gives others. What counts is that they fit.

The two sets share no graph; TUNING is for looking at while a method is made, HELD_OUT for the final comparison alone.
"""

import argparse
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.ir.files import require_writable, write_json
from baechi_ext.place.fitting import Effort, fit
from baechi_ext.place.trial import Trial
from baechi_ext.simulate import AdaptiveSimulator, simulate
from benchmarks.families import known_plan, link_of_ratio, make_cluster
from benchmarks.shapes import FAMILIES

PLANS = Path(__file__).parent / "results" / "planted.json"
PRESSING = ((0.05, 4e6), (0.02, 8e6), (0.01, 24e6))
"""By how much limits shrink at a time, and how many ops are simulated before that counts as failed."""
SMALLEST_SHARE = 0.5
"""With unequal limits, the last device's of the first one's."""


@dataclass(frozen=True)
class Planted:
    """One graph on one cluster; `limits` is equal or unequal."""

    family: str
    ops: int
    ccr: float
    devices: int
    limits: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.family}-{self.ops}-{self.ccr:g}-{self.devices}-{self.limits}"

    @cached_property
    def graph(self) -> OpGraph:
        return FAMILIES[self.family](self.ops, np.random.default_rng(self.seed))

    @cached_property
    def unlimited(self) -> Cluster:
        return make_cluster(str(self.devices), link_of_ratio(self.graph, self.ccr))

    @property
    def shares(self) -> list[float]:
        """What a device's limit is to be of the largest one."""
        return np.linspace(1.0, 1.0 if self.limits == "equal" else SMALLEST_SHARE, self.devices).tolist()

    def limited(self, limits: Sequence[float]) -> Cluster:
        devices = zip(self.unlimited.devices, limits, strict=True)
        return replace(self.unlimited, devices=tuple(replace(d, memory_bytes=int(limit)) for d, limit in devices))

    def cluster(self, plan: dict[str, Any], slack: float) -> Cluster:
        """The cluster with `slack` (1 and more) times the memory that the plan needs."""
        placement, priority = decoded(plan)
        peaks = simulate(self.graph, self.unlimited, placement, priority).peak_memory_bytes
        needed = [max(peaks)] * self.devices if self.limits == "equal" else peaks
        return self.limited([slack * peak for peak in needed])


def encoded(placement: Sequence[int], priority: Sequence[float]) -> dict[str, Any]:
    """A plan, short: a digit per op, and the ops in their order."""
    return {"placement": "".join(map(str, placement)), "order": sorted(range(len(priority)), key=priority.__getitem__)}


def decoded(plan: dict[str, Any]) -> tuple[list[int], list[float]]:
    """The placement and the priorities of a plan."""
    priority = [0.0] * len(plan["order"])
    for rank, v in enumerate(plan["order"]):
        priority[v] = float(rank)
    return [int(d) for d in plan["placement"]], priority


def pressed(case: Planted) -> Trial:
    """A plan that needs so little memory that the search for a smaller one failed at the last."""
    placement, priority, peaks = known_plan(case.graph, case.unlimited)
    limit = max(peak / share for peak, share in zip(peaks, case.shares, strict=True))
    best = Trial(tuple(placement), tuple(map(float, priority)), AdaptiveSimulator(case.graph, case.unlimited))
    for shrinking, simulated_ops in PRESSING:
        while True:
            cluster = case.limited([limit * (1 - shrinking) * share for share in case.shares])
            start = Trial(best.placement, best.priority, AdaptiveSimulator(case.graph, cluster))
            found = fit(start, 0, Effort(simulated_ops))
            if not found.valid:
                break
            best, limit = found, limit * (1 - shrinking)
    return best


def _cases(seed: int, table: str) -> tuple[Planted, ...]:
    cases = []
    for line in table.strip().splitlines():
        family, ops, ccr, devices, limits = line.split()
        cases.append(Planted(family, int(ops), float(ccr), int(devices), limits, zlib.crc32(f"planted {seed} {family} {ops}".encode())))
    return tuple(cases)


TUNING = _cases(
    1,
    """
    random            20    1    2 equal
    training          60    1    3 unequal
    layered           100   1    4 equal
    layered           200   1    4 equal
    training          200   1    4 equal
    transformer       200   0.1  8 equal
    wavefront         200   10   3 unequal
    series_parallel   200   1    8 unequal
    fork_join         500   1    4 equal
    recurrent         500   1    4 unequal
    training          500   10   8 equal
    random            1000  1    4 equal
    training          1000  1    2 equal
    layered           5000  1    4 equal
    """,
)
HELD_OUT = _cases(
    2,
    """
    training          20    1    2 equal
    wavefront         60    1    3 unequal
    transformer       100   1    4 equal
    random            200   1    4 equal
    training          200   0.1  4 unequal
    recurrent         200   1    8 equal
    fork_join         200   10   3 unequal
    layered           200   1    6 equal
    layered           500   1    4 unequal
    """,
)
SETS: dict[str, tuple[Planted, ...]] = {"tuning": TUNING, "held_out": HELD_OUT}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=tuple(SETS), action="append", help="only this set")
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    require_writable(args.out)
    plans: dict[str, Any] = {}
    console = Console(width=140, highlight=False)
    for case in (case for name in args.set or SETS for case in SETS[name] if args.cases in case.name):
        found = pressed(case)
        plans[case.name] = encoded(found.placement, found.priority or ())
        write_json(args.out, {"plans": plans})
        console.print(f"{case.name}  {max(found.timeline.peak_memory_bytes):.0f} bytes")


if __name__ == "__main__":
    main()
