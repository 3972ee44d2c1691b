"""The orders in which a placer can visit the ops of a graph.

They are those of the traversal-order study (Wang, Payberah, Hagos and Vlassov, arXiv 2201.09676) and their reverses. All but `topo`
and its reverse go by name where they have a choice, so that they are the same whatever the order of the graph file. Names are ids.
"""

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from baechi_ext.errors import OptionError
from baechi_ext.ir.op_graph import OpGraph

if TYPE_CHECKING:
    import networkx as nx


class Traversal(NamedTuple):
    """An order: how it is made of a graph and a seed, and a line for menus."""

    function: Callable[[OpGraph, int], tuple[int, ...]]
    help: str


def traversal(graph: OpGraph, name: str, seed: int = 0) -> tuple[int, ...]:
    """All op positions, each once, in the order of that name (a key of TRAVERSALS); the seed is for `random`.

    Raises OptionError for an unknown name.
    """
    if name not in TRAVERSALS:
        raise OptionError(f"unknown traversal order {name!r}; choose one of {', '.join(TRAVERSALS)}")
    return TRAVERSALS[name].function(graph, seed)


def _lexico_topo(graph: OpGraph, seed: int) -> tuple[int, ...]:
    """The topological order in which, of the ops whose inputs have all been visited, the first by name is next."""
    import networkx as nx

    return tuple(nx.lexicographical_topological_sort(_by_name(graph), key=lambda v: graph.ops[v].id))


def _alpha(graph: OpGraph, seed: int) -> tuple[int, ...]:
    return tuple(sorted(range(len(graph)), key=lambda v: graph.ops[v].id))


def _bfs(graph: OpGraph, seed: int) -> tuple[int, ...]:
    """A source, then what reads from it, then what reads from that; then the next source, without what has been visited."""
    digraph = _by_name(graph)
    order: dict[int, None] = {}
    for source in digraph:
        queue = [] if source in order else [source]
        order.setdefault(source)
        for v in queue:
            fresh = [w for w in digraph[v] if w not in order]
            order.update(dict.fromkeys(fresh))
            queue += fresh
    return tuple(order)


def _random(graph: OpGraph, seed: int) -> tuple[int, ...]:
    order = list(_alpha(graph, seed))
    Random(seed).shuffle(order)
    return tuple(order)


def _depth_first(graph: OpGraph, entered: bool) -> tuple[int, ...]:
    """The ops of a depth-first search from the sources in the order in which they are entered, or else left."""
    import networkx as nx

    return tuple((nx.dfs_preorder_nodes if entered else nx.dfs_postorder_nodes)(_by_name(graph)))


def _by_name(graph: OpGraph) -> "nx.DiGraph[int]":
    """The ops and what reads from them, by name; those without inputs, from which every op can be reached, come first."""
    import networkx as nx

    digraph: nx.DiGraph[int] = nx.DiGraph()
    ordered = sorted(range(len(graph)), key=lambda v: (bool(graph.inputs[v]), graph.ops[v].id))
    digraph.add_nodes_from(ordered)
    for v, after in enumerate(graph.successors):
        digraph.add_edges_from((v, w) for w in sorted(after, key=lambda w: graph.ops[w].id))
    return digraph


TRAVERSALS: dict[str, Traversal] = {
    "topo": Traversal(lambda graph, _: graph.order, "inputs first, first come first served"),
    "reversed_topo": Traversal(lambda graph, _: graph.order[::-1], "readers first: topo from its end"),
    "lexico_topo": Traversal(_lexico_topo, "inputs first, by name"),
    "alpha": Traversal(_alpha, "by name alone"),
    "bfs": Traversal(_bfs, "breadth first from the sources, by name"),
    "reversed_bfs": Traversal(lambda graph, seed: _bfs(graph, seed)[::-1], "bfs from its end"),
    "dfs_preorder": Traversal(lambda graph, _: _depth_first(graph, True), "depth first from the sources, an op before what reads from it"),
    "dfs_postorder": Traversal(lambda graph, _: _depth_first(graph, False), "depth first from the sources, an op after what reads from it"),
    "random": Traversal(_random, "at random, by --seed"),
}
