"""Seconds to simulate a plan and to place a graph: what docs/speed.md states.

    python -m benchmarks.placers [--tasks=simulate,m_etf,m_sct] [--most_ops=20000] [--repeats=5] [--out=FILE.json]

All tasks take turns, so that what else the machine does falls on all alike. What is compiled at first use is compiled before.
"""

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.simulate import Simulator
from baechi_runtime.drivers import pipeline
from baechi_runtime.measure.samples import LoadOfOthers
from baechi_runtime.report.tables import as_time
from benchmarks.families import cluster_for
from benchmarks.runner import Benchmark, Row, in_turn, load_text, some_of, table, timed
from benchmarks.shapes import FAMILIES

SIMULATED_OPS = (500, 10_000)
PLACED_OPS = {"m_etf": (1000, 5000, 20_000, 100_000), "m_sct": (1000, 5000, 20_000)}
FAMILY, DEVICES, CCR, SEED = "layered", "4", 1.0, 3
COMPILING_OPS = 5000
"""By then all is compiled that ever is."""
SAMPLE_SECONDS = 0.5
"""A sample of a simulator's speed takes at least so long."""


class Task(NamedTuple):
    """A thing to time, on a graph of this many ops."""

    name: str
    ops: int


@cache
def instance(ops: int) -> tuple[OpGraph, Cluster]:
    graph = FAMILIES[FAMILY](ops, np.random.default_rng(SEED))
    return graph, cluster_for(graph, CCR, DEVICES, "loose")


def simulating(ops: int) -> Callable[[], Row]:
    """Samples the seconds of one simulation with its peaks; ops are dealt out to the devices in turn, so that most tensors are sent."""
    graph, cluster = instance(ops)
    simulate = Simulator(graph, cluster).evaluate
    placement = [v % len(cluster) for v in range(len(graph))]
    priority = [float(v) for v in range(len(graph))]

    def sample() -> Row:
        gc.collect()
        begin, count = time.perf_counter(), 0
        while (seconds := time.perf_counter() - begin) < SAMPLE_SECONDS:
            simulate(placement, priority)
            count += 1
        return {"seconds": seconds / count}

    return sample


def placing(method: str, ops: int) -> Callable[[], Row]:
    """Samples the seconds to place, and the plan's worth."""

    def sample() -> Row:
        gc.collect()
        result, took = timed(lambda: pipeline.plan(*instance(ops), pipeline.PlanRequest(method)))
        return {"seconds": took["seconds"], "predicted_us": result.predicted_step_us, "lower_bound_us": result.lower_bound_us}

    return sample


def variants(kinds: Sequence[str], most_ops: int) -> dict[Task, Callable[[], Row]]:
    """By task what samples it, small graphs first."""
    found = {Task("simulate", n): simulating(n) for n in SIMULATED_OPS if "simulate" in kinds}
    sizes = sorted({n for method in PLACED_OPS for n in PLACED_OPS[method]})
    found |= {Task(m, n): placing(m, n) for n in sizes for m in PLACED_OPS if m in kinds and n in PLACED_OPS[m]}
    return {task: sample for task, sample in found.items() if task.ops <= most_ops}


def measure(args: argparse.Namespace) -> Iterator[Row]:
    tasks = variants(args.tasks, args.most_ops)
    for task, sample in tasks.items():
        if task.ops <= COMPILING_OPS:
            sample()
    load = LoadOfOthers(time.process_time, os.sched_getaffinity(0))
    samples = in_turn(tasks, args.repeats)
    yield {"load_of_others": load.share(), "rows": [row_of(task, took) for task, took in samples.items()]}


def row_of(task: Task, took: Sequence[Row]) -> Row:
    """Every sample of a task."""
    graph, cluster = instance(task.ops)
    about = {"task": task.name, "ops": len(graph), "edges": sum(map(len, graph.inputs)), "devices": len(cluster)}
    return {**about, **took[-1], "seconds": [row["seconds"] for row in took]}


COLUMNS = {
    **{key: f"{{{key}}}" for key in ("task", "ops", "edges", "devices")},
    **{
        title: lambda row, of=of: as_time(1e6 * of(row["seconds"]))
        for title, of in {"least": min, "median": statistics.median, "most": max}.items()
    },
    "a second": lambda row: f"{1 / statistics.median(row['seconds']):.4g}",
    "predicted step": lambda row: as_time(row["predicted_us"]) if "predicted_us" in row else "-",
    "over bound": lambda row: f"{row['predicted_us'] / row['lower_bound_us']:.3f}" if row.get("lower_bound_us") else "-",
}


def report(found: Row) -> str:
    return f"{table(COLUMNS, found['rows'])}\n{load_text(found['load_of_others'])}"


FLAGS = {"--tasks": some_of(("simulate", *PLACED_OPS)), "--most_ops": 100_000, "--repeats": 5}
main = Benchmark("placers", __doc__, FLAGS, measure, report).main

if __name__ == "__main__":
    main()
