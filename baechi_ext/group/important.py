"""`--only_important_ops` (Baechi): ops that hardly count are not placed by themselves; they follow a neighbour."""

from baechi_ext.group.contraction import contract
from baechi_ext.group.grouping import Grouping
from baechi_ext.ir.op_graph import OpGraph

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
    rank = {v: i for i, v in enumerate(graph.order)}
    head = list(range(len(graph)))
    for v in graph.order:
        if not counts[v] and graph.predecessors[v]:
            head[v] = max((head[p] for p in graph.predecessors[v]), key=rank.__getitem__)
    followers: dict[int, list[int]] = {}
    for v in graph.order:
        followers.setdefault(head[v], []).append(v)
    for h in reversed(graph.order):
        if head[h] == h and not counts[h] and not graph.predecessors[h]:
            readers = {head[w] for v in followers[h] for w in graph.successors[v]} - {h}
            if readers:
                first = min(readers, key=rank.__getitem__)
                followers[first] += followers[h]
                for v in followers[h]:
                    head[v] = first
    return contract(graph, head)
