"""Colocation groups as labels on the ops, and how they merge. The `tf` grouper takes them as they are; for `coplace` an op whose result
goes to one op only runs where that one runs (Baechi, SoCC 2020)."""

from dataclasses import replace

from baechi_ext.errors import OptionError
from baechi_ext.ir.cluster import Link
from baechi_ext.ir.op_graph import OpGraph


class Labels:
    """The colocation groups of a graph as disjoint sets that can be joined; an op without a colocation string starts alone.

    `find(v)` is the op position that stands for the group of op `v`.
    """

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self._parent = list(range(len(graph)))
        self._size = [1] * len(graph)
        for members in graph.groups.values():
            for v in members[1:]:
                self.join(members[0], v)

    def find(self, v: int) -> int:
        parent = self._parent
        while parent[v] != v:
            parent[v] = parent[parent[v]]
            v = parent[v]
        return v

    def join(self, v: int, w: int) -> int:
        """Makes one group of those of `v` and `w`; returns what stands for it, which is one of the two that did before."""
        v, w = self.find(v), self.find(w)
        if v == w:
            return v
        if self._size[v] < self._size[w]:
            v, w = w, v
        self._parent[w] = v
        self._size[v] += self._size[w]
        return v

    def relabelled(self) -> OpGraph:
        """The graph with these groups as colocation strings; ops alone without a string stay without one.

        A group is named by the shortest, then lexicographically first, of its ops' strings (the rule of Baechi's TensorFlow
        grouper), or of its ops' ids where none has a string.
        """
        members: dict[int, list[int]] = {}
        for v in range(len(self.graph)):
            members.setdefault(self.find(v), []).append(v)
        ops = self.graph.ops
        strings = {r: {name for v in group if (name := ops[v].colocation) is not None} for r, group in members.items()}
        taken = {name for names in strings.values() for name in names}
        labels: dict[int, str] = {}
        for r, group in members.items():
            if strings[r]:
                labels[r] = min(strings[r], key=_shortest_first)
            elif len(group) > 1:
                label = min((ops[v].id for v in group), key=_shortest_first)
                while label in taken:  # an id may equal the string of another group
                    label += "'"
                taken.add(label)
                labels[r] = label
        return with_colocation(self.graph, [labels.get(self.find(v)) for v in range(len(self.graph))])


class Loads(Labels):
    """Groups whose compute time and persistent bytes stay below a share of the graph's, and that are pinned to one device at most. Raises
    OptionError for a share of 0."""

    def __init__(self, graph: OpGraph, max_share: float) -> None:
        if not max_share > 0:
            raise OptionError(f"max_share is {max_share!r}; expected a positive share, e.g. 0.03")
        self.compute_us = [op.compute_us for op in graph.ops]
        """Each group's, at the op that stands for it."""
        self._costs: tuple[list[float], ...] = (self.compute_us, [op.persistent_bytes for op in graph.ops])
        self._limits = [sum(costs) * max_share if max_share < 1 else float("inf") for costs in self._costs]
        self._pin: dict[int, int] = {}
        super().__init__(graph)
        for v, device in graph.pins.items():
            self._pin.setdefault(self.find(v), device)

    def pinned_apart(self, a: int, b: int) -> bool:
        """True if both are pinned, to different devices."""
        return self._pin.get(a, self._pin.get(b)) != self._pin.get(b, self._pin.get(a))

    def may_join(self, a: int, b: int, small: float = 0.0) -> bool:
        """True unless both have a cost that would come to more than its limit, or are pinned to different devices; one of at most `small`
        limits may be that much beyond it."""
        if self.pinned_apart(a, b):
            return False
        for limit, costs in zip(self._limits, self._costs, strict=True):
            less, more = sorted((costs[a], costs[b]))
            if less and less + more > limit and not (less <= limit * small and less + more <= limit * (1 + small)):
                return False
        return True

    def join(self, v: int, w: int) -> int:
        a, b = self.find(v), self.find(w)
        root = super().join(a, b)
        if a != b:
            for costs in self._costs:
                costs[root] = costs[a] + costs[b]
            if a in self._pin or b in self._pin:
                self._pin[root] = self._pin.get(a, self._pin.get(b, 0))
        return root


def with_colocation(graph: OpGraph, labels: list[str | None]) -> OpGraph:
    """The same graph with other colocation strings."""
    return graph.replace_ops([replace(op, colocation=label) for op, label in zip(graph.ops, labels, strict=True)])


def tf(graph: OpGraph, max_share: float = 1.0, link: Link = Link()) -> OpGraph:  # noqa: B008 - frozen
    """`graph` as it is: its colocation strings are the groups, whatever links cost. `max_share` bounds merges, and this merges nothing."""
    return graph


def _shortest_first(name: str) -> tuple[int, str]:
    return len(name), name


DEFAULT_MAX_SHARE = 1 / 32
"""A quarter of a device's fair share on 8 devices. List scheduling loads no device by more than one group beyond its fair
share, so groups of a quarter of that share still leave a placement within 25% of perfect balance."""


def coplace(graph: OpGraph, max_share: float = DEFAULT_MAX_SHARE, link: Link = Link()) -> OpGraph:  # noqa: B008 - frozen
    """`graph` relabelled: each op with exactly one distinct successor joins its successor's colocation group.

    Baechi's rule merges whatever it finds, and a graph with long chains ends up in groups that no placement can balance. Here
    two groups stay apart where both take time and together more than `max_share` of the graph's compute time, and likewise
    for persistent bytes, and what is pinned to different devices does. The largest tensors are joined first, so the ones left for a
    link to carry are small, whatever links cost. `max_share` = 1 is Baechi's rule, pins apart. One pass is stable: groups only grow,
    so what was refused once would be refused again.

    Raises OptionError where `max_share` is not positive.
    """
    groups = Loads(graph, max_share)
    for v, w in _single_successors(graph):
        a, b = groups.find(v), groups.find(w)
        if a != b and groups.may_join(a, b):
            groups.join(a, b)
    return groups.relabelled()


def _single_successors(graph: OpGraph) -> list[tuple[int, int]]:
    """(op, its only successor) of the ops that have only one, the most bytes first, then in topological order."""
    pairs = [(v, graph.successors[v][0]) for v in graph.order if len(graph.successors[v]) == 1]
    return sorted(pairs, key=lambda pair: -sum(graph.tensors[t].bytes for t in graph.outputs[pair[0]]))
