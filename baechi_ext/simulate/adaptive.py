"""A simulator that is plain for a few runs and compiled from then on: small graphs don't wait for a compiler, large ones for nothing."""

import sys
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.simulate.engine import Simulator
from baechi_ext.simulate.timeline import Timeline

if TYPE_CHECKING:
    from baechi_ext.simulate.compiled import CompiledSimulator

PLAIN_OPS = 50_000
"""Ops simulated plainly before that has cost as much as loading the compiled simulator does: half a second."""
_EXACT = 2**53


class AdaptiveSimulator:
    """Simulates many plans for one graph and cluster, with the same results from the first run to the last."""

    def __init__(self, graph: OpGraph, cluster: Cluster) -> None:
        self.graph = graph
        self.cluster = cluster
        self._ops_left = PLAIN_OPS

    @property
    def tails_us(self) -> tuple[float, ...]:
        """See `OpGraph.tails_us`."""
        return self.graph.tails_us

    def run(self, placement: Sequence[int], priority: Sequence[float] | None = None) -> Timeline:
        """The timeline of one step; see `engine.Simulator.run`."""
        return self._simulator().run(placement, priority)

    def evaluate(self, placement: Sequence[int], priority: Sequence[float] | None = None) -> tuple[float, tuple[float, ...]]:
        """The makespan in microseconds and each device's peak in bytes."""
        simulator = self._simulator()
        if self._whole_bytes and not isinstance(simulator, Simulator):
            return simulator.evaluate(placement, priority)
        timeline = simulator.run(placement, priority)
        return timeline.makespan_us, timeline.peak_memory_bytes

    def _simulator(self) -> "Simulator | CompiledSimulator":
        if self._ops_left <= 0 or self.graph.size > PLAIN_OPS or _is_loaded():
            return self._compiled
        self._ops_left -= self.graph.size
        return self._plain

    @cached_property
    def _plain(self) -> Simulator:
        return Simulator(self.graph, self.cluster)

    @cached_property
    def _compiled(self) -> "CompiledSimulator":
        from baechi_ext.simulate.compiled import CompiledSimulator

        return CompiledSimulator(self.graph, self.cluster)

    @cached_property
    def _whole_bytes(self) -> bool:
        """Whether all sums of bytes are exact as floats."""
        c = self.graph.columns
        return c.are_whole() and (c.all_bytes().sum() + c.output_bytes.sum()) * len(self.cluster) < _EXACT


def _is_loaded() -> bool:
    """Whether this process simulates in compiled code already."""
    kernel = sys.modules.get("baechi_ext.simulate.simulate_kernel")
    return kernel is not None and bool(kernel.run.signatures)
