"""Trials: what placements are worth when they are simulated, and by how much they exceed the memory limits."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.simulate import Simulator, Timeline

Priority = tuple[float, ...]


@dataclass(frozen=True)
class Trial:
    """A simulated placement and order. Sorted by `key`, the best comes first."""

    placement: tuple[int, ...]
    priority: Priority | None
    timeline: Timeline

    @cached_property
    def excess_bytes(self) -> tuple[float, ...]:
        """By how much the peak of each device exceeds its limit."""
        devices = self.timeline.cluster.devices
        if all(d.memory_bytes is None for d in devices):
            return (0.0,) * len(devices)
        return tuple(
            0.0 if d.memory_bytes is None else max(0.0, peak - d.memory_bytes)
            for d, peak in zip(devices, self.timeline.peak_memory_bytes, strict=True)
        )

    @property
    def valid(self) -> bool:
        return not any(self.excess_bytes)

    @property
    def key(self) -> tuple[float, float]:
        """Bytes over the limits first, then the step's time."""
        return sum(self.excess_bytes), self.timeline.makespan_us


def try_orders(simulator: Simulator, placement: Sequence[int], priorities: Iterable[Priority | None]) -> Trial:
    """The best trial of a placement under the given orders; of equals the first."""
    placed = tuple(placement)
    return min((Trial(placed, p, simulator.run(placed, p)) for p in priorities), key=lambda trial: trial.key)


def longest_path_order(simulator: Simulator) -> Priority:
    """Priorities: the longest compute-only path to the end first."""
    return tuple(-tail for tail in simulator.tails_us)


def draining_order(simulator: Simulator) -> Priority:
    """Priorities: the shortest path to the end first, so that tensors are soon read and their memory is free again."""
    return simulator.tails_us


def longest_placed_path_order(graph: OpGraph, cluster: Cluster, placement: Sequence[int]) -> Priority:
    """Priorities: the longest path to the end first, with the speeds and transfers of this placement."""
    links, speed = cluster.link_table(), [d.speed for d in cluster.devices]
    tails = [0.0] * len(graph)
    for v in reversed(graph.order):
        here, after = placement[v], 0.0
        for t in graph.outputs[v]:
            tensor = graph.tensors[t]
            for w in tensor.readers:
                path = tails[w] if placement[w] == here else tails[w] + links[here][placement[w]].transfer_us(tensor.bytes)
                if path > after:
                    after = path
        tails[v] = graph.ops[v].compute_us / speed[here] + after
    return tuple(-tail for tail in tails)
