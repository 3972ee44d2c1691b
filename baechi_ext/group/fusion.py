"""The `fusion` placer type: ops of one colocation group that run in a row become one coarse op (Baechi, SoCC 2020)."""

from collections import deque

from baechi_ext.group.grouping import Grouping, GroupOptions, contract, crossing_tensors_without_cycles, first_members
from baechi_ext.ir.op_graph import OpGraph


class Folding:
    """`part[v]` is v itself where v still stands for a part, else a step on the way to that op; `after` and `before` are the
    neighbours of a part."""

    def __init__(self, graph: OpGraph) -> None:
        self.part = list(range(len(graph)))
        self.after = [dict.fromkeys(s) for s in graph.successors]
        self.before = [dict.fromkeys(p) for p in graph.predecessors]

    def find(self, v: int) -> int:
        while self.part[v] != v:
            self.part[v] = self.part[self.part[v]]
            v = self.part[v]
        return v

    def second_path(self, u: int, v: int) -> bool:
        """True if a path of more than one edge leads from u to v, so that contracting the edge would close a cycle; looked for from
        both ends, where fewer parts were reached last."""
        reached, reaching = set(self.after[u]) - {v}, set(self.before[v]) - {u}
        ahead, behind = reached.copy(), reaching.copy()
        while ahead and behind and reached.isdisjoint(behind) and reaching.isdisjoint(ahead):
            if len(ahead) <= len(behind):
                ahead = {x for w in ahead for x in self.after[w]} - reached
                reached |= ahead
            else:
                behind = {x for w in behind for x in self.before[w]} - reaching
                reaching |= behind
        return bool(ahead and behind)

    def fold(self, v: int, w: int) -> list[int]:
        """Makes one part of v and w; returns it first, and then the parts that lost a neighbour.

        The end with fewer neighbours is folded into the other, so the work is near-linear in the number of edges.
        """
        if len(self.after[v]) + len(self.before[v]) < len(self.after[w]) + len(self.before[w]):
            v, w = w, v
        self.part[w] = v
        changed = [v]
        for ahead, back in ((self.after, self.before), (self.before, self.after)):
            for x in ahead[w]:
                if x != v:
                    if x in ahead[v]:
                        changed.append(x)
                    ahead[v][x] = None
                    back[x][v] = None
                    del back[x][w]
            ahead[v].pop(w, None)
        self.after[w], self.before[w] = {}, {}
        return changed


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
    else:
        state.fold_where_that_closes_no_cycle(options.check_disjoint_paths)
    heads = first_members(graph, [state.find(v) for v in range(len(graph))])
    return contract(graph, heads, crossing_tensors_without_cycles(graph, heads) if options.allow_cycle else None)


class _Fusion(Folding):
    """A graph being contracted inside its colocation groups."""

    def __init__(self, graph: OpGraph) -> None:
        super().__init__(graph)
        self.graph = graph
        self.label = [op.colocation for op in graph.ops]

    def fold_where_that_closes_no_cycle(self, check_disjoint_paths: bool) -> None:
        dirty = deque(self.graph.order)
        while dirty:
            v = dirty.popleft()
            if self.part[v] == v:
                dirty.extend(self.fold_around(v))
            if not dirty and check_disjoint_paths:
                dirty.extend(self.fold_where_no_second_path())

    def fold_around(self, v: int) -> list[int]:
        """Contracts the edge to the only successor or from the only predecessor of `v`, if the group allows it.

        Returns the parts that may be contracted further for that: the new one and those that lost a neighbour.
        """
        for neighbours in (self.after[v], self.before[v]):
            if len(neighbours) == 1:
                w = next(iter(neighbours))
                if self.label[v] is not None and self.label[v] == self.label[w]:
                    return self.fold(v, w)
        return []

    def fold_where_no_second_path(self) -> list[int]:
        """One pass: contracts the edges inside groups whose ends no other path connects; returns the parts to look at again."""
        dirty: list[int] = []
        for u in self.graph.order:
            for v in list(self.after[u]):
                same = self.label[u] is not None and self.label[u] == self.label[v]
                if same and self.part[u] == u and v in self.after[u] and not self.second_path(u, v):
                    dirty += self.fold(u, v)
        return dirty

    def fold_all(self) -> None:
        """Contracts every edge inside a group, whatever cycle that closes."""
        for v, after in enumerate(self.graph.successors):
            for w in after:
                if self.label[v] is not None and self.label[v] == self.label[w]:
                    a, b = self.find(v), self.find(w)
                    if a != b:
                        self.part[b] = a
