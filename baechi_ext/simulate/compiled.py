"""The compiled simulator: the same timelines as `engine.Simulator`, hundreds of times as fast. Loading it loads numba."""

from collections.abc import Sequence
from struct import Struct

import numpy as np

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.simulate import simulate_kernel
from baechi_ext.simulate.arrays import make_problem, make_state
from baechi_ext.simulate.timeline import Timeline, Transfer


class CompiledSimulator:
    """Simulates many plans for one graph and cluster, one at a time: each thread needs a simulator of its own."""

    def __init__(self, graph: OpGraph, cluster: Cluster) -> None:
        self.graph = graph
        self.cluster = cluster
        self.problem = make_problem(graph, cluster)
        self.tails_us: tuple[float, ...] = _as_tuple(self.problem.ops["tail_us"][:-1])
        self._state = make_state(self.problem)
        self._placement, self._priority = Struct(f"{len(graph)}I"), Struct(f"{len(graph)}d")  # twice as fast as numpy takes a sequence

    def evaluate(self, placement: Sequence[int], priority: Sequence[float] | None = None) -> tuple[float, tuple[float, ...]]:
        """The makespan in microseconds and each device's peak in bytes, without a timeline.

        Peaks are sums of floats: those of whole bytes are exact, others may differ from the timeline's in the last digits.
        """
        state = self._state
        self._placement.pack_into(state.placement, 0, *placement)
        state.totals["has_priority"] = priority is not None
        if priority is not None:
            self._priority.pack_into(state.priority, 0, *priority)
        makespan_us = simulate_kernel.run(self.problem, state)
        return makespan_us, tuple(state.devices["peak_bytes"].tolist())

    def run(self, placement: Sequence[int], priority: Sequence[float] | None = None) -> Timeline:
        """The timeline of one step; see `engine.Simulator.run`."""
        makespan_us, _ = self.evaluate(placement, priority)
        state = self._state
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


def _as_tuple(values: np.ndarray) -> tuple:
    return tuple(values.tolist())
