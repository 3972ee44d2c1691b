"""Presses the plans whose peaks are the memory limits of `benchmarks.tight`, so that each of its cases is known to be feasible.

    python -m benchmarks.planted [--set=tuning] [--cases=training-] --out=FILE.json

A plan is pressed: from chunks of equal bytes on, the search for plans that fit (`baechi_ext.place.fitting`) runs again and again under
limits some percent below those it last kept, until it fails; then in smaller steps and with more effort. That takes about a minute.
The committed plans were pressed by earlier forms of it; to press anew gives others. What counts is that they fit.
"""

import argparse
from collections.abc import Iterator

import numpy as np

from baechi_ext.place.effort import Effort
from baechi_ext.place.fitting import fit
from baechi_ext.place.trial import Trial
from baechi_ext.simulate import Simulator
from benchmarks.families import known_plan
from benchmarks.runner import Benchmark, Row, progress, some_of
from benchmarks.tight import SETS, SMALLEST_SHARE, Planted, encoded

PRESSING = ((0.05, 4e6), (0.02, 8e6), (0.01, 24e6))
"""Shares by which limits shrink at a time, and the ops that are simulated before a search counts as failed."""


def pressed(case: Planted) -> Trial:
    """A plan that needs so little memory that the search for a smaller one failed at the last."""
    placement, priority, peaks = known_plan(case.graph, case.unlimited)
    shares = np.linspace(1.0, 1.0 if case.memory == "equal" else SMALLEST_SHARE, int(case.devices)).tolist()
    limit = max(peak / share for peak, share in zip(peaks, shares, strict=True))
    best = Trial(tuple(placement), tuple(map(float, priority)), Simulator(case.graph, case.unlimited))
    for shrinking, simulated_ops in PRESSING:
        while True:
            smaller = limit * (1 - shrinking)
            cluster = case.limited([smaller * share for share in shares])
            found = fit(Trial(best.placement, best.priority, Simulator(case.graph, cluster)), 0, Effort(simulated_ops))
            if not found.valid:
                break
            best, limit = found, smaller
    return best


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
