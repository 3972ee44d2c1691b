"""Plain simulated annealing over placement and priorities: the yardstick for placing methods.

    python -m benchmarks.anneal GRAPH.json --num_devices=4 [--time_limit=60] [--seed=0] [--json]

It starts from the best of a few simple plans and tries random moves of one unit (a colocation group, or an op of its own) to another
device and random changes of one op's priority, each judged by a whole simulation (benchmarks/kernel.py). Bytes over a memory limit
make a plan dearer, and ever more so. The temperature falls geometrically, from the mean change of a random move to a thousandth of
it, by the clock or over a given number of evaluations; small graphs get several such cycles. The best valid plan is kept.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.ir.check import memory_violations
from baechi_ext.simulate import Timeline, lower_bound_us, simulate
from benchmarks import kernel
from benchmarks.arrays import Best, Decision, Problem, Slice, State, Units, make_problem, make_state, make_units
from benchmarks.families import chunks, depth_first_order
from runtime.flags import common as flags
from runtime.tables import as_time

COLDEST = 1e-3
"""The last temperature, of the first."""
CHEAPEST = 3.0
"""At first a plan 1% over a device's limit costs 3% more; the price rises as the temperature falls."""
WAITING = (1.0, 3.0, 10.0)
"""How much longer, since they wait for one another."""
FEWEST_PROBES, MOST_PROBES, PROBED_OPS = 10, 100, 100_000
"""Random moves that tell the first temperature: so many, by the size of the graph."""
SLICES = 400
"""Steps in which the temperature falls."""
MOST_CYCLES, EVALUATIONS_OF_A_UNIT = 40, 100
"""The temperature falls several times where each of them leaves so many evaluations to a unit."""


@dataclass(frozen=True)
class Annealed:
    """The best plan found, as the simulator sees it."""

    timeline: Timeline
    priority: tuple[float, ...]
    evaluations: int
    seconds: float

    @property
    def valid(self) -> bool:
        return not memory_violations(self.timeline.cluster, self.timeline.peak_memory_bytes)


def anneal(graph: OpGraph, cluster: Cluster, time_limit_seconds: float = 60.0, seed: int = 0, evaluations: int | None = None) -> Annealed:
    """The best plan that annealing finds; with `evaluations` so many are made whatever time they take. Compiling is not counted."""
    if not graph.ops:
        return Annealed(simulate(graph, cluster, []), (), 0, 0.0)
    problem = make_problem(graph, cluster)
    state, units = make_state(problem), make_units(graph, cluster)
    plan, best = best_start(graph, problem, state, units)
    kernel.seed_lots(seed)
    kernel.anneal(problem, state, plan, units, best, Slice(0.0, CHEAPEST, 0))  # compiles
    kernel.mean_change(problem, state, plan, units, Slice(0.0, CHEAPEST, 0))
    begin = time.perf_counter()
    done, part = max(FEWEST_PROBES, min(MOST_PROBES, PROBED_OPS // len(graph))), 0.0
    warmest = kernel.mean_change(problem, state, plan, units, Slice(0.0, CHEAPEST, done))
    expected = evaluations or int(done / (time.perf_counter() - begin) * time_limit_seconds)
    cycles = min(MOST_CYCLES, max(1, expected // (EVALUATIONS_OF_A_UNIT * (len(units.at) - 1))))
    count = max(1, expected // SLICES)
    while part < 1.0:
        since = time.perf_counter()
        cooled = COLDEST ** (part * cycles % 1.0)
        kernel.anneal(problem, state, plan, units, best, Slice(warmest * cooled, CHEAPEST / cooled, count))
        done += count
        if evaluations is None:
            now = time.perf_counter()
            part = (now - begin) / time_limit_seconds
            count = max(1, int(count * min(2.0, max(0.5, time_limit_seconds / SLICES / (now - since)))))
        else:
            part = done / evaluations
            count = max(1, min(count, evaluations - done))
    seconds = time.perf_counter() - begin
    priority = tuple(best.priority.tolist())
    return Annealed(simulate(graph, cluster, best.device.tolist(), priority), priority, done, seconds)


def best_start(graph: OpGraph, problem: Problem, state: State, units: Units) -> tuple[Decision, Best]:
    """The best of the simple plans, its order of starts as priorities."""
    n = len(graph)
    best = Best(np.zeros(n, np.int64), np.zeros(n), np.array([1.0, np.inf]))
    for placement in simple_placements(graph, problem, units):
        for prioritised in (False, True):
            plan = Decision(np.array(placement, dtype=np.int64), -problem.tails_us, prioritised)
            if kernel.keep(best, plan, *kernel.cost_of(problem, state, plan, units, CHEAPEST)):
                best.priority[state.started] = np.arange(n) / max(1, n)
    return Decision(best.device.copy(), best.priority.copy(), True), best


def simple_placements(graph: OpGraph, problem: Problem, units: Units) -> Iterator[Sequence[int] | np.ndarray]:
    """All on one device, chunks of equal time and of equal bytes, and every op where it would end first if transfers took longer."""
    yield from ([d] * len(graph) for d in range(len(problem.speed)))
    for weights in ([op.compute_us for op in graph.ops], [op.persistent_bytes + op.output_bytes for op in graph.ops]):
        for order in (graph.order, depth_first_order(graph)):
            yield chunks(graph, order, weights, len(problem.speed))
    unit_of = np.zeros(len(graph), np.int64)
    unit_of[units.ops] = np.repeat(np.arange(len(units.at) - 1), np.diff(units.at))
    order = np.array(sorted(graph.order, key=lambda v: -problem.tails_us[v]), dtype=np.int64)
    for factor in WAITING:
        yield kernel.earliest_end(problem._replace(link=factor * problem.link), unit_of, order)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph", metavar="GRAPH")
    flags.add_cluster_flags(parser)
    parser.add_argument("--time_limit", type=flags.positive, default=60.0, metavar="SECONDS")
    parser.add_argument("--seed", type=flags.whole, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    graph, cluster = OpGraph.load(args.graph), flags.cluster_of(args)
    found = anneal(graph, cluster, args.time_limit, args.seed)
    bound = lower_bound_us(graph, cluster)
    console = Console(highlight=False)
    if args.json:
        value = {
            "makespan_us": found.timeline.makespan_us,
            "valid": found.valid,
            "evaluations": found.evaluations,
            "seconds": found.seconds,
            "lower_bound_us": bound,
        }
        console.out(json.dumps(value))
        return
    rate = found.evaluations / max(found.seconds, 1e-9)
    note = "" if found.valid else " (over the memory limits)"
    console.print(f"makespan {as_time(found.timeline.makespan_us)}{note}, {rate:,.0f} evaluations/s")
    console.print(f"lower bound {as_time(bound)}, {found.evaluations:,} evaluations in {found.seconds:.1f} s")


if __name__ == "__main__":
    main()
