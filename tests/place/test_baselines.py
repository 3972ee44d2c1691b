"""single, random, round_robin and contiguous."""

from itertools import combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.errors import InfeasibleError
from baechi_ext.ir import Cluster, Device, Link
from baechi_ext.place.chunks import best_split, chunks, depth_first_order
from baechi_ext.place.common import PlaceOptions
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


def test_single_takes_the_device_with_the_cheap_links_to_what_is_pinned() -> None:
    """All three are alike but for the links: from where a is pinned 1 to device 1 takes 50, to 2 and back 1 each."""
    graph = graph_of({"a": 1, "b": 6, "c": 1}, ("a", "b", 1), ("b", "c", 1), pin={"a": 0, "c": 0}, persistent_bytes={"b": 9})
    names = [f"device:{d}" for d in range(3)]
    devices = (Device(names[0], 8), Device(names[1], 20), Device(names[2], 20))
    cluster = Cluster(devices, Link(50), {(names[0], names[2]): Link(1), (names[2], names[0]): Link(1)})
    result = place("single", graph, cluster)
    assert (result.plan.placement, result.predicted_step_us) == ((0, 2, 0), 10)


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
    assert graph.units() == [(1,), (2, 0)]
    assert graph.units((2, 1, 0)) == [(2, 0), (1,)]


def test_chunks_of_nothing_and_of_no_weight() -> None:
    assert chunks([], [1, 1], [], [1, 1]) == ()
    assert chunks([0, 0], [1, 1], [0, 0], [1, 1]) == (0, 0)
    assert best_split([], [1, 1], [], [1, 1]) == ()
    assert best_split([0, 0], [1, 1], [0, 0], [1, 1]) == (0, 0)


NUMBERS = st.integers(0, 9)


@given(weights=st.lists(NUMBERS, max_size=7), speeds=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=1, max_size=3), data=st.data())
def test_best_split_is_the_best_of_all_splits(weights: list[int], speeds: list[float], data: st.DataObject) -> None:
    """Against all ways to cut the sequence; the rooms bind all devices but the last."""
    k = len(speeds)
    sizes = data.draw(st.lists(NUMBERS, min_size=len(weights), max_size=len(weights)))
    rooms = data.draw(st.lists(st.sampled_from([9, 20, float("inf")]), min_size=k, max_size=k))

    def longest_us(devices: tuple[int, ...]) -> float:
        runs = [[i for i, d in enumerate(devices) if d == e] for e in range(k)]
        fits = all(sum(sizes[i] for i in run) <= room for run, room in zip(runs[:-1], rooms, strict=False))
        return max(sum(weights[i] for i in run) / speed for run, speed in zip(runs, speeds, strict=True)) if fits else float("inf")

    least = min(map(longest_us, combinations_with_replacement(range(k), len(weights))))
    found = best_split(weights, speeds, sizes, rooms)
    assert list(found) == sorted(found)
    assert longest_us(found) == pytest.approx(least)


def test_contiguous_gives_the_long_chunk_to_the_fast_device() -> None:
    """Five ops of 8: four at speed 4 and one at speed 1 end together."""
    graph = graph_of({f"o{i}": 8 for i in range(5)})
    cluster = Cluster((Device("slow", None, 1.0), Device("fast", None, 4.0)), Link(0, 1))
    result = place("contiguous", graph, cluster)
    assert (sorted(result.plan.placement), result.predicted_step_us) == ([0, 1, 1, 1, 1], 8)


def test_contiguous_takes_the_cheap_link() -> None:
    """Two chunks on three devices: x and y, the first two, are far apart."""
    far, near = Link(0, 1000), Link(0, 1)
    graph = graph_of({"a": 1, "b": 10, "c": 10}, ("a", "b", 0), ("a", "c", 0))
    cluster = Cluster(tuple(map(Device, "xyz")), near, {("x", "y"): far, ("y", "x"): far})
    assert place("contiguous", graph, cluster).predicted_step_us == 12


def test_round_robin_deals_in_turn() -> None:
    graph = graph_of({f"o{i}": 1 for i in range(6)}, colocation={"o0": "g", "o4": "g"})
    assert place("round_robin", graph, cluster_of(3)).plan.placement == (0, 1, 2, 0, 0, 1)
    assert place("round_robin", graph_of({f"o{i}": 1 for i in range(6)}), cluster_of(2, speeds=(2.0, 1.0))).plan.placement == (
        0, 0, 1, 0, 0, 1,
    )  # fmt: skip


def test_round_robin_passes_over_a_full_device() -> None:
    graph = graph_of({f"o{i}": 1 for i in range(4)}, persistent_bytes=dict.fromkeys(("o0", "o1", "o2", "o3"), 5))
    assert place("round_robin", graph, Cluster((Device("0", 5), Device("1", 20)))).plan.placement == (0, 1, 1, 1)


def test_random_follows_the_seed_and_the_speeds() -> None:
    graph = graph_of({f"o{i}": 1 for i in range(300)})
    drawn = [place("random", graph, cluster_of(2, speeds=(3.0, 1.0)), PlaceOptions(seed=seed)).plan.placement for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert 200 <= drawn[0].count(0) <= 250


def test_random_draws_among_devices_with_room() -> None:
    graph = graph_of({f"o{i}": 1 for i in range(8)}, persistent_bytes={f"o{i}": 5 for i in range(8)})
    for seed in range(5):
        placement = place("random", graph, Cluster((Device("0", 10), Device("1", 30))), PlaceOptions(seed=seed)).plan.placement
        assert placement.count(0) == 2
