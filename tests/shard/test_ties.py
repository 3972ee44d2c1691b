"""Nodes that are split alike: the search finds the least cost of all strategies that do, and says which it is."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.errors import ShardError
from baechi_ext.shard.graph import Axis, Edge, Node, ShardGraph, Tensor
from baechi_ext.shard.machine import Machine
from baechi_ext.shard.search import search
from baechi_ext.shard.tables import build_tables, node_bytes
from baechi_ext.shard.terms import Compute
from tests.shard.problems import cost_by_hand, graphs


@st.composite
def tied_graphs(draw: st.DrawFn) -> ShardGraph:
    """A random graph in which each node may be one of an earlier node's axes, terms of its own, and tied to it."""
    graph = draw(graphs(most_nodes=5))
    nodes, ties = list(graph.nodes), {}
    for v in range(1, len(nodes)):
        if draw(st.booleans()):
            first = draw(st.sampled_from([w for w in range(v) if not any(w in tie[1:] for tie in ties.values())]))
            model = nodes[first]
            terms = (*model.terms, Compute(draw(st.sampled_from((0.0, 1e4))), (0,)))
            nodes[v] = replace(model, name=nodes[v].name, terms=terms, inputs=model.outputs, outputs=model.inputs)
            ties.setdefault(first, [first]).append(v)
    return ShardGraph("tied", tuple(nodes), graph.edges, tuple(map(tuple, ties.values())))


@given(tied_graphs(), st.integers(1, 6), st.sampled_from([1e8, -1.0]))
def test_ties_keep_the_least_cost_of_strategies_that_split_alike(graph: ShardGraph, devices: int, operations: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baechi_ext.shard.search._WORTH_PRUNING", operations)
        found = search(graph, Machine(devices=devices))
    assert all(found.choice[v] == found.choice[tie[0]] for tie in graph.ties for v in tie)
    assert cost_by_hand(found.tables, found.choice) == pytest.approx(found.cost)
    first = {v: tie[0] for tie in graph.ties for v in tie}
    free = [v for v in range(len(graph.nodes)) if first.get(v, v) == v]
    best = float("inf")
    tables = build_tables(graph, Machine(devices=devices))
    for chosen in product(*(range(tables.sizes[v]) for v in free)):
        by_node = dict(zip(free, chosen, strict=True))
        best = min(best, cost_by_hand(tables, tuple(by_node[first.get(v, v)] for v in range(len(graph.nodes)))))
    assert found.cost == pytest.approx(best)


@given(tied_graphs(), st.integers(1, 4))
def test_ties_hold_within_a_memory_limit(graph: ShardGraph, devices: int) -> None:
    free = search(graph, Machine(devices=devices))
    found = search(graph, Machine(devices=devices, memory_bytes=free.held_bytes))
    assert found.cost == pytest.approx(free.cost)
    least = search(graph, Machine(devices=devices, memory_bytes=_least_held(graph, devices)))
    assert least.held_bytes <= _least_held(graph, devices)
    assert least.cost >= free.cost * (1 - 1e-9)
    assert all(least.choice[v] == least.choice[tie[0]] for tie in graph.ties for v in tie)


def _least_held(graph: ShardGraph, devices: int) -> float:
    """The bytes that the smallest strategy holds which splits tied nodes alike, and a little more."""
    tables = build_tables(graph, Machine(devices=devices))
    held = [node_bytes(node, space, tables.machine) for node, space in zip(graph.nodes, tables.spaces, strict=True)]
    members = {tie[0]: tie for tie in graph.ties}
    later = {v for tie in graph.ties for v in tie[1:]}
    return 1 + sum(float(sum(held[w] for w in members.get(v, (v,))).min()) for v in range(len(graph.nodes)) if v not in later)


def test_what_has_other_axes_cannot_be_tied() -> None:
    tensor = Tensor((4,), ((0,),))
    nodes = tuple(Node(name, "test", (Axis("a", size),), (tensor,), (tensor,)) for name, size in (("x", 4), ("y", 2)))
    with pytest.raises(ShardError, match=r"x, y have other axes; they can't be split alike"):
        ShardGraph("bad", nodes, (Edge(0, 1),), ((0, 1),))
