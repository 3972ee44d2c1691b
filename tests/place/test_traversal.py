"""Traversal orders: against networkx where it has the same definition, by hand where it hasn't, and whatever the file order."""

import random

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.errors import OptionError
from baechi_ext.ir import OpGraph
from baechi_ext.place.common import PlaceOptions
from baechi_ext.place.registry import METHODS, place
from baechi_ext.place.traversal import TRAVERSALS, traversal
from tests.build import cluster_of, graph_of
from tests.simulate.strategies import graphs

BY_FILE = {"topo", "reversed_topo"}
ORDERED = {"contiguous", "m_topo", "m_topo_nonuniform", "placeto", "round_robin", "random"}


def names(graph: OpGraph, order: str, seed: int = 0) -> list[str]:
    return [graph.ops[v].id for v in traversal(graph, order, seed)]


def as_networkx(graph: OpGraph) -> nx.DiGraph:
    """Sources first, all by name, as their successors are: networkx goes by insertion."""
    found = nx.DiGraph()
    found.add_nodes_from(sorted((op.id for op in graph.ops), key=lambda id_: (bool(graph.inputs[graph.index[id_]]), id_)))
    found.add_edges_from(sorted({(graph.ops[t.producer].id, graph.ops[w].id) for t in graph.tensors for w in t.readers}))
    return found


def shuffled(graph: OpGraph, seed: int) -> OpGraph:
    """The same graph in another file order."""
    value = graph.to_json()
    draw = random.Random(seed)
    draw.shuffle(value["nodes"])
    draw.shuffle(value["edges"])
    return OpGraph.from_json(value)


BRIDGE = graph_of(dict.fromkeys("dcbaefg", 1), ("d", "a", 1), ("d", "b", 1), ("b", "e", 1), ("a", "f", 1), ("c", "e", 1), ("c", "g", 1))
"""Sources c and d; c is read by e and g, d by a and b, a by f, b by e, too."""


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("topo", "dcabgfe"),
        ("reversed_topo", "efgbacd"),
        ("lexico_topo", "cdabefg"),
        ("alpha", "abcdefg"),
        ("bfs", "cegdabf"),
        ("reversed_bfs", "fbadgec"),
        ("dfs_preorder", "cegdafb"),
        ("dfs_postorder", "egcfabd"),
    ],
)
def test_by_hand(order: str, expected: str) -> None:
    assert "".join(names(BRIDGE, order)) == expected


@given(graphs())
def test_as_networkx_defines_them(graph: OpGraph) -> None:
    known = as_networkx(graph)
    assert names(graph, "lexico_topo") == list(nx.lexicographical_topological_sort(known, key=str))
    assert names(graph, "dfs_preorder") == list(nx.dfs_preorder_nodes(known))
    assert names(graph, "dfs_postorder") == list(nx.dfs_postorder_nodes(known))
    sources = [v for v in known if not known.in_degree(v)]
    breadth = [v for source in sources for v in (source, *(w for _, w in nx.bfs_edges(known, source, sort_neighbors=sorted)))]
    assert names(graph, "bfs") == list(dict.fromkeys(breadth))


@given(graphs(), st.integers(0, 99))
def test_every_order_visits_every_op_once(graph: OpGraph, seed: int) -> None:
    for order in TRAVERSALS:
        assert sorted(traversal(graph, order, seed)) == list(range(len(graph)))
    for order in ("topo", "lexico_topo"):
        rank = {v: i for i, v in enumerate(traversal(graph, order))}
        assert all(rank[t.producer] < rank[w] for t in graph.tensors for w in t.readers)


@given(graphs(), st.integers(0, 99))
def test_orders_by_name_do_not_depend_on_the_file(graph: OpGraph, seed: int) -> None:
    other = shuffled(graph, seed)
    for order in set(TRAVERSALS) - BY_FILE:
        assert names(graph, order, seed) == names(other, order, seed)


def test_random_goes_by_the_seed() -> None:
    assert names(BRIDGE, "random", 1) == names(BRIDGE, "random", 1)
    assert len({tuple(names(BRIDGE, "random", seed)) for seed in range(20)}) > 10


def test_deep_graphs() -> None:
    """Five thousand ops in a row, more than Python's stack would hold."""
    n = 5000
    chain = graph_of({f"{v:04}": 1 for v in range(n)}, *((f"{v:04}", f"{v + 1:04}", 1) for v in range(n - 1)))
    for order in ("topo", "lexico_topo", "alpha", "bfs", "dfs_preorder"):
        assert traversal(chain, order) == tuple(range(n))
    for order in ("reversed_topo", "reversed_bfs", "dfs_postorder"):
        assert traversal(chain, order) == tuple(reversed(range(n)))


def test_an_unknown_order_lists_the_known_ones() -> None:
    with pytest.raises(OptionError, match="unknown traversal order 'best'; choose one of topo, reversed_topo, lexico_topo, alpha, bfs"):
        traversal(BRIDGE, "best")


# In placers


def test_the_methods_that_visit_ops_in_an_order() -> None:
    assert {name for name, method in METHODS.items() if method.ordered} == ORDERED


@pytest.mark.parametrize("method", sorted(set(METHODS) - ORDERED))
def test_other_methods_refuse_an_order(method: str) -> None:
    with pytest.raises(OptionError, match=rf"only for methods that visit ops in an order \(contiguous, .*\), and {method} is none"):
        place(method, BRIDGE, cluster_of(2), PlaceOptions(traversal_order="alpha"))


@pytest.mark.parametrize(
    ("order", "first"), [("topo", "dcab"), ("reversed_topo", "efgb"), ("alpha", "abcd"), ("bfs", "cegd"), ("dfs_postorder", "egcf")]
)
@pytest.mark.parametrize("method", ["m_topo", "contiguous"])
def test_chunks_follow_the_order(method: str, order: str, first: str) -> None:
    """Seven equal ops, by bytes (cap 3 + 1) four and three, by time in whichever way the two chunks are."""
    ops = [op.id for op in BRIDGE.ops]
    edges = [(BRIDGE.ops[t.producer].id, BRIDGE.ops[w].id, 0) for t in BRIDGE.tensors for w in t.readers]
    graph = graph_of(dict.fromkeys(ops, 1.0), *edges, persistent_bytes=dict.fromkeys(ops, 1))
    plan = place(method, graph, cluster_of(2), PlaceOptions(traversal_order=order)).plan
    halves = [{id_ for id_ in ops if plan.placement[graph.index[id_]] == d} for d in range(2)]
    assert halves[0] in (set(first), set(first[:3]))
    assert plan.options["traversal_order"] == order


def test_ops_are_dealt_in_the_order() -> None:
    plan = place("round_robin", BRIDGE, cluster_of(3), PlaceOptions(traversal_order="dfs_preorder")).plan
    assert [plan.placement[BRIDGE.index[v]] for v in "cegdafb"] == [0, 1, 2, 0, 1, 2, 0]


def test_room_is_given_out_in_the_order() -> None:
    """Two devices of 2 bytes: m_topo_nonuniform fills the first with the first two ops."""
    graph = graph_of(dict.fromkeys("cab", 1), persistent_bytes=dict.fromkeys("cab", 1))
    assert place("m_topo_nonuniform", graph, cluster_of(2, memory_bytes=2)).plan.placement == (0, 0, 1)
    alpha = PlaceOptions(traversal_order="alpha")
    assert place("m_topo_nonuniform", graph, cluster_of(2, memory_bytes=2), alpha).plan.placement == (1, 0, 0)


def test_lots_are_drawn_in_the_order() -> None:
    options = [PlaceOptions(seed=3, traversal_order=order) for order in (None, "topo", "alpha")]
    plans = [place("random", BRIDGE, cluster_of(4), given).plan.placement for given in options]
    assert plans[0] == plans[1] != plans[2]
    assert "traversal_order" not in place("random", BRIDGE, cluster_of(4)).plan.options
