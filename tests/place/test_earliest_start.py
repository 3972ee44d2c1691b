"""The published rule of m-ETF and m-SCT on schedules worked out by hand; and that ours are never behind it."""

import pytest

from baechi_ext.ir import Cluster, Device, Link, Op, OpGraph
from baechi_ext.place.earliest_start import earliest_starts
from baechi_ext.place.registry import place
from baechi_ext.place.sct_lp import favourite_children
from baechi_ext.simulate import simulate
from tests.build import cluster_of, graph_of
from tests.place.training import branchy_blocks, towers


def devices(graph: OpGraph, cluster: Cluster, child: tuple[int | None, ...] | None = None) -> dict[str, int]:
    (schedule,) = earliest_starts(graph, cluster, child)
    assert sorted(schedule.started) == list(range(len(graph)))
    return dict(zip(graph.index, schedule.placement, strict=True))


def started(graph: OpGraph, cluster: Cluster, child: tuple[int | None, ...] | None = None) -> list[str]:
    return [graph.ops[v].id for v in earliest_starts(graph, cluster, child)[0].started]


def test_what_can_start_first_starts_first() -> None:
    """a and b at 0 in topological order; c reads from a and could start at 3 on device 0, at 5 on the other, which is busy until 4."""
    graph = graph_of({"a": 3, "b": 4, "c": 1}, ("a", "c", 2))
    assert devices(graph, cluster_of(2)) == {"a": 0, "b": 1, "c": 0}


def test_sends_and_receives_share_the_channel_of_a_device() -> None:
    """The tensor for p keeps device 1's channel until 5, so b's tensor is on 0 at 9, for q; y, which can start at 7, comes before it."""
    graph = graph_of(
        {"a": 1, "b": 1, "p": 1, "r": 5, "q": 1, "s": 7, "y": 1},
        *(("a", "p", 4), ("b", "q", 4), ("r", "q", 0), ("s", "y", 0)),
        colocation={"a": "0", "r": "0", "q": "0", "y": "0", "b": "1", "p": "1", "s": "2"},
    )
    assert devices(graph, cluster_of(3)) == {"a": 0, "r": 0, "q": 0, "y": 0, "b": 1, "p": 1, "s": 2}
    assert started(graph, cluster_of(3))[-2:] == ["y", "q"]


def test_a_group_goes_with_its_first_op() -> None:
    graph = graph_of({"a": 2, "b": 1, "c": 1}, ("b", "c", 0), colocation={"a": "g", "c": "g"})
    assert devices(graph, cluster_of(2)) == {"a": 0, "b": 1, "c": 0}


def test_a_device_stays_awake_for_the_favourite_child() -> None:
    """At 2 device 0 may run c or d, which the other one could only at 11. c is first in order, d is the favourite."""
    graph = graph_of({"a": 2, "b": 8, "c": 5, "d": 5}, ("a", "c", 9), ("a", "d", 9))
    assert started(graph, cluster_of(2)) == ["a", "b", "c", "d"]
    assert started(graph, cluster_of(2), (3, None, None, None)) == ["a", "b", "d", "c"]


def test_an_awake_device_runs_what_could_start_everywhere() -> None:
    """At 2 both devices are free, and x, in the last place, could start on either: it does, before the favourite d."""
    graph = graph_of({"a": 2, "b": 2, "d": 5, "x": 1}, ("a", "d", 9), ("b", "x", 0), ("a", "x", 0, "signal"))
    assert started(graph, cluster_of(2)) == ["a", "b", "d", "x"]
    assert started(graph, cluster_of(2), (2, None, None, None)) == ["a", "b", "x", "d"]


def test_what_fits_nowhere_goes_where_most_room_is() -> None:
    graph = graph_of({"a": 1, "b": 1, "c": 1}, persistent_bytes={"a": 5, "b": 5, "c": 5})
    assert devices(graph, Cluster((Device("0", 6), Device("1", 9)))) == {"a": 0, "b": 1, "c": 1}


def test_no_schedule_for_one_device_and_for_graphs_of_great_width() -> None:
    assert earliest_starts(graph_of({"a": 1}), cluster_of(1)) == []
    assert earliest_starts(OpGraph.from_edges([Op(f"o{i}", compute_us=1) for i in range(2000)], []), cluster_of(4)) == []


@pytest.mark.parametrize("link", [Link(1.754e-4, 134), Link(1e-2, 500), Link(1e-1, 1000)])
@pytest.mark.parametrize("graph", [branchy_blocks(6, 4, 1), branchy_blocks(8, 3, 2), towers(4, 8, 3)], ids=["branchy", "long", "towers"])
def test_the_methods_are_never_behind_the_rule_they_are_named_for(graph: OpGraph, link: Link) -> None:
    for k in (2, 4):
        cluster = Cluster.uniform(k, link=link)
        for method, child in (("m_etf", None), ("m_sct", favourite_children(graph, cluster, 0.1, 60).child)):
            (published,) = earliest_starts(graph, cluster, child)
            found = [simulate(graph, cluster, published.placement, order).makespan_us for order in (None, published.priority)]
            assert place(method, graph, cluster).predicted_step_us <= min(found)
