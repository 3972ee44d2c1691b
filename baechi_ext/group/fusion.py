"""The `fusion` placer type: ops of one colocation group that run in a row become one coarse op (Baechi, SoCC 2020)."""

from collections import deque

from baechi_ext.group.contraction import contract, crossing_tensors_without_cycles, first_members
from baechi_ext.group.folding import Folding
from baechi_ext.group.grouping import Grouping, GroupOptions
from baechi_ext.ir.op_graph import OpGraph


def fusion(graph: OpGraph, options: GroupOptions = GroupOptions()) -> Grouping:  # noqa: B008 - frozen
    """The coarse graph after contracting, while there is one, an edge (u, v) inside a colocation group where u has no other
    successor or v no other predecessor.

    Either condition means that no second path leads from u to v, so contracting cannot close a cycle. Degrees are those of
    the graph contracted so far. Ops without a colocation string stay as they are. Deterministic; the smaller end of an edge
    is folded into the larger, so the work is near-linear in the number of edges.

    `check_disjoint_paths` of the options also contracts edges that fail the test where a search from both ends finds no second
    path. `allow_cycle` contracts every edge inside a group; the coarse graph then has the edges
    of `crossing_tensors_without_cycles`.
    """
    state = _Fusion(graph)
    if options.allow_cycle:
        state.fold_all()
        heads = first_members(graph, [state.folding.find(v) for v in range(len(graph))])
        return contract(graph, heads, crossing_tensors_without_cycles(graph, heads))
    dirty = deque(graph.order)
    while dirty:
        v = dirty.popleft()
        if state.folding.part[v] == v:
            dirty.extend(state.fold_around(v))
        if not dirty and options.check_disjoint_paths:
            dirty.extend(state.fold_where_no_second_path())
    return contract(graph, first_members(graph, [state.folding.find(v) for v in range(len(graph))]))


class _Fusion:
    """A graph being contracted inside its colocation groups."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.label = [op.colocation for op in graph.ops]
        self.folding = Folding(graph)

    def fold_around(self, v: int) -> list[int]:
        """Contracts the edge to the only successor or from the only predecessor of `v`, if the group allows it.

        Returns the parts that may be contracted further for that: the new one and those that lost a neighbour.
        """
        for neighbours in (self.folding.after[v], self.folding.before[v]):
            if len(neighbours) == 1:
                w = next(iter(neighbours))
                if self.label[v] is not None and self.label[v] == self.label[w]:
                    return self.folding.fold(v, w)
        return []

    def fold_where_no_second_path(self) -> list[int]:
        """One pass: contracts the edges inside groups whose ends no other path connects; returns the parts to look at again."""
        dirty: list[int] = []
        part, after = self.folding.part, self.folding.after
        for u in self.graph.order:
            for v in list(after[u]):
                same = self.label[u] is not None and self.label[u] == self.label[v]
                if same and part[u] == u and v in after[u] and not self.folding.second_path(u, v):
                    dirty += self.folding.fold(u, v)
        return dirty

    def fold_all(self) -> None:
        """Contracts every edge inside a group, whatever cycle that closes."""
        for v, after in enumerate(self.graph.successors):
            for w in after:
                if self.label[v] is not None and self.label[v] == self.label[w]:
                    a, b = self.folding.find(v), self.folding.find(w)
                    if a != b:
                        self.folding.part[b] = a
