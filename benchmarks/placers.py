"""How long simulating and placing take: generated graphs of 500 to 100,000 ops on 4 devices, or the captured graph of a model.

    python -m benchmarks.placers [--tasks=simulate,m_etf,m_sct] [--most_ops=100000] [--repeats=5] [--out=FILE.json]
    python -m benchmarks.placers --model_name=inception_v3 [--methods=m_etf,m_sct] [--out=FILE.json]

The second places the model's step on 2, 4 and 8 devices. Repeats are interleaved, after one round that is not counted on the
smallest graph of a method, which compiles what is compiled. The ratio is to the first row of the same graph and devices: the median
of pairs, with its 95% interval.
"""

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from baechi_ext.ir import Cluster, Link, OpGraph
from baechi_ext.ir.files import require_writable, write_json
from baechi_ext.place.registry import METHODS
from baechi_ext.simulate import Simulator
from baechi_ext.simulate.compiled import CompiledSimulator
from benchmarks.captured import MODELS, costed_graph
from benchmarks.families import cluster_for
from benchmarks.machine import machine
from benchmarks.shapes import FAMILIES
from runtime import pipeline
from runtime.samples import Ratio, Samples, busy_seconds
from runtime.tables import as_time

Simulate = Callable[[Sequence[int], Sequence[float]], Any]


def _reference(graph: OpGraph, cluster: Cluster) -> Simulate:
    simulator = Simulator(graph, cluster)
    return lambda placement, priority: simulator.run(placement, priority).peak_memory_bytes


SIMULATORS: dict[str, Callable[[OpGraph, Cluster], Simulate]] = {
    "reference": _reference,
    "compiled": lambda graph, cluster: CompiledSimulator(graph, cluster).evaluate,
}
"""Each gives a function that simulates a plan, makespan and peaks; the first is what the others are compared with."""
SIMULATED_OPS = (500, 10_000)
PLACED_OPS = {"m_etf": (1000, 5000, 20_000, 100_000), "m_sct": (1000, 5000, 20_000)}
FAMILY, DEVICES, CCR, SEED = "layered", "4", 1.0, 3
MODEL_LINK = Link(us_per_byte=0.0, latency_us=25.0)
"""About what the thread executor's link is found to be."""
SAMPLE_SECONDS = 0.5
"""A sample of a simulator's speed takes at least so long."""
SLOW_SECONDS, SLOW_REPEATS = 30.0, 3
"""What takes so long is repeated less often."""


@dataclass
class Task:
    """Something to time; `run` gives the seconds of one sample and what else a row says."""

    name: str
    graph: OpGraph
    cluster: Cluster
    run: Callable[[], tuple[float, dict[str, Any]]]
    seconds: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def sample(self) -> None:
        gc.collect()
        seconds, self.facts = self.run()
        self.seconds.append(seconds)

    def wants(self, repeats: int) -> bool:
        slow = bool(self.seconds) and self.seconds[0] > SLOW_SECONDS
        return len(self.seconds) < (min(repeats, SLOW_REPEATS) if slow else repeats)


def simulate_task(name: str, graph: OpGraph, cluster: Cluster) -> Task:
    """Seconds of one simulation; ops are dealt out to the devices in turn, so that most tensors are sent."""
    simulate = SIMULATORS[name](graph, cluster)
    placement = [v % len(cluster) for v in range(len(graph))]
    priority = [float(v) for v in range(len(graph))]

    def run() -> tuple[float, dict[str, Any]]:
        begin, count = time.perf_counter(), 0
        while (seconds := time.perf_counter() - begin) < SAMPLE_SECONDS:
            simulate(placement, priority)
            count += 1
        return seconds / count, {}

    return Task(f"simulate {name}", graph, cluster, run)


def place_task(method: str, graph: OpGraph, cluster: Cluster) -> Task:
    def run() -> tuple[float, dict[str, Any]]:
        begin = time.perf_counter()
        result = pipeline.plan(graph, cluster, pipeline.PlanRequest(method))
        seconds = time.perf_counter() - begin
        return seconds, {"predicted_us": result.predicted_step_us, "lower_bound_us": result.lower_bound_us}

    return Task(method, graph, cluster, run)


def generated_tasks(kinds: Sequence[str], most_ops: int) -> Iterator[Task]:
    makers = [(n, partial(simulate_task, name)) for n in SIMULATED_OPS for name in SIMULATORS if "simulate" in kinds]
    sizes = sorted({n for method in PLACED_OPS for n in PLACED_OPS[method]})
    makers += [(n, partial(place_task, m)) for n in sizes for m in PLACED_OPS if m in kinds and n in PLACED_OPS[m]]
    made: dict[int, tuple[OpGraph, Cluster]] = {}
    for n, make in makers:
        if n <= most_ops:
            if n not in made:
                graph = FAMILIES[FAMILY](n, np.random.default_rng(SEED))
                made[n] = graph, cluster_for(graph, CCR, DEVICES, "loose")
            yield make(*made[n])


def model_tasks(model: str, methods: Sequence[str]) -> Iterator[Task]:
    graph = costed_graph(model)
    for num_devices in (2, 4, 8):
        cluster = Cluster.uniform(num_devices, link=MODEL_LINK, parallel_transfers=True)
        yield from (place_task(method, graph, cluster) for method in methods)


def measure(tasks: Sequence[Task], repeats: int) -> float | None:
    """Fills the tasks' samples; the share of the cores that other processes took."""
    smallest: dict[str, Task] = {}
    for task in sorted(tasks, key=lambda task: len(task.graph)):
        smallest.setdefault(task.name, task)
    for task in smallest.values():
        task.run()
    begin = clocks()
    while due := [task for task in tasks if task.wants(repeats)]:
        for task in due:
            task.sample()
            shown = f"{task.name}, {len(task.graph)} ops, {len(task.cluster)} devices"
            sys.stderr.write(f"{shown}: {task.seconds[-1]:.4g} s\n")
    return load_of_others(begin)


def load_of_others(begin: tuple[float, float, float] | None) -> float | None:
    """The share of the cores that other processes took since `begin`, the clocks of then; None where the system does not tell."""
    if begin is None or (end := clocks()) is None:
        return None
    busy, own, wall = (b - a for a, b in zip(begin, end, strict=True))
    return max(0.0, busy - own) / (wall * len(os.sched_getaffinity(0)))


def clocks() -> tuple[float, float, float] | None:
    """Seconds that this process's cores were busy, that it used itself, and on the clock; None where the system does not tell."""
    try:
        busy = busy_seconds(Path("/proc/stat").read_text(encoding="ascii"), os.sched_getaffinity(0))
    except OSError:
        return None
    return busy, time.process_time(), time.monotonic()


def rows(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """One per task: every sample, and its ratio to the first task of the same graph and number of devices."""
    first: dict[tuple[str, int, int], Task] = {}
    found = []
    for task in tasks:
        kind = "simulate" if task.name.startswith("simulate") else "place"
        base = first.setdefault((kind, len(task.graph), len(task.cluster)), task)
        pairs = list(zip(base.seconds, task.seconds, strict=False))
        ratio = None if base is task else Ratio.of(*(Samples(tuple(1e6 * s for s in side)) for side in zip(*pairs, strict=True)))
        found.append(
            {
                "task": task.name,
                "ops": len(task.graph),
                "edges": sum(map(len, task.graph.inputs)),
                "devices": len(task.cluster),
                "seconds": task.seconds,
                **task.facts,
                "times_as_fast": None if ratio is None else {"as": base.name, **ratio.to_json()},
            }
        )
    return found


def show(found: Sequence[dict[str, Any]], console: Console) -> None:
    """Prints a Markdown table."""
    columns = ("task", "ops", "edges", "devices", "least", "median", "most", "a second", "times as fast", "predicted step", "over bound")
    table = Table(*columns, box=box.MARKDOWN)
    for row in found:
        seconds, ratio = row["seconds"], row["times_as_fast"]
        median = statistics.median(seconds)
        bound = row.get("lower_bound_us")
        table.add_row(
            *(str(row[key]) for key in ("task", "ops", "edges", "devices")),
            *(as_time(1e6 * s) for s in (min(seconds), median, max(seconds))),
            f"{1 / median:.4g}",
            "-" if ratio is None else f"{ratio['median']:.3g} ({ratio['low']:.3g} to {ratio['high']:.3g}) as {ratio['as']}",
            as_time(row["predicted_us"]) if "predicted_us" in row else "-",
            f"{row['predicted_us'] / bound:.3f}" if bound else "-",
        )
    console.print(table)


def main(argv: Sequence[str] | None = None) -> None:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=names, default=["simulate", *PLACED_OPS], help="of the generated graphs")
    parser.add_argument("--most_ops", type=int, default=100_000, help="no generated graph larger than this")
    parser.add_argument("--model_name", choices=MODELS, help="the captured graph of this model instead")
    parser.add_argument("--methods", type=names, default=["single", "contiguous", "m_topo", "m_etf", "m_sct"], help="for --model_name")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    unknown = [n for n in args.tasks if n not in ("simulate", *PLACED_OPS)] + [m for m in args.methods if m not in METHODS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; tasks are simulate, {', '.join(PLACED_OPS)}; methods are {', '.join(METHODS)}")
    if args.out is not None:
        require_writable(args.out)
    chosen = generated_tasks(args.tasks, args.most_ops) if args.model_name is None else model_tasks(args.model_name, args.methods)
    tasks = list(chosen)
    load = measure(tasks, args.repeats)
    found = rows(tasks)
    console = Console(width=200, highlight=False)
    show(found, console)
    console.print(f"load of others while measuring: {'unknown' if load is None else f'{load:.1%}'} of the cores")
    if args.out is not None:
        command = "python -m benchmarks.placers " + " ".join(sys.argv[1:])
        write_json(args.out, {"command": command, **machine(), "load_of_others": load, "rows": found})


if __name__ == "__main__":
    main()
