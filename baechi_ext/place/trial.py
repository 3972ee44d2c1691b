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
    """A placement and an order, and what they are worth. Sorted by `key`, the best comes first."""

    placement: tuple[int, ...]
    priority: Priority | None
    simulator: Simulator

    @cached_property
    def timeline(self) -> Timeline:
        return self.simulator.run(self.placement, self.priority)

    @cached_property
    def _worth(self) -> tuple[float, tuple[float, ...]]:
        return self.simulator.evaluate(self.placement, self.priority)

    @property
    def makespan_us(self) -> float:
        return self._worth[0]

    @property
    def peak_memory_bytes(self) -> tuple[float, ...]:
        return self._worth[1]

    @cached_property
    def excess_bytes(self) -> tuple[float, ...]:
        """The bytes by which the peak of each device exceeds its limit."""
        return tuple(max(0.0, peak - room) for room, peak in zip(self.simulator.cluster.rooms, self._worth[1], strict=True))

    @property
    def valid(self) -> bool:
        return not any(self.excess_bytes)

    @property
    def key(self) -> tuple[float, float]:
        """Bytes over the limits first, then the step's time."""
        return sum(self.excess_bytes), self.makespan_us


def try_orders(simulator: Simulator, placement: Sequence[int], priorities: Iterable[Priority | None]) -> Trial:
    """The best trial of a placement under the given orders; of equals the first."""
    placed = tuple(placement)
    return min((Trial(placed, p, simulator) for p in priorities), key=lambda trial: trial.key)


def longest_path_order(simulator: Simulator) -> Priority:
    """Priorities: the longest compute-only path to the end first."""
    return tuple(-tail for tail in simulator.graph.tails_us)


def draining_order(simulator: Simulator) -> Priority:
    """Priorities: the shortest path to the end first, so that tensors are soon read and their memory is free again."""
    return simulator.graph.tails_us


def longest_placed_path_order(graph: OpGraph, cluster: Cluster, placement: Sequence[int]) -> Priority:
    """Priorities: the longest path to the end first, with the speeds and transfers of this placement."""
    links, speed = cluster.link_table(), [d.speed for d in cluster.devices]
    tails = [0.0] * len(graph)
    for v in reversed(graph.order):
        here, after = placement[v], 0.0
        for t in graph.outputs[v]:
            tensor = graph.tensors[t]
            for w in tensor.readers:
                path = tails[w] if placement[w] == here else tails[w] + links[here][placement[w]].total_us(tensor.bytes)
                if path > after:
                    after = path
        tails[v] = graph.ops[v].compute_us / speed[here] + after
    return tuple(-tail for tail in tails)
