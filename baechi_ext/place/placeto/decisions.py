"""The decisions of an episode: colocation groups, and ops without one, in the order in which they are visited.

Of a graph with more of them than an episode can visit, clusters of them are decided (`blocks.block_levels`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.blocks import block_levels
from baechi_ext.place.chunks import Unit, spread

MOST_DECISIONS = 512


@dataclass(frozen=True)
class Decisions:
    """A graph, a cluster, and which ops are placed together. `units[u]` are op positions; an episode visits them as they stand."""

    graph: OpGraph
    cluster: Cluster
    units: tuple[Unit, ...]

    @classmethod
    def of(cls, graph: OpGraph, cluster: Cluster, order: Sequence[int] | None = None, most: int = MOST_DECISIONS) -> "Decisions":
        """The decisions in `order` (op positions; `graph.order` where there is none): a unit comes with the first of its ops."""
        order = graph.order if order is None else order
        chosen = graph.units(order)
        if len(chosen) > most:
            levels = block_levels(graph, cluster)
            rank = {v: i for i, v in enumerate(order)}
            blocks = next((level for level in levels if len(level) <= most), levels[-1])
            chosen = sorted((tuple(sorted(block, key=rank.__getitem__)) for block in blocks), key=lambda block: rank[block[0]])
        return cls(graph, cluster, tuple(chosen))

    def __len__(self) -> int:
        return len(self.units)

    @cached_property
    def unit_of(self) -> NDArray[np.int32]:
        """The decision of each op."""
        found = np.zeros(len(self.graph), np.int32)
        for u, unit in enumerate(self.units):
            found[list(unit)] = u
        return found

    @cached_property
    def above(self) -> NDArray[np.bool_]:
        """`above[u, w]`: w is an ancestor of u, for some op of each. Of two groups each may be above the other."""
        graph, unit_of = self.graph, self.unit_of
        reached = np.zeros((len(graph), len(self.units)), np.bool_)
        found = np.zeros((len(self.units), len(self.units)), np.bool_)
        for v in graph.order:
            for a in graph.predecessors[v]:
                reached[v] |= reached[a]
                reached[v, unit_of[a]] = True
            found[unit_of[v]] |= reached[v]
        np.fill_diagonal(found, False)
        return found

    @cached_property
    def parallel(self) -> NDArray[np.bool_]:
        """`parallel[u, w]`: no path leads from one to the other."""
        found = ~(self.above | self.above.T)
        np.fill_diagonal(found, False)
        return found

    def placement(self, devices: Sequence[int]) -> tuple[int, ...]:
        """A device per decision -> a device per op."""
        return spread(self.graph, self.units, [int(d) for d in devices])
