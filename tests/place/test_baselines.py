"""single and contiguous."""

import pytest

from baechi_ext.errors import InfeasibleError
from baechi_ext.ir import Cluster, Device
from baechi_ext.place.chunks import chunks, depth_first_order, units
from baechi_ext.place.registry import place
from tests.build import cluster_of, graph_of


def test_single_takes_the_fastest_device() -> None:
    graph = graph_of({"a": 6, "b": 6})
    result = place("single", graph, cluster_of(3, speeds=(1.0, 3.0, 2.0)))
    assert (result.plan.placement, result.predicted_step_us) == ((1, 1), 4)


def test_single_takes_the_fastest_device_that_holds_the_graph() -> None:
    graph = graph_of({"a": 6, "b": 6}, persistent_bytes={"a": 10, "b": 10})
    cluster = Cluster((Device("slow", 30, 1.0), Device("fast", 19, 3.0), Device("middle", 20, 2.0)))
    assert place("single", graph, cluster).plan.placement == (2, 2)


def test_single_says_what_is_needed() -> None:
    graph = graph_of({"a": 6, "b": 6}, persistent_bytes={"a": 10, "b": 10})
    with pytest.raises(InfeasibleError, match=r"'device:0' needs 20 bytes and has 15; .*a method that spreads") as e:
        place("single", graph, cluster_of(2, memory_bytes=15))
    assert e.value.status == "unknown"


def test_contiguous_chunks_take_equal_time() -> None:
    graph = graph_of({f"o{i}": 1 for i in range(6)}, *((f"o{i}", f"o{i + 1}", 0) for i in range(5)))
    assert place("contiguous", graph, cluster_of(3)).plan.placement == (0, 0, 1, 1, 2, 2)


def test_contiguous_chunks_take_time_in_proportion_to_speed() -> None:
    graph = graph_of({f"o{i}": 1 for i in range(6)}, *((f"o{i}", f"o{i + 1}", 0) for i in range(5)))
    assert place("contiguous", graph, cluster_of(2, speeds=(2.0, 1.0))).plan.placement == (0, 0, 0, 0, 1, 1)


def test_contiguous_keeps_groups_with_their_first_op() -> None:
    graph = graph_of({"a": 1, "b": 1, "a2": 1, "b2": 1}, ("a", "b", 0), colocation={"a": "A", "a2": "A", "b": "B", "b2": "B"})
    assert place("contiguous", graph, cluster_of(2)).plan.placement == (0, 1, 0, 1)


def test_contiguous_ends_a_chunk_where_a_device_is_full() -> None:
    graph = graph_of(
        {"a": 1, "b": 1, "c": 1, "d": 9},
        *(("a", "b", 0), ("b", "c", 0), ("c", "d", 0)),
        persistent_bytes=dict.fromkeys("abcd", 5),
    )
    assert place("contiguous", graph, cluster_of(2)).plan.placement == (0, 0, 0, 1)
    assert place("contiguous", graph, cluster_of(2, memory_bytes=10)).plan.placement == (0, 0, 1, 1)


def test_depth_first_order_follows_each_branch() -> None:
    graph = graph_of({"a1": 1, "b1": 1, "a2": 1, "b2": 1}, ("a1", "a2", 0), ("b1", "b2", 0))
    assert graph.order == (0, 1, 2, 3)
    assert depth_first_order(graph) == (0, 2, 1, 3)


def test_units_are_groups_and_single_ops() -> None:
    graph = graph_of({"late": 1, "a": 1, "b": 1}, ("b", "late", 0), colocation={"late": "g", "b": "g"})
    assert units(graph) == [(1,), (2, 0)]
    assert units(graph, (2, 1, 0)) == [(2, 0), (1,)]


def test_chunks_of_nothing_and_of_no_weight() -> None:
    assert chunks([], [1, 1], [], [1, 1]) == ()
    assert chunks([0, 0], [1, 1], [0, 0], [1, 1]) == (0, 0)
