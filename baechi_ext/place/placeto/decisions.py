"""The decisions of an episode: colocation groups, and ops without one, in the order in which they are visited.

Of a graph with more of them than an episode can visit, clusters of them are decided (`blocks.cluster_levels`), or runs of the order.
A view of them is what networks see: features of ops and tensors relative to the graph's own scale, and who is connected with whom. All is
numbers without units, so that one policy serves all graphs and clusters. Loading this loads no framework.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.blocks import cluster_levels
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
            levels = [_split_by_pins(graph, level) for level in cluster_levels(graph, cluster)]
            rank = {v: i for i, v in enumerate(order)}
            blocks = next((level for level in levels if len(level) <= most), None) or _runs(graph, _sorted(levels[-1], rank), most)
            chosen = _sorted(blocks, rank)
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
    def pins(self) -> NDArray[np.int32]:
        """The device of each decision that is pinned, -1 for others."""
        pins = self.graph.pins
        return np.array([next((pins[v] for v in unit if v in pins), -1) for unit in self.units], np.int32)

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


def _sorted(blocks: Sequence[Unit], rank: Mapping[int, int]) -> list[Unit]:
    """The blocks, and the ops of each, by rank."""
    return sorted((tuple(sorted(block, key=rank.__getitem__)) for block in blocks), key=lambda block: rank[block[0]])


def _runs(graph: OpGraph, blocks: Sequence[Unit], most: int) -> list[Unit]:
    """The blocks, each all of one pin or of none, in as many runs as may be: of ops that nothing binds in pairs (a star)."""
    by_pin: dict[int | None, list[Unit]] = {}
    for block in blocks:
        by_pin.setdefault(graph.pins.get(block[0]), []).append(block)
    size = math.ceil(len(blocks) / max(1, most - len(by_pin)))
    return [tuple(chain.from_iterable(alike[i : i + size])) for alike in by_pin.values() for i in range(0, len(alike), size)]


def _split_by_pins(graph: OpGraph, blocks: Sequence[Unit]) -> Sequence[Unit]:
    """The blocks, of each what is pinned to a device apart from all else."""
    if not graph.pins:
        return blocks
    found: dict[tuple[int, int | None], list[int]] = {}
    for i, block in enumerate(blocks):
        for v in block:
            found.setdefault((i, graph.pins.get(v)), []).append(v)
    return [tuple(block) for block in found.values()]


OP_FEATURES = ("run", "output", "memory", "from_start", "to_end")
"""Features of an op: its time, what sending its outputs takes, what it holds, and the longest paths from the start and to the end."""
RELATIONS = ("above", "below", "parallel")


@dataclass(frozen=True)
class View:
    """The view of a graph before any op is placed."""

    decisions: Decisions

    @property
    def graph(self) -> OpGraph:
        return self.decisions.graph

    @cached_property
    def op_features(self) -> NDArray[np.float32]:
        """The OP_FEATURES of each op."""
        graph = self.graph
        run = np.array([op.compute_us for op in graph.ops])
        sent = np.array([sum(self._transfer_us[t] for t in out) for out in graph.outputs])
        held = graph.columns.held_bytes()
        before, after = np.array(graph.heads_us), np.array([max((graph.tails_us[w] for w in ws), default=0.0) for ws in graph.successors])
        longest_us = max(float((before + run + after).max(initial=0.0)), 1e-9)
        columns = (
            np.log1p(run / self._mean_us),
            np.log1p(sent / self._mean_us),
            np.log1p(held / max(held.mean(), 1e-9)),
            before / longest_us,
            after / longest_us,
        )
        return np.stack(columns, axis=1).astype(np.float32)

    @cached_property
    def edges(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        """Source and target op of each (tensor, reader), and one feature: what the transfer takes."""
        pairs = [(tensor.producer, w, self._transfer_us[t]) for t, tensor in enumerate(self.graph.tensors) for w in tensor.readers]
        source, target, transfer_us = (np.array([pair[i] for pair in pairs]) for i in range(3))
        feature = np.log1p(transfer_us.astype(float) / self._mean_us).astype(np.float32).reshape(-1, 1)
        return source.astype(np.int64), target.astype(np.int64), feature

    @cached_property
    def relations(self) -> NDArray[np.float32]:
        """For each of RELATIONS, by decision, the weights of the other decisions: equal, with a sum of 1 where there are any."""
        above = self.decisions.above
        found = np.stack([above, above.T, self.decisions.parallel]).astype(np.float32)
        found /= np.maximum(1.0, found.sum(axis=2, keepdims=True))
        return found

    @cached_property
    def _mean_us(self) -> float:
        """The mean time of an op on the mean device."""
        speeds = [d.speed for d in self.decisions.cluster.devices]
        return max(self.graph.total_compute_us() / max(1, len(self.graph)) / (sum(speeds) / len(speeds)), 1e-9)

    @cached_property
    def _transfer_us(self) -> list[float]:
        """The time of each tensor's transfer on the mean link."""
        link = self.decisions.cluster.mean_link()
        return [link.transfer_us(tensor.bytes) for tensor in self.graph.tensors]
