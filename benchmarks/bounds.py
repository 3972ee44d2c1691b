"""The lower bound now, beside the one that the plans of benchmarks.quality were judged by.

    python -m benchmarks.bounds [--set=held_out] [--most_ops=20000] [--out=benchmarks/results/bounds.json]

The plans are `auto`'s of benchmarks/results/quality_1.json and quality_2.json. The recorded bound may be higher: `exact` proves bounds
of its own. Seconds are of the processor, the least of three.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from baechi_ext.ir.files import read_json
from baechi_ext.simulate import lower_bound_us
from benchmarks.families import SETS
from benchmarks.quality_table import geometric_mean
from benchmarks.runner import Benchmark, Row, some_of, table

RESULTS = Path(__file__).parent / "results"
FLAGS = {"--set": some_of(SETS, ["held_out"]), "--most_ops": 20_000}


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """A row per case that has a plan."""
    recorded: Row = {}
    for part in (1, 2):
        recorded |= read_json(RESULTS / f"quality_{part}.json", "result")["cases"]
    rows: list[Row] = []
    for case in (case for name in args.set for case in SETS[name] if case.ops <= args.most_ops and case.name in recorded):
        was, seconds, bound_us = recorded[case.name], [], 0.0
        graph, cluster = case.graph, case.cluster
        for _ in range(3):
            begin = time.process_time()
            bound_us = lower_bound_us(graph, cluster)
            seconds.append(time.process_time() - begin)
        step_us, known_us = was["cells"]["auto"]["makespan_us"], was["lower_bound_us"]
        times = {"step_us": step_us, "recorded_bound_us": known_us, "bound_us": bound_us, "seconds": min(seconds)}
        rows.append({"case": case.name, "ops": len(graph), **times})
        yield {"rows": rows}


COLUMNS = {
    "case": "{case}",
    "ops": "{ops}",
    "over the recorded bound": lambda row: f"{row['step_us'] / row['recorded_bound_us']:.3f}",
    "over the better bound": lambda row: f"{row['step_us'] / max(row['recorded_bound_us'], row['bound_us']):.3f}",
    "seconds": "{seconds:.3f}",
}


def report(found: Row) -> str:
    """The table, and the geometric means over its cases."""
    rows = found.get("rows", [])
    was = geometric_mean(row["step_us"] / row["recorded_bound_us"] for row in rows)
    now = geometric_mean(row["step_us"] / max(row["recorded_bound_us"], row["bound_us"]) for row in rows)
    return f"{table(COLUMNS, rows)}\ngeometric means: {was:.4f} over the recorded bounds, {now:.4f} over the better ones"


main = Benchmark("bounds", __doc__, FLAGS, measure, report).main

if __name__ == "__main__":
    main()
