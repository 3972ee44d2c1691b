"""The `coplace` grouper: an op whose result goes to one op only runs where that one runs (Baechi, SoCC 2020)."""

from baechi_ext.group.colocation import Labels, Loads
from baechi_ext.ir.cluster import Link
from baechi_ext.ir.op_graph import OpGraph

DEFAULT_MAX_SHARE = 1 / 32
"""A quarter of a device's fair share on 8 devices. List scheduling loads no device by more than one group beyond its fair
share, so groups of a quarter of that share still leave a placement within 25% of perfect balance."""


def coplace(graph: OpGraph, max_share: float = DEFAULT_MAX_SHARE, link: Link = Link()) -> OpGraph:  # noqa: B008 - frozen
    """`graph` relabelled: each op with exactly one distinct successor joins its successor's colocation group.

    Baechi's rule merges whatever it finds, and a graph with long chains ends up in groups that no placement can balance. Here
    two groups stay apart where both take time and together more than `max_share` of the graph's compute time, and likewise
    for persistent bytes. The largest tensors are joined first, so the ones left for a link to carry are small, whatever links cost.
    `max_share` = 1 is Baechi's rule. One pass is stable: groups only grow, so what was refused once would be refused again.

    Raises OptionError where `max_share` is not positive.
    """
    labels = Labels(graph)
    loads = Loads(labels, max_share)
    for v, w in _single_successors(graph):
        a, b = labels.find(v), labels.find(w)
        if a != b and loads.may_join(a, b):
            loads.join(a, b)
    return labels.relabelled()


def _single_successors(graph: OpGraph) -> list[tuple[int, int]]:
    """(op, its only successor) of the ops that have only one, the most bytes first, then in topological order."""
    pairs = [(v, graph.successors[v][0]) for v in graph.order if len(graph.successors[v]) == 1]
    return sorted(pairs, key=lambda pair: -sum(graph.tensors[t].bytes for t in graph.outputs[pair[0]]))
