"""The `colocation` placer type: one coarse op per colocation group, or as few as a graph without cycles allows."""

import heapq

from baechi_ext.group.fusion import fusion
from baechi_ext.group.grouping import Grouping, GroupOptions, compose, contract, crossing_tensors_without_cycles, first_members, identity
from baechi_ext.ir.op_graph import PHASES, OpGraph


def colocation(graph: OpGraph, options: GroupOptions = GroupOptions()) -> Grouping:  # noqa: B008 - frozen
    """The coarse graph with each colocation group in as few coarse ops as the method finds; all carry the group's string.

    Ops of a training graph that read one parameter share a group (a forward op, its backward op, the parameter's update), so
    one op per group would close a cycle through the loss. The method looks for a topological order of the ops in which each
    group stands in few unbroken runs: contracting the runs of a topological order cannot close a cycle. It takes a group
    whose remaining ops can all run now; where there is none it must break one up, and takes all that can run now of a group
    whose remaining forward ops (else backward ops) can all run now, else of any. A group that lies on no cycle of the graph
    with one op per group is never broken up. Ties go to the first op in topological order. The work is near-linear.

    The search starts from the `fusion` of the graph: two ops contracted there can always share a run at no cost, since one of
    them has no reason to run apart from the other, so there are never more coarse ops than `fusion` leaves.

    Edges of 0 bytes into an update op order it and move nothing; they are left out, as Baechi leaves out control edges to updates,
    unless `consider_all_edges` of the options keeps them. `resolve_cycle` makes one op of each group; the coarse graph then has
    the edges of `crossing_tensors_without_cycles`.
    """
    thin = graph if options.consider_all_edges else _without_order_edges(graph)
    found = _whole_groups(thin) if options.resolve_cycle else _unbroken_runs(thin)
    return compose(identity(graph), found)


def _without_order_edges(graph: OpGraph) -> OpGraph:
    """The graph without edges of 0 bytes into update ops."""
    edges = []
    for w, op in enumerate(graph.ops):
        for t in graph.inputs[w]:
            tensor = graph.tensors[t]
            if tensor.bytes or op.phase != "update":
                edges.append((graph.ops[tensor.producer].id, op.id, tensor.bytes, tensor.name))
    if len(edges) == sum(map(len, graph.inputs)):
        return graph
    return OpGraph.from_edges(graph.ops, edges, name=graph.name, framework=graph.framework)


def _whole_groups(graph: OpGraph) -> Grouping:
    part = list(range(len(graph)))
    for members in graph.groups.values():
        for v in members:
            part[v] = members[0]
    heads = first_members(graph, part)
    return contract(graph, heads, crossing_tensors_without_cycles(graph, heads))


def _unbroken_runs(graph: OpGraph) -> Grouping:
    fused = fusion(graph)
    part = [0] * len(graph)
    for run in _Runs(fused.coarse).runs():
        for g in run:
            for v in fused.members[g]:
                part[v] = run[0]
    return contract(graph, first_members(graph, part))


class _Runs:
    """The search: which ops can run now, group by group. An op without a colocation string is a group of its own."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.group = list(range(len(graph)))
        for members in graph.groups.values():
            for v in members:
                self.group[v] = members[0]
        self.phase = [PHASES.index(op.phase) for op in graph.ops]
        self.left = {g: [0] * len(PHASES) for g in self.group}
        for v, g in enumerate(self.group):
            self.left[g][self.phase[v]] += 1
        self.on_cycle = self._groups_on_cycles()
        self.can_run: dict[int, list[int]] = {g: [] for g in self.left}
        self.can_run_by_phase = {g: [0] * len(PHASES) for g in self.left}
        self.first: dict[int, int] = {}
        self.missing = [len(p) for p in graph.predecessors]
        self.queue: list[tuple[int, int, int]] = []

    def runs(self) -> list[list[int]]:
        """All ops, in runs of one group each, in a topological order."""
        for v in self.graph.order:
            if not self.graph.predecessors[v]:
                self._admit(v)
        runs = []
        while self.queue:
            entry = heapq.heappop(self.queue)
            g = entry[-1]
            if self.can_run[g] and entry == self._entry(g):  # else an entry that a later one replaced
                runs.append(self._run(g))
        return runs

    def _groups_on_cycles(self) -> set[int]:
        import networkx as nx

        graph: nx.DiGraph[int] = nx.DiGraph()
        for v, successors in enumerate(self.graph.successors):
            graph.add_edges_from((self.group[v], self.group[w]) for w in successors)
        return {g for component in nx.strongly_connected_components(graph) if len(component) > 1 for g in component}

    def _entry(self, g: int) -> tuple[int, int, int]:
        """Sort key for the turn of group `g`: whether all or the first phase of what is left of it can run now."""
        left, now = self.left[g], self.can_run_by_phase[g]
        if left == now:
            urgency = 0
        else:
            first = next(p for p, count in enumerate(left) if count)
            urgency = 1 if left[first] == now[first] else 2
        return urgency, self.first[g], g

    def _admit(self, v: int) -> None:
        """Notes that op `v` can run now, and with it those ops of its group that then only wait for ops of the group."""
        g = self.group[v]
        ready = [v]
        while ready:
            u = ready.pop()
            self.can_run[g].append(u)
            self.first[g] = min(self.graph.rank[u], self.first.get(g, self.graph.rank[u]))
            self.can_run_by_phase[g][self.phase[u]] += 1
            for w in self.graph.successors[u]:
                if self.group[w] == g:
                    self.missing[w] -= 1
                    if not self.missing[w]:
                        ready.append(w)
        if g in self.on_cycle or self.left[g] == self.can_run_by_phase[g]:
            heapq.heappush(self.queue, self._entry(g))

    def _run(self, g: int) -> list[int]:
        run, self.can_run[g] = self.can_run[g], []
        del self.first[g]
        self.left[g] = [left - now for left, now in zip(self.left[g], self.can_run_by_phase[g], strict=True)]
        self.can_run_by_phase[g] = [0] * len(PHASES)
        for v in run:
            for w in self.graph.successors[v]:
                if self.group[w] != g:
                    self.missing[w] -= 1
                    if not self.missing[w]:
                        self._admit(w)
        return run
