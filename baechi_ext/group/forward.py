"""Ops that are not placed by themselves. `--only_forward` (Baechi): every backward and update op goes where its forward op goes.
`--only_important_ops` (Baechi): ops that hardly count follow a neighbour."""

from collections import deque

from baechi_ext.errors import GraphError
from baechi_ext.group.colocation import Labels
from baechi_ext.group.grouping import Grouping, contract, crossing_tensors
from baechi_ext.ir.op_graph import OpGraph


def forward_of(graph: OpGraph) -> tuple[int, ...]:
    """For each op, the position of the forward op it follows; a forward op follows itself.

    Another op follows its `forward_op`. Where that is null it follows, in this order, the first forward op of its colocation
    group, or what the group's first op with a `forward_op` follows; what its nearest predecessor that follows something does
    (backward and update ops before forward ops, then in input order); what the nearest op in either direction does. An op
    that is connected to none of these follows itself.

    Raises GraphError where a `forward_op` is not a forward op of the graph.
    """
    follows = [_named_forward_op(graph, v) for v in range(len(graph))]
    _follow_group(graph, follows)
    _follow_predecessor(graph, follows)
    _follow_neighbour(graph, follows)
    return tuple(v if f is None else f for v, f in enumerate(follows))


def forward_nodes(graph: OpGraph) -> Grouping:
    """One coarse op per forward op, under its id, with the time and bytes of all that follow it, as in `contract`.

    Coarse edges are the tensors between ops that follow different forward ops, all counted in the forward direction, from the
    earlier forward op to the later one in topological order: a gradient on its way back adds to the cost of the edge it comes
    back along, and the coarse graph has no cycle. Such a tensor counts once per earlier op that reads it, so a cut costs at
    least what it costs in the fine graph. An op has joined the colocation group of the one it follows. Activations kept for the backward
    pass count as long as the coarse consumer runs, not until the step's end: memory is judged on the expanded plan.

    Raises GraphError as `forward_of` does.
    """
    follows = forward_of(graph)
    edges = [
        (source, target, size, name) if graph.rank[source] < graph.rank[target] else (target, source, size, name)
        for source, target, size, name in crossing_tensors(graph, follows)
    ]
    coarse = contract(joined(graph, follows), follows, edges)
    return Grouping(graph, coarse.coarse, coarse.members)


def joined(graph: OpGraph, follows: tuple[int, ...]) -> OpGraph:
    """`graph` relabelled: each op joins the colocation group of the one it follows."""
    labels = Labels(graph)
    for v, f in enumerate(follows):
        labels.join(f, v)
    return labels.relabelled()


def _named_forward_op(graph: OpGraph, v: int) -> int | None:
    op = graph.ops[v]
    if op.phase == "forward":
        return v
    if op.forward_op is None:
        return None
    f = graph.index.get(op.forward_op)
    if f is None or graph.ops[f].phase != "forward":
        found = "is not in the graph" if f is None else f"has phase {graph.ops[f].phase!r}"
        raise GraphError(f"op {op.id!r} names {op.forward_op!r} as its forward op, which {found}; name a forward op or none")
    return f


def _follow_group(graph: OpGraph, follows: list[int | None]) -> None:
    leaders: dict[str, int] = {}
    for forward in (True, False):
        for v in graph.order:
            op, f = graph.ops[v], follows[v]
            if op.colocation is not None and f is not None and (op.phase == "forward") is forward:
                leaders.setdefault(op.colocation, f)
    for v, op in enumerate(graph.ops):
        if follows[v] is None and op.colocation is not None:
            follows[v] = leaders.get(op.colocation)


def _follow_predecessor(graph: OpGraph, follows: list[int | None]) -> None:
    distance = [0] * len(graph)
    for v in graph.order:
        if follows[v] is None:
            known = [p for p in graph.predecessors[v] if follows[p] is not None]
            if known:
                nearest = min(known, key=lambda p: (distance[p], graph.ops[p].phase == "forward"))
                follows[v], distance[v] = follows[nearest], distance[nearest] + 1


def _follow_neighbour(graph: OpGraph, follows: list[int | None]) -> None:
    queue = deque(v for v in graph.order if follows[v] is not None)
    while queue:
        v = queue.popleft()
        for w in (*graph.successors[v], *graph.predecessors[v]):
            if follows[w] is None:
                follows[w] = follows[v]
                queue.append(w)


NEGLIGIBLE_SHARE = 0.01
"""All ops that hardly count take at most this share of the graph's compute time together."""


def important_ops(graph: OpGraph) -> tuple[bool, ...]:
    """For each op, True if it counts: it belongs to a colocation group, is pinned, holds persistent bytes, or takes time.

    The quickest of the others do not, as long as they take together at most NEGLIGIBLE_SHARE of the graph's compute time.
    """
    counts = [op.colocation is not None or op.pin is not None or op.persistent_bytes > 0 for op in graph.ops]
    left_us = NEGLIGIBLE_SHARE * graph.total_compute_us()
    for v in sorted(range(len(graph)), key=lambda v: graph.ops[v].compute_us):
        if not counts[v]:
            left_us -= graph.ops[v].compute_us
            counts[v] = left_us < 0
    return tuple(counts)


def fold_unimportant(graph: OpGraph) -> Grouping:
    """One coarse op per important op, with what follows it.

    An op that hardly counts follows the last of the ops it reads from, in topological order; one that reads nothing follows the
    first of those that read it. Neither closes a cycle: no edge leads from a later coarse op to an earlier one. An op that is
    connected to no important op keeps to itself, or to others of its kind.
    """
    counts = important_ops(graph)
    head = list(range(len(graph)))
    for v in graph.order:
        if not counts[v] and graph.predecessors[v]:
            head[v] = max((head[p] for p in graph.predecessors[v]), key=graph.rank.__getitem__)
    followers: dict[int, list[int]] = {}
    for v in graph.order:
        followers.setdefault(head[v], []).append(v)
    for h in reversed(graph.order):
        if head[h] == h and not counts[h] and not graph.predecessors[h]:
            readers = {head[w] for v in followers[h] for w in graph.successors[v]} - {h}
            if readers:
                first = min(readers, key=graph.rank.__getitem__)
                followers[first] += followers[h]
                for v in followers[h]:
                    head[v] = first
    return contract(graph, head)
