"""Plain simulated annealing over placement and priorities: the yardstick for placing methods.

It starts from the best of a few simple plans and tries random moves of one unit (a colocation group, or an op of its own) to another
device and random changes of one op's priority, each judged by a whole simulation (benchmarks/anneal_kernel.py). Bytes over a memory
limit make a plan dearer, and ever more so. The temperature falls geometrically, from the mean change of a random move to a thousandth of
it, by the clock or over a given number of evaluations; small graphs get several such cycles. The best valid plan is kept.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.ir.plan import memory_violations
from baechi_ext.simulate import Timeline, simulate
from baechi_ext.simulate.arrays import Problem, State, make_problem, make_state
from benchmarks import anneal_kernel as kernel
from benchmarks.anneal_kernel import Best, Units
from benchmarks.families import chunks, depth_first_order
from benchmarks.runner import Row

COLDEST = 1e-3
"""The last temperature, as a share of the first."""
CHEAPEST = 3.0
"""At first a plan 1% over a device's limit costs 3% more; the price rises as the temperature falls."""
WAITING = (1.0, 3.0, 10.0)
"""Factors on the times of transfers, since they wait for one another."""
FEWEST_PROBES, MOST_PROBES, PROBED_OPS = 10, 100, 100_000
"""Random moves that set the first temperature: their number goes by the size of the graph."""
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
    problem, units = make_problem(graph, cluster), make_units(graph)
    state = make_state(problem)
    best = best_start(graph, problem, state, units)
    kernel.seed_lots(seed)
    kernel.anneal(problem, state, units, best, (0.0, CHEAPEST, 0))  # compiles
    kernel.mean_change(problem, state, units, CHEAPEST, 0)
    begin = time.perf_counter()
    done, part = max(FEWEST_PROBES, min(MOST_PROBES, PROBED_OPS // len(graph))), 0.0
    warmest = kernel.mean_change(problem, state, units, CHEAPEST, done)
    expected = evaluations or int(done / (time.perf_counter() - begin) * time_limit_seconds)
    cycles = min(MOST_CYCLES, max(1, expected // (EVALUATIONS_OF_A_UNIT * (len(units.at) - 1))))
    count = max(1, expected // SLICES)
    while part < 1.0:
        since = time.perf_counter()
        cooled = COLDEST ** (part * cycles % 1.0)
        kernel.anneal(problem, state, units, best, (warmest * cooled, CHEAPEST / cooled, count))
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


def make_units(graph: OpGraph) -> Units:
    units = [*graph.groups.values(), *((v,) for v, op in enumerate(graph.ops) if op.colocation is None)]
    return Units(np.cumsum([0, *map(len, units)]), np.array([v for unit in units for v in unit], dtype=np.int64))


def best_start(graph: OpGraph, problem: Problem, state: State, units: Units) -> Best:
    """The best of the simple plans, its order of starts as priorities; the state holds it, too."""
    n = len(graph)
    best = Best(np.zeros(n, np.uint32), np.zeros(n), np.array([1.0, np.inf]))
    state.priority[:] = -problem.ops["tail_us"][:-1]
    for placement in simple_placements(graph, problem, units):
        state.placement[:] = placement
        for state.totals["has_priority"] in (False, True):
            if kernel.keep(best, state, *kernel.cost_of(problem, state, CHEAPEST)):
                best.priority[state.ops["started"]] = np.arange(n) / n
    state.placement[:], state.priority[:], state.totals["has_priority"] = best.device, best.priority, True
    return best


def simple_placements(graph: OpGraph, problem: Problem, units: Units) -> Iterator[Sequence[int] | np.ndarray]:
    """All on one device, chunks of equal time and of equal bytes, and every op where it would end first if transfers took longer."""
    k = len(problem.devices)
    yield from range(k)
    for weights in ([op.compute_us for op in graph.ops], [op.persistent_bytes + op.output_bytes for op in graph.ops]):
        for order in (graph.order, depth_first_order(graph)):
            yield chunks(graph, order, weights, k)
    unit_of = np.zeros(len(graph), np.int64)
    unit_of[units.ops] = np.repeat(np.arange(len(units.at) - 1), np.diff(units.at))
    order = np.array(sorted(graph.order, key=lambda v: -graph.tails_us[v]), dtype=np.int64)
    for factor in WAITING:
        yield kernel.earliest_end(problem, unit_of, order, factor)


def annealed(graph_file: str, cluster_file: str, time_limit_seconds: float) -> Row:
    """The worth of the plan found, for a process of its own."""
    graph, cluster = OpGraph.load(graph_file), Cluster.load(cluster_file)
    found = anneal(graph, cluster, time_limit_seconds)
    if not found.valid:
        return {"status": "unknown", "error": "over the memory limits"}
    makespan_us = found.timeline.makespan_us
    return {"status": "feasible", "makespan_us": makespan_us, "placement_seconds": found.seconds, "evaluations": found.evaluations}
