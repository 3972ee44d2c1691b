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
    """a is read by b and c, both by d, d by e: 4 of 20 bytes, transfers of 1 us + 1 us a byte, two devices of 100 bytes."""
    graph = graph_of(
        {"a": 10, "b": 20, "c": 30, "d": 10, "e": 30},
        *(("a", "b", 4), ("a", "c", 4), ("b", "d", 4), ("c", "d", 4), ("d", "e", 4)),
        persistent_bytes={"a": 20, "b": 20, "c": 20, "d": 20, "e": 20},
    )
    found = GraphFeatures.of(graph, cluster_of(2, us_per_byte=1, latency_us=1, memory_bytes=100))
    assert (found.ops, found.depth, found.width, found.depth_over_width) == (5, 4, 2, 2.0)
    assert (found.mean_degree, found.max_degree, found.diameter) == (2.0, 3, 3)
    assert found.parallelism == pytest.approx(100 / 80)
    assert found.transfer_over_op == pytest.approx(5 / 20)
    assert (found.grouped, found.devices) == (0.0, 2)
    assert found.filled == pytest.approx((100 + sum(op.output_bytes for op in graph.ops)) / 200)


def test_what_shares_a_device() -> None:
    graph = graph_of(dict.fromkeys("abcd", 1), colocation={"a": "x", "b": "x", "c": "alone"})
    assert GraphFeatures.of(graph, cluster_of(2)).grouped == 0.5


def test_nothing_and_almost_nothing() -> None:
    nothing = GraphFeatures.of(graph_of({}), cluster_of(1))
    assert (nothing.ops, nothing.depth, nothing.width, nothing.diameter, nothing.filled, nothing.parallelism) == (0, 0, 0, 0, 0.0, 0.0)
    idle = GraphFeatures.of(graph_of({"a": 0, "b": 0}, ("a", "b", 0)), cluster_of(2))
    assert (idle.depth, idle.diameter, idle.transfer_over_op) == (2, 1, 0.0)


def test_the_diameter_of_the_widest_component() -> None:
    """A pair, and a chain of six that begins in the middle of the file."""
    graph = graph_of(dict.fromkeys("xycabdef", 1), ("x", "y", 0), *((a, b, 0) for a, b in zip("abcde", "bcdef", strict=True)))
    assert GraphFeatures.of(graph, cluster_of(2)).diameter == 5


@given(graphs())
def test_as_networkx_has_them(graph: OpGraph) -> None:
    known, found = as_networkx(graph), GraphFeatures.of(graph, cluster_of(2))
    assert found.depth == nx.dag_longest_path_length(known, weight=None) + 1
    assert found.width == max(map(len, nx.topological_generations(known)))
    degrees = dict(known.to_undirected().degree()).values()
    assert (found.max_degree, found.mean_degree) == (max(degrees), pytest.approx(sum(degrees) / len(graph)))
    plain = known.to_undirected()
    true = max(nx.diameter(plain.subgraph(part)) for part in nx.connected_components(plain))
    assert true / 2 <= found.diameter <= true
    if nx.is_forest(plain):
        assert found.diameter == true
