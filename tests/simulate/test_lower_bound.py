"""The lower bound: each of its reasons by hand, and never above a simulated plan."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.simulate import lower_bound_us, simulate
from tests.build import cluster_of, graph_of
from tests.simulate.strategies import cases


@pytest.mark.parametrize(
    ("graph", "cluster", "bound"),
    [
        (graph_of({}), cluster_of(2), 0),
        (graph_of({"a": 3, "b": 4, "c": 1}, ("a", "b", 9)), cluster_of(2), 7),  # the path a, b
        (graph_of({"a": 3, "b": 4, "c": 5}), cluster_of(2), 6),  # all over two devices
        (graph_of({"a": 3, "b": 4, "c": 5}), cluster_of(2, speeds=(1.0, 3.0)), 3),  # all over speed 4
        (graph_of({"a": 3, "b": 4, "c": 5}, ("a", "b", 9)), cluster_of(9, speeds=(2.0,) * 9), 3.5),
        (graph_of({"a": 3, "b": 4, "c": 5}, colocation={"a": "g", "c": "g"}), cluster_of(2), 8),  # the group a, c
    ],
)
def test_by_hand(graph: OpGraph, cluster: Cluster, bound: float) -> None:
    assert lower_bound_us(graph, cluster) == pytest.approx(bound, rel=1e-9)
    assert lower_bound_us(graph, cluster) <= bound


@given(cases(), st.integers(0, 2**32))
def test_no_plan_is_faster(case: tuple[OpGraph, Cluster], seed: int) -> None:
    graph, cluster = case
    draw = random.Random(seed)
    device_of = {name: draw.randrange(len(cluster)) for name in graph.groups}
    placement = [draw.randrange(len(cluster)) if op.colocation is None else device_of[op.colocation] for op in graph.ops]
    priority = [draw.random() for _ in graph.ops] if draw.random() < 0.5 else None
    assert lower_bound_us(graph, cluster) <= simulate(graph, cluster, placement, priority).makespan_us
