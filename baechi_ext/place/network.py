"""The graph as partitioners see it: an undirected network with whole weights. What metis and scotch share."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.arrange import arrange
from baechi_ext.place.chunks import Unit, held_bytes, spread, sums
from baechi_ext.place.common import PlanResult, Proposal, Task, conclude
from baechi_ext.place.sct_lp import pair_costs_us

_TOTAL = 100_000_000
"""All weights of one kind add up to about this much, which 32 bits hold."""


@dataclass(frozen=True)
class Network:
    """Vertices are units: colocation groups, and ops without one. `edges[v]` are its neighbours with the weights of the edges."""

    edges: tuple[dict[int, int], ...]
    weights: tuple[int, ...]
    """The weights to be spread over the devices in proportion to `shares`."""
    shares: tuple[float, ...]
    """Each device's part of the weight; they add up to 1."""
    seed: int
    time_limit_seconds: float


def networks(task: Task, ordered: Sequence[Unit]) -> list[Network]:
    """The graph with edges weighted by transfer times and vertices by their times, for shares as the devices' speeds.

    Where memory is limited there are two more: vertices weighted by the bytes they hold, for shares as the devices' limits, and
    by both, half and half.
    """
    graph, cluster, options = task.graph, task.cluster, task.options
    edges = _edges(graph, cluster, ordered)
    times = _parts(sums([op.compute_us for op in graph.ops], ordered))
    speeds = _parts([device.speed for device in cluster.devices])
    kinds = [(times, speeds)]
    limits = [device.memory_bytes for device in cluster.devices]
    known = [limit for limit in limits if limit is not None]
    if known:
        sizes = _parts(held_bytes(graph, ordered))
        rooms = _parts([max(known) if limit is None else limit for limit in limits])
        kinds += [(sizes, rooms), (_mean(times, sizes), _mean(speeds, rooms))]
    whole = [tuple(1 + round(part * _TOTAL) for part in parts) for parts, _ in kinds]
    seed, seconds = options.seed, options.time_limit_seconds
    return [Network(edges, weights, tuple(shares), seed, seconds) for weights, (_, shares) in zip(whole, kinds, strict=True)]


def best_partition(task: Task, partition: Callable[[Network], Sequence[int]]) -> PlanResult:
    """The plan of the best partition of the networks (a part per vertex, as many parts as devices), the parts on the devices that suit them
    best."""
    ordered = task.graph.units()

    def placed(parts: Sequence[int]) -> Proposal:
        return arrange(task, lambda sequence: spread(task.graph, ordered, [sequence[part] for part in parts]))

    return conclude(task, [placed(partition(network)) for network in networks(task, ordered)])


def _edges(graph: OpGraph, cluster: Cluster, ordered: Sequence[Unit]) -> tuple[dict[int, int], ...]:
    unit_of = {v: u for u, unit in enumerate(ordered) for v in unit}
    costs: list[dict[int, float]] = [defaultdict(float) for _ in ordered]
    for (v, w), cost in pair_costs_us(graph, cluster).items():
        a, b = unit_of[v], unit_of[w]
        if a != b:
            costs[a][b] += cost
            costs[b][a] += cost
    total = sum(sum(row.values()) for row in costs) or 1.0
    return tuple({u: 1 + round(cost / total * _TOTAL) for u, cost in sorted(row.items())} for row in costs)


def _parts(values: Sequence[float]) -> list[float]:
    total = sum(values)
    return [value / total if total else 1 / len(values) for value in values]


def _mean(first: Sequence[float], second: Sequence[float]) -> list[float]:
    return [(a + b) / 2 for a, b in zip(first, second, strict=True)]
