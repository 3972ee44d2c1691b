"""The oracle itself: against hand-worked timelines, and against the simulator, which was written apart from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.simulate import simulate
from tests import oracle
from tests.build import cluster_of, graph_of
from tests.simulate.strategies import clusters, graphs


def test_timeline_by_hand() -> None:
    """a 0-2; its tensor (3 bytes) travels 2-5; b 5-9."""
    graph = graph_of({"a": 2, "b": 4}, ("a", "b", 3))
    step = oracle.simulate(graph, cluster_of(2), (0, 1))
    assert (step.start_us, step.end_us) == ([0, 5], [2, 9])
    assert step.copies == {(0, 1): (2, 5)}
    assert oracle.peak_bytes(graph, cluster_of(2), (0, 1), step) == [3, 3]


def test_violations_name_each_rule() -> None:
    graph = graph_of({"a": 1, "b": 1}, colocation={"a": "g", "b": "g"}, persistent_bytes={"a": 5, "b": 6})
    cluster = cluster_of(2, memory_bytes=8)
    assert oracle.violations(graph, cluster, (0,)) == ["not one device per op"]
    assert oracle.violations(graph, cluster, (0, 2)) == ["a device that does not exist"]
    assert oracle.violations(graph, cluster, (0, 1)) == ["group g is split"]
    assert oracle.violations(graph, cluster, (1, 1)) == ["device:1 holds 11 of 8 bytes"]


def test_placements_keep_groups_whole() -> None:
    graph = graph_of({"a": 1, "b": 1, "c": 1}, colocation={"a": "g", "c": "g"})
    assert sorted(oracle.placements(graph, 2)) == [(0, 0, 0), (0, 1, 0), (1, 0, 1), (1, 1, 1)]


def test_orders_are_the_topological_ones() -> None:
    graph = graph_of({"a": 1, "b": 1, "c": 1}, ("a", "b", 1))
    assert sorted(oracle.orders(graph)) == [(0, 1, 2), (0, 2, 1), (1, 2, 0)]


def test_an_order_can_beat_every_plan_without() -> None:
    """Without priorities the longer path (x, 9) goes first and y's reader, far away, waits for it."""
    graph = graph_of({"x": 9, "y": 2, "z": 6}, ("y", "z", 0), colocation={"x": "g", "y": "g"})
    cluster = cluster_of(2, latency_us=4)
    assert oracle.optimum(graph, cluster, with_orders=True).makespan_us == 12
    assert oracle.optimum(graph, cluster).makespan_us == 17


@given(graph=graphs(max_ops=7), cluster=clusters(max_devices=3), data=st.data())
def test_oracle_and_simulator_agree(graph: OpGraph, cluster: Cluster, data: st.DataObject) -> None:
    n = len(graph)
    placement = data.draw(st.lists(st.integers(0, len(cluster) - 1), min_size=n, max_size=n))
    priority = data.draw(st.none() | st.lists(st.integers(0, 3), min_size=n, max_size=n))
    step = oracle.simulate(graph, cluster, placement, priority)
    timeline = simulate(graph, cluster, placement, priority)
    assert list(timeline.start_us) == pytest.approx(step.start_us)
    assert list(timeline.end_us) == pytest.approx(step.end_us)
    assert list(timeline.peak_memory_bytes) == pytest.approx(oracle.peak_bytes(graph, cluster, placement, step))
