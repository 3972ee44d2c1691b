"""Reserved working memory: what m_etf_reserve and m_sct_reserve share.

Where Baechi's `_reserve` variants place a colocation group, they keep free for it, until all its ops have finished, what the neediest
of them may need: the largest temporary bytes and the largest output, beside the persistent bytes of all.
"""

from dataclasses import replace

from baechi_ext.ir.op_graph import OpGraph


def reserving(graph: OpGraph) -> OpGraph:
    """The graph to be scheduled in place of `graph`: the same ops, and the reserve of each group as one more tensor.

    It goes from the group's first op in topological order to its last, so that it is held from the start of one to the end of the
    other. The ops' own temporary bytes are left out, as they are taken from the reserve; outputs are counted besides, since they may
    stay after the group's ops. Nothing is reserved for an op without a group: it runs when it is placed.
    """
    ops = list(graph.ops)
    rank = {v: i for i, v in enumerate(graph.order)}
    edges = [
        (graph.ops[tensor.producer].id, graph.ops[w].id, tensor.bytes, tensor.name) for tensor in graph.tensors for w in tensor.readers
    ]
    for members in graph.groups.values():
        if len(members) == 1:
            continue
        held = [sum(graph.tensors[t].bytes for t in graph.outputs[v]) for v in members]
        working = [ops[v].temporary_bytes + max(0, ops[v].output_bytes - out) for v, out in zip(members, held, strict=True)]
        first, last = min(members, key=rank.__getitem__), max(members, key=rank.__getitem__)
        edges.append((ops[first].id, ops[last].id, max(working) + max(held), _new_name(graph, first)))
        for v in members:
            ops[v] = replace(ops[v], temporary_bytes=0, output_bytes=0)
    return OpGraph.from_edges(ops, edges, name=graph.name)


def _new_name(graph: OpGraph, producer: int) -> str:
    taken = {graph.tensors[t].name for t in graph.outputs[producer]}
    name = "reserve"
    while name in taken:
        name += "'"
    return name
