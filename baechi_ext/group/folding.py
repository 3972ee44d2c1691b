"""A graph while its edges are being contracted, one at a time."""

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
