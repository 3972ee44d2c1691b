"""Merging neighbours until few ops are left, as many as a learned placer can visit one by one (Placeto, NeurIPS 2019, groups first)."""

from collections import Counter
from collections.abc import Iterable, Sequence
from graphlib import TopologicalSorter

from baechi_ext.errors import OptionError
from baechi_ext.group.colocation import DEFAULT_MAX_SHARE, Loads, with_colocation
from baechi_ext.group.fusion import Folding
from baechi_ext.group.grouping import Grouping, contract, first_members
from baechi_ext.ir.op_graph import OpGraph

SHARE_OF_A_ROUND = 0.25
"""Share of the contractions still needed that is looked for before costs are computed anew."""


def merge(graph: OpGraph, max_ops: int, max_share: float = DEFAULT_MAX_SHARE) -> Grouping:
    """The coarse graph of at most `max_ops` ops, or as few as can be, after contracting edges.

    An edge is contracted where no second path connects its ends, so no cycle closes, and pins let them share a device. Cheap ones go
    first: those that lengthen the longest path of the graph least, and, between two colocation groups (an op without a string is one
    of its own), where the smaller group takes least time in all: they share a device for good, with all their ops. At equal cost the
    largest tensor goes first. Only when nothing else is left are groups joined that both take time and together more than `max_share`
    of the graph's compute time, or likewise of its persistent bytes.

    Raises OptionError where `max_ops` is below 1 or `max_share` not positive.
    """
    if max_ops < 1:
        raise OptionError(f"max_ops is {max_ops}; expected at least 1")
    merging = _Merging(graph, max_share)
    merging.run(max_ops)
    found = contract(merging.groups.relabelled(), first_members(graph, [merging.find(v) for v in range(len(graph))]))
    # A string that only one op carries binds nothing.
    count = Counter(op.colocation for op in found.coarse.ops)
    labels = [op.colocation if count[op.colocation] > 1 else None for op in found.coarse.ops]
    return Grouping(graph, with_colocation(found.coarse, labels), found.members)


class _Merging(Folding):
    """A graph whose edges are contracted in rounds: all are ranked by what contracting them costs, and the cheapest are contracted."""

    def __init__(self, graph: OpGraph, max_share: float) -> None:
        super().__init__(graph)
        self.groups = Loads(graph, max_share)
        self.parts = dict.fromkeys(graph.order)
        """The ops that stand for parts, in no certain order."""
        self.compute_us = [op.compute_us for op in graph.ops]
        """One entry per part, at the op that stands for it."""
        self.tensors = [(t.producer, reader, t.bytes) for t in graph.tensors for reader in t.readers]

    def run(self, max_ops: int) -> None:
        """Contracts edges until so few parts are left, or no edge is."""
        while len(self.parts) > max_ops:
            excess = len(self.parts) - max_ops
            touched: set[int] = set()
            for rank, (u, v) in enumerate(self._ranked()):
                # The later ones wait for the next round, in which they cost something else; but some edge is contracted in each.
                if touched and rank >= excess * SHARE_OF_A_ROUND or len(touched) >= 2 * excess:
                    break
                if u not in touched and v not in touched and self._may_contract(u, v):
                    touched |= {u, v}
                    self._contract(u, v)
            if not touched:
                return

    def _ranked(self) -> list[tuple[int, int]]:
        """The edges between parts, cheapest first."""
        largest: dict[tuple[int, int], int | float] = {}
        for source, target, size in self.tensors:
            u, v = self.find(source), self.find(target)
            if u != v:
                largest[u, v] = max(size, largest.get((u, v), 0))
        levels = _Levels(self, self.parts, self.compute_us)
        return sorted(largest, key=lambda edge: (*self._cost(edge[0], edge[1], levels), -largest[edge], edge))

    def _cost(self, u: int, v: int, levels: "_Levels") -> tuple[bool, float, float, float]:
        """True if a group grows too large; the time by which the longest path grows and that loses its freedom; the former alone; the
        smaller end's."""
        longer_us = max(0.0, levels.path_through_us(u, v) - levels.longest_us)
        smaller_us = min(self.compute_us[u], self.compute_us[v])
        a, b = self.groups.find(u), self.groups.find(v)
        if a == b:
            return False, longer_us, longer_us, smaller_us
        less_us = min(self.groups.compute_us[a], self.groups.compute_us[b])
        return not self.groups.may_join(a, b), longer_us + less_us, longer_us, smaller_us

    def _may_contract(self, u: int, v: int) -> bool:
        apart = self.groups.pinned_apart(self.groups.find(u), self.groups.find(v))
        return not apart and not self.second_path(u, v)

    def _contract(self, u: int, v: int) -> None:
        time_us = self.compute_us[u] + self.compute_us[v]
        part = self.fold(u, v)[0]
        self.compute_us[part] = time_us
        del self.parts[v if part == u else u]
        self.groups.join(u, v)


class _Levels:
    """The longest paths of a graph of parts, in microseconds: before and after each part, and of all."""

    def __init__(self, folding: Folding, parts: Iterable[int], compute_us: Sequence[float]) -> None:
        self.folding, self.compute_us = folding, compute_us
        self.before_us: dict[int, float] = {}
        self.after_us: dict[int, float] = {}
        order = [*TopologicalSorter({v: folding.before[v] for v in parts}).static_order()]
        for v in order:
            self.before_us[v] = max((self.before_us[p] + compute_us[p] for p in folding.before[v]), default=0.0)
        for v in reversed(order):
            self.after_us[v] = max((self.after_us[s] + compute_us[s] for s in folding.after[v]), default=0.0)
        self.longest_us = max((self.before_us[v] + compute_us[v] + self.after_us[v] for v in order), default=0.0)

    def path_through_us(self, u: int, v: int) -> float:
        """The longest path through the part that u and v would be."""
        others = (self.before_us[p] + self.compute_us[p] for p in self.folding.before[v] if p != u)
        ahead = max(self.before_us[u], max(others, default=0.0))
        others = (self.after_us[s] + self.compute_us[s] for s in self.folding.after[u] if s != v)
        behind = max(self.after_us[v], max(others, default=0.0))
        return ahead + self.compute_us[u] + self.compute_us[v] + behind
