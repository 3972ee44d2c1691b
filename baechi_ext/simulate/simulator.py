"""The simulator: what a plan is worth, by the rules of docs/simulator.md. `simulate_kernel` does it; the first run loads numba."""

from collections.abc import Collection, Sequence
from functools import cached_property
from math import isfinite
from struct import Struct
from typing import TYPE_CHECKING, Any

from baechi_ext.errors import GraphError
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.ir.plan import require_devices
from baechi_ext.simulate.timeline import Timeline, Transfer

if TYPE_CHECKING:
    import numpy as np

    from baechi_ext.simulate.arrays import Problem, State

_EXACT = 2**53


class Simulator:
    """Simulates many plans for one graph and cluster, one at a time: each thread needs a simulator of its own. Placements are those of
    legal plans: nothing is checked, as so many are simulated."""

    def __init__(self, graph: OpGraph, cluster: Cluster) -> None:
        self.graph = graph
        self.cluster = cluster
        self._placement, self._priority = Struct(f"{len(graph)}I"), Struct(f"{len(graph)}d")  # twice as fast as numpy takes a sequence

    def evaluate(self, placement: Sequence[int], priority: Sequence[float] | None = None) -> tuple[float, tuple[float, ...]]:
        """The makespan in microseconds and each device's peak in bytes."""
        if self._whole_bytes:
            return self._simulate(placement, priority), tuple(self._state.devices["peak_bytes"].tolist())
        timeline = self.run(placement, priority)
        return timeline.makespan_us, timeline.peak_memory_bytes

    def run(self, placement: Sequence[int], priority: Sequence[float] | None = None, free: Collection[tuple[int, int]] = ()) -> Timeline:
        """The timeline of one step of this placement; `priority` (one number per op) orders ready ops, smaller first.

        `free`: transfers, by tensor and target, that take no time of links and devices, to ask what they cost. Raises GraphError where
        costs add up to no finite step.
        """
        state = self._state
        numbers = [tensor * len(self.cluster) + target for tensor, target in free]
        state.copies["free"][numbers] = True
        try:
            makespan_us = self._simulate(placement, priority)
        finally:
            state.copies["free"][numbers] = False
        if not isfinite(makespan_us):
            raise GraphError("the step takes longer than can be said in numbers; give ops and links smaller costs")
        sent = state.transfers[state.transfers["sent"][: state.totals["sent"][0]]]
        columns = (sent[name] for name in ("tensor", "source", "target", "request_us", "sent_us", "arrived_us"))
        return Timeline(
            graph=self.graph,
            cluster=self.cluster,
            placement=tuple(placement),
            makespan_us=makespan_us,
            start_us=_as_tuple(state.ops["start_us"]),
            end_us=_as_tuple(state.ops["end_us"]),
            started=_as_tuple(state.ops["started"]),
            busy_us=_as_tuple(state.devices["busy_us"]),
            transfers=tuple(map(Transfer, *(column.tolist() for column in columns))),
        )

    def _simulate(self, placement: Sequence[int], priority: Sequence[float] | None) -> float:
        from baechi_ext.simulate import simulate_kernel

        state = self._state
        self._placement.pack_into(state.placement.data, 0, *placement)
        state.totals["has_priority"] = priority is not None
        if priority is not None:
            self._priority.pack_into(state.priority.data, 0, *priority)
        return simulate_kernel.run(self._problem, state)

    @cached_property
    def _problem(self) -> "Problem":
        from baechi_ext.simulate.arrays import make_problem

        return make_problem(self.graph, self.cluster)

    @cached_property
    def _state(self) -> "State":
        from baechi_ext.simulate.arrays import make_state

        return make_state(self._problem)

    @cached_property
    def _whole_bytes(self) -> bool:
        """True if all sums of bytes are exact as floats, and so equal to those of the timeline's peaks."""
        c = self.graph.columns
        return c.are_whole() and (c.all_bytes().sum() + c.output_bytes.sum()) * len(self.cluster) < _EXACT


def simulate(graph: OpGraph, cluster: Cluster, placement: Sequence[int], priority: Sequence[float] | None = None) -> Timeline:
    """The timeline of one step; see `Simulator.run`. Raises PlanError, too, where an op has no device of the cluster."""
    require_devices(graph, cluster, placement)
    return Simulator(graph, cluster).run(placement, priority)


def _as_tuple(values: "np.ndarray[Any, Any]") -> tuple[Any, ...]:
    return tuple(values.tolist())


def lower_bound_us(graph: OpGraph, cluster: Cluster, *, thorough: bool = False) -> float:
    """See `relaxation.lower_bound_us`; no step takes less than its host."""
    from baechi_ext.simulate import relaxation

    return max(relaxation.lower_bound_us(graph, cluster, thorough=thorough), graph.total_issue_us())
