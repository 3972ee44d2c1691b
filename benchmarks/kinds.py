"""Processor time that a method takes for large graphs of every kind, beside that of another checkout of this project.

    python -m benchmarks.kinds [--method=m_etf] [--ops=20000] [--before=CHECKOUT] [--repeats=2] [--out=FILE.json]

Kinds are the families of benchmarks/shapes.py on some of the clusters of benchmarks/families.py. Each kind is placed in a process of its
own, whose kernels are compiled before; checkouts take turns, so that what else the machine does meets both alike.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from baechi_ext.place.registry import METHODS
from benchmarks.quality_table import geometric_mean
from benchmarks.runner import ROOT, Benchmark, Columns, Row, commit, in_turn, progress, some_of, table
from benchmarks.shapes import FAMILIES

PLACE = """
import json, sys, time
import numpy as np
from baechi_ext.place.registry import place
from benchmarks.families import cluster_for
from benchmarks.shapes import FAMILIES
method, family, ops, devices, ccr, memory = sys.argv[1:]
for n in (1000, int(ops)):
    graph = FAMILIES[family](n, np.random.default_rng(3))
    cluster = cluster_for(graph, float(ccr), devices, memory)
    begun = time.process_time()
    us = place(method, graph, cluster).predicted_step_us
print(json.dumps({"cpu_seconds": time.process_time() - begun, "predicted_us": us, "ops": len(graph), "edges": sum(map(len, graph.inputs))}))
"""
"""Runs with any checkout that has these modules."""
FLAGS = {
    "--method": {"choices": list(METHODS), "default": "m_etf"},
    "--ops": 20_000,
    "--families": some_of(FAMILIES),
    "--devices": ("4", "8", "speeds", "nodes"),
    "--ccr": (0.1, 1.0, 10.0),
    "--memory": ("loose", "tight"),
    "--before": {"type": Path, "help": "a checkout to compare with"},
    "--repeats": 2,
}


def placed(checkout: Path, method: str, kind: Row, ops: int) -> Row:
    """One sample: processor seconds, the predicted step, and the graph's size."""
    places = [str(checkout), str(checkout / "runtime")]
    words = [method, kind["family"], str(ops), kind["devices"], str(kind["ccr"]), kind["memory"]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    out = subprocess.run([sys.executable, "-P", "-c", PLACE, *words], env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(json.loads(out))


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """A row per kind: the least processor seconds of each checkout's samples, and whether the steps are equal."""
    checkouts = {"now": ROOT} if args.before is None else {"before": args.before, "now": ROOT}
    commits = {name: commit(path) for name, path in checkouts.items()}
    rows: list[Row] = []
    for values in itertools.product(args.families, args.devices, args.ccr, args.memory):
        kind: Row = dict(zip(("family", "devices", "ccr", "memory"), values, strict=True))
        samples = {name: partial(placed, path, args.method, kind, args.ops) for name, path in checkouts.items()}
        found: dict[str, list[Row]] = in_turn(samples, args.repeats, told=False)
        rows.append({**kind, **{key: found["now"][0][key] for key in ("ops", "edges")}})
        for name, took in found.items():
            rows[-1][name] = {"cpu_seconds": [row["cpu_seconds"] for row in took], "predicted_us": took[0]["predicted_us"]}
        progress("  ".join(cell.format_map(rows[-1]) if isinstance(cell, str) else cell(rows[-1]) for cell in COLUMNS.values()))
        yield {"commits": commits, "rows": rows}


def seconds(row: Row, name: str) -> float:
    return min(row[name]["cpu_seconds"]) if name in row else float("nan")


COLUMNS: Columns = {
    **{key: f"{{{key}}}" for key in ("family", "devices", "ccr", "memory", "ops", "edges")},
    "before": lambda row: f"{seconds(row, 'before'):.2f} s",
    "now": lambda row: f"{seconds(row, 'now'):.2f} s",
    "now / before": lambda row: f"{seconds(row, 'now') / seconds(row, 'before'):.2f}",
    "step, now / before": lambda row: f"{row['now']['predicted_us'] / row['before']['predicted_us']:.6g}" if "before" in row else "-",
}


def report(found: Row) -> str:
    """The table, and the mean of its ratios."""
    ratio = geometric_mean(seconds(row, "now") / seconds(row, "before") for row in found["rows"])
    most = max(seconds(row, "now") for row in found["rows"])
    return f"{table(COLUMNS, found['rows'])}\nmost now: {most:.2f} s; now / before, geometric mean: {ratio:.3f}"


main = Benchmark("kinds", __doc__, FLAGS, measure, report).main

if __name__ == "__main__":
    main()
