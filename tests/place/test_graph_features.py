"""Features of graphs: by hand, and against networkx."""

import networkx as nx
import pytest
from hypothesis import given

from baechi_ext.ir import OpGraph
from baechi_ext.place.order_choice import GraphFeatures
from tests.build import cluster_of, graph_of
from tests.simulate.strategies import graphs


def as_networkx(graph: OpGraph) -> nx.DiGraph:
    found = nx.DiGraph()
    found.add_nodes_from(range(len(graph)))
    found.add_edges_from((t.producer, w) for t in graph.tensors for w in t.readers)
    return found


def test_by_hand() -> None:
    """a is read by b and c, both by d, d by e: 4 of 20 bytes, transfers of 1 us + 1 us a byte."""
    graph = graph_of(
        {"a": 10, "b": 20, "c": 30, "d": 10, "e": 30}, *(("a", "b", 4), ("a", "c", 4), ("b", "d", 4), ("c", "d", 4), ("d", "e", 4))
    )
    found = GraphFeatures.of(graph, cluster_of(2, us_per_byte=1, latency_us=1))
    assert (found.ops, found.mean_degree, found.max_degree, found.grouped) == (5, 2.0, 3, 0.0)
    assert found.transfer_over_op == pytest.approx(5 / 20)


def test_what_shares_a_device() -> None:
    graph = graph_of(dict.fromkeys("abcd", 1), colocation={"a": "x", "b": "x", "c": "alone"})
    assert GraphFeatures.of(graph, cluster_of(2)).grouped == 0.5


def test_nothing_and_almost_nothing() -> None:
    nothing = GraphFeatures.of(graph_of({}), cluster_of(1))
    assert nothing == GraphFeatures(ops=0, mean_degree=0.0, max_degree=0, transfer_over_op=0.0, grouped=0.0)
    idle = GraphFeatures.of(graph_of({"a": 0, "b": 0}, ("a", "b", 0)), cluster_of(2))
    assert (idle.max_degree, idle.transfer_over_op) == (1, 0.0)


@given(graphs())
def test_as_networkx_has_them(graph: OpGraph) -> None:
    known, found = as_networkx(graph), GraphFeatures.of(graph, cluster_of(2))
    degrees = dict(known.to_undirected().degree()).values()
    assert (found.max_degree, found.mean_degree) == (max(degrees), pytest.approx(sum(degrees) / len(graph)))
