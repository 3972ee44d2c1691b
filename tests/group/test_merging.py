"""Merging neighbours: the bound holds, no cycle closes, constraints and costs stay, and what can run in parallel still can."""

from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.errors import OptionError
from baechi_ext.group.merging import merge
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.simulate import lower_bound_us
from tests.build import cluster_of, graph_of
from tests.group.training_graphs import PROPERTY, any_graphs, chain, names, small, training_graphs

GRAPHS = st.one_of(training_graphs(), any_graphs())


def unconnected_parts(graph: OpGraph) -> int:
    found = nx.Graph()
    found.add_nodes_from(range(len(graph)))
    found.add_edges_from((v, w) for v, after in enumerate(graph.successors) for w in after)
    return nx.number_connected_components(found)


@PROPERTY
@given(GRAPHS, st.integers(1, 12))
def test_the_bound_holds_and_costs_are_kept(graph, max_ops):
    grouping = merge(graph, max_ops)
    coarse = grouping.coarse
    assert len(coarse) <= max(max_ops, unconnected_parts(graph))
    assert len(coarse) >= min(max_ops, len(graph))
    assert sorted(v for group in grouping.members for v in group) == list(range(len(graph)))
    assert sum(op.compute_us for op in coarse.ops) == graph.total_compute_us()
    assert sum(op.persistent_bytes for op in coarse.ops) == sum(op.persistent_bytes for op in graph.ops)


@PROPERTY
@given(GRAPHS, st.integers(1, 12))
def test_what_shares_a_device_still_does(graph, max_ops):
    """A placement that keeps the coarse graph's groups together keeps the fine graph's together."""
    grouping = merge(graph, max_ops)
    device = {op.colocation: i for i, op in enumerate(grouping.coarse.ops)}
    placed = grouping.expand([i if op.colocation is None else device[op.colocation] for i, op in enumerate(grouping.coarse.ops)])
    for members in graph.groups.values():
        assert len({placed[v] for v in members}) == 1
    assert all(len(members) > 1 for members in grouping.coarse.groups.values())


@PROPERTY
@given(GRAPHS)
def test_a_graph_that_is_small_enough_stays(graph):
    coarse = merge(graph, len(graph)).coarse
    assert [op.id for op in coarse.ops] == [graph.ops[v].id for v in graph.order]
    assert len(coarse.tensors) == len(graph.tensors)


def test_what_is_pinned_to_different_devices_stays_apart() -> None:
    """b goes to a or c, d to c; nothing joins a and c, whatever else is in between."""
    graph = graph_of(dict.fromkeys("abcd", 1.0), ("a", "b", 1), ("b", "c", 1), ("c", "d", 1), pin={"a": 0, "c": 1})
    assert sorted(op.pin for op in merge(graph, 1).coarse.ops) == [0, 1]


def test_what_a_round_pins_counts_in_that_round() -> None:
    """b and c share a device. a>b and c>d go in one round, long before the rest: b takes the pin of a, or c that of d, not both."""
    rest = "efghi"
    edges = [(u, v, 1) for u, v in ("ab", "cd", *map("".join, pairwise(rest)))]
    graph = graph_of(
        dict.fromkeys("abcd", 1.0) | dict.fromkeys(rest, 10.0), *edges, pin={"a": 0, "d": 1}, colocation={"b": "bc", "c": "bc"}
    )
    pins: dict[str, set[int | None]] = {}
    for op in merge(graph, 1).coarse.ops:
        pins.setdefault(op.colocation or op.id, set()).add(op.pin)
    assert sorted(pin for of in pins.values() for pin in of - {None}) == [0, 1]
    assert not any({0, 1} <= of for of in pins.values())


def test_the_cheapest_go_first() -> None:
    graph = small("a>b b>c c>d d>e", compute_us={"a": 100.0, "b": 3.0, "c": 100.0, "d": 2.0, "e": 100.0})
    assert names(graph, merge(graph, 4).members) == [["a"], ["b"], ["c", "d"], ["e"]]


def test_of_equal_ones_the_largest_tensor() -> None:
    graph = small("a>b:1 b>c:8", compute_us={"a": 100.0, "b": 3.0, "c": 100.0})
    assert names(graph, merge(graph, 2).members) == [["a"], ["b", "c"]]


def test_what_runs_beside_something_else_stays_apart() -> None:
    """Two branches: merging along them costs nothing, merging either with an end makes the other one wait."""
    graph = small("a>b1 b1>b2 b2>b3 a>c1 c1>c2 c2>c3 b3>z c3>z", compute_us=dict.fromkeys(("b1", "b2", "b3", "c1", "c2", "c3"), 10.0))
    coarse = merge(graph, 4, max_share=1.0).coarse
    two = cluster_of(2, us_per_byte=0.0)
    assert (lower_bound_us(coarse, two), lower_bound_us(graph, two)) == pytest.approx((30, 30))


def test_an_edge_beside_a_path_waits_for_the_path() -> None:
    """a -> z is cheapest and may not be contracted before the path over m is; then the whole is one op."""
    graph = small("a>z:99:big a>m m>z", compute_us={"m": 50.0})
    assert names(graph, merge(graph, 2).members) in ([["a", "m"], ["z"]], [["a"], ["m", "z"]])
    assert names(graph, merge(graph, 1).members) == [["a", "m", "z"]]


def test_no_group_grows_too_large_while_there_is_another() -> None:
    """a and b take half of the time; c to f an eighth each."""
    times = {"a": 200.0, "b": 200.0, **dict.fromkeys("cdef", 100.0)}
    graph = small("a>b:99 b>c c>d d>e e>f", compute_us=times)
    assert ["a"] in names(graph, merge(graph, 4, max_share=0.25).members)
    assert ["b"] in names(graph, merge(graph, 4, max_share=0.25).members)
    bytes_ = {"c": 600, "d": 600}
    graph = small("a>b b>c c>d d>e e>f", compute_us=dict.fromkeys("abcdef", 1.0), persistent_bytes=bytes_)
    merged = names(graph, merge(graph, 3, max_share=0.6).members)
    assert not any({"c", "d"} <= set(group) for group in merged)


def test_a_training_step_of_layers() -> None:
    """One op of a layer forward, one backward with its update; the loss stands between."""
    graph = chain(6)
    grouping = merge(graph, 12, max_share=0.1)
    forward = [[f"conv{i}", f"relu{i}"] for i in range(1, 6)]
    backward = [[f"conv{i}_bw", f"update{i}", f"relu{i - 1}_bw"] for i in range(6, 1, -1)]
    between = ["conv6", "relu6", "loss", "relu6_bw"]
    assert [[graph.ops[v].id for v in group] for group in grouping.members] == [*forward, between, *backward, ["conv1_bw", "update1"]]
    assert [op.colocation for op in grouping.coarse.ops] == [f"w{i}" for i in (1, 2, 3, 4, 5, 6, 6, 5, 4, 3, 2, 1)]


@pytest.mark.parametrize(
    ("max_ops", "max_share", "message"),
    [(0, 0.1, "max_ops is 0; expected at least 1"), (5, 0.0, "max_share is 0.0; expected a positive share")],
)
def test_wrong_bounds(max_ops: int, max_share: float, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        merge(chain(2), max_ops, max_share)
