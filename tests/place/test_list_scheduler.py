"""The list scheduler's rules, each on the smallest graph that shows it."""

import random

import pytest
from hypothesis import given
from numba import typeof

from baechi_ext.ir import Cluster, Device, Link, OpGraph
from baechi_ext.place import list_scheduler
from baechi_ext.place.list_scheduler import Schedule, arrays, runner, schedules, turned_arrays
from tests import oracle
from tests.build import cluster_of, graph_of
from tests.place.instances import random_instance
from tests.place.list_plain import plain_runner
from tests.place.training import branchy_blocks
from tests.simulate.strategies import clusters, graphs


def list_schedule(graph: OpGraph, cluster: Cluster, reluctance: float = 0.0, child: tuple[int | None, ...] | None = None) -> Schedule:
    return runner(graph, cluster, child)(reluctance, False, None)


def test_started_ranks_are_the_priority() -> None:
    graph = graph_of({"last": 1, "first": 1}, ("first", "last", 0))
    schedule = list_schedule(graph, cluster_of(1))
    assert schedule.started == (1, 0)
    assert schedule.priority == (1.0, 0.0)


def test_longest_path_starts_first() -> None:
    graph = graph_of({"short": 5, "long": 4, "after": 3}, ("long", "after", 0))
    assert list_schedule(graph, cluster_of(1)).started == (1, 0, 2)


def test_first_of_a_group_takes_all_members() -> None:
    graph = graph_of({"a": 5, "b": 4, "a2": 1, "b2": 1}, colocation={"a": "A", "a2": "A", "b": "B", "b2": "B"})
    a, b, a2, b2 = list_schedule(graph, cluster_of(2)).placement
    assert (a, b) == (a2, b2)
    assert a != b


def test_persistent_bytes_of_a_whole_group_are_reserved_at_once() -> None:
    """Once a is on device 0, its mate's 9 bytes leave no room for c there, though the mate has not run."""
    graph = graph_of(
        {"a": 9, "b": 8, "c": 1, "mate": 1},
        ("b", "mate", 0),
        persistent_bytes={"a": 1, "b": 1, "c": 2, "mate": 9},
        colocation={"a": "g", "mate": "g"},
    )
    assert list_schedule(graph, cluster_of(2, memory_bytes=11)).placement == (0, 1, 1, 0)


def test_received_copies_need_room() -> None:
    """The 6 bytes that b would receive on device 1 do not fit there beside its 5, so it waits for device 0."""
    graph = graph_of({"a": 2, "c": 10, "b": 2}, ("a", "b", 6), ("a", "c", 6), persistent_bytes={"b": 5})
    roomy, tight = (Cluster((Device("0", 20), Device("1", limit)), Link(0.1)) for limit in (20, 10))
    assert list_schedule(graph, roomy).placement == (0, 0, 1)
    assert list_schedule(graph, tight).placement == (0, 0, 0)


def test_op_that_fits_nowhere_is_placed_where_it_exceeds_least() -> None:
    graph = graph_of({"a": 1, "b": 1}, persistent_bytes={"a": 50, "b": 1})
    cluster = Cluster((Device("small", 10), Device("large", 40)))
    assert list_schedule(graph, cluster).placement[0] == 1


def test_reluctance_keeps_an_op_by_its_input() -> None:
    """Both readers of a are ready at 1; device 1 can have one at 4. The reluctant device 1 does not want it before 1 + 3 x 6."""
    graph = graph_of({"a": 1, "b": 5, "c": 5}, ("a", "b", 3), ("a", "c", 3))
    assert sorted(list_schedule(graph, cluster_of(2)).placement) == [0, 0, 1]
    assert list_schedule(graph, cluster_of(2), reluctance=5).placement == (0, 0, 0)


def test_channel_contention_delays_the_second_copy() -> None:
    """Over one outgoing channel the second transfer ends at 9, when device 0 has been free since 6; without contention at 5."""
    graph = graph_of({"a": 1, "b": 5, "c": 5, "d": 5}, ("a", "b", 4), ("a", "c", 4), ("a", "d", 4))
    placements = [
        list_schedule(graph, cluster_of(3, parallel_transfers=parallel)).placement for parallel in (False, True)
    ]
    assert [len(set(placement)) for placement in placements] == [2, 3]


def test_slow_device_leaves_work_to_a_fast_one() -> None:
    graph = graph_of({"a": 10, "b": 10}, ("a", "b", 0))
    assert list_schedule(graph, cluster_of(2, speeds=(0.1, 1.0))).placement == (1, 1)


def test_slow_device_helps_where_it_ends_earlier() -> None:
    graph = graph_of({f"o{i}": 10 for i in range(6)})
    placement = list_schedule(graph, cluster_of(2, speeds=(1.0, 0.5))).placement
    assert (placement.count(0), placement.count(1)) == (4, 2)


AWAKE = graph_of({"a": 1, "b": 1, "f": 10, "u": 10}, ("a", "f", 20), ("b", "f", 2), ("a", "u", 20))
"""At 1, device 0 has run a and device 1 has run b; b's tensor is at device 0 at 3, a's at device 1 at 21."""


def test_awake_device_waits_for_its_favourite_child() -> None:
    assert list_schedule(AWAKE, cluster_of(2)).started == (0, 1, 3, 2)
    assert list_schedule(AWAKE, cluster_of(2), child=(2, None, None, None)).started == (0, 1, 2, 3)


def test_awake_device_runs_urgent_ops_meanwhile() -> None:
    """An op without inputs could start anywhere: waiting saves it nothing."""
    graph = graph_of({"a": 2, "b": 2, "f": 10, "v": 1}, ("a", "f", 20), ("b", "f", 2))
    assert list_schedule(graph, cluster_of(2), child=(2, None, None, None)).started == (0, 1, 3, 2)


def test_schedules_from_both_ends_and_alone() -> None:
    graph = graph_of({"a": 1, "b": 2, "c": 3}, ("a", "b", 0), ("a", "c", 0))
    found = schedules(graph, cluster_of(2, speeds=(1.0, 2.0)))
    assert len(found) == 7
    assert found[-1].placement == (1, 1, 1)
    assert [s.placement for s in schedules(graph, cluster_of(1))] == [(0, 0, 0)]


@given(graph=graphs(), cluster=clusters())
def test_schedules_are_complete_and_topological(graph: OpGraph, cluster: Cluster) -> None:
    topological = set(oracle.orders(graph)) if len(graph) <= 5 else None
    for schedule in schedules(graph, cluster):
        assert sorted(schedule.started) == list(range(len(graph)))
        assert oracle.violations(graph, cluster, schedule.placement, schedule.priority) == []
        rank = schedule.priority
        assert all(rank[t.producer] < rank[w] for t in graph.tensors for w in t.readers)
        assert topological is None or rank in topological


def test_a_schedule_that_exceeds_limits_is_tried_again_with_lower_ones() -> None:
    graph = branchy_blocks(3, 3, 0)
    whole = sum(op.persistent_bytes + op.output_bytes for op in graph.ops)
    less = whole // 3
    high, low = cluster_of(2, memory_bytes=whole), cluster_of(2, memory_bytes=whole - less)
    *first, alone = schedules(graph, high)
    *lower, _ = schedules(graph, low)
    assert lower != first
    again = schedules(graph, high, None, lambda schedule: (less, less) if schedule in first else (0, 0))
    assert again == [s for both in zip(first, lower, strict=True) for s in both] + [alone]
    assert schedules(graph, high, None, lambda schedule: (0, 0)) == [*first, alone]


def some_children(graph: OpGraph, seed: int) -> list[int | None]:
    """A matching of some ops and readers."""
    rng, taken = random.Random(seed), set()
    child: list[int | None] = [None] * len(graph)
    for v, successors in enumerate(graph.successors):
        free = [w for w in successors if w not in taken]
        if free and rng.random() < 0.7:
            child[v] = rng.choice(free)
            taken.add(child[v])
    return child


def require_same(graph: OpGraph, cluster: Cluster, child: list[int | None] | None) -> None:
    plain, compiled = plain_runner(graph, cluster, child), runner(graph, cluster, child)
    lowered = [None, [len(graph) + d for d in range(len(cluster))]]
    for reluctance in (0.0, 1.0, list_scheduler.STAY):
        for turn in (False, True):
            for less in lowered:
                assert plain(reluctance, turn, less) == compiled(reluctance, turn, less)


def test_compiled_code_does_the_same_on_small_graphs() -> None:
    for seed in range(150):
        instance = random_instance(seed)
        require_same(instance.graph, instance.cluster, some_children(instance.graph, seed) if seed % 2 else None)


@pytest.mark.parametrize("share", [None, 0.27, 0.5])
@pytest.mark.parametrize("link", [Link(1e-3, 30), Link(1e-3, 30, send_us=2, receive_us=3)])
def test_compiled_code_does_the_same_on_training_steps(link: Link, share: float | None) -> None:
    """With room to spare, with little and, at 0.27 of all bytes for each of four, with too little; speeds equal and unequal."""
    for seed in range(2):
        graph = branchy_blocks(6, 4, seed, parameter_bytes=1_000_000)
        limit = None if share is None else share * sum(op.persistent_bytes + op.output_bytes for op in graph.ops)
        devices = tuple(Device(f"d{i}", limit, speed) for i, speed in enumerate((1.0, 1.0 + seed, 1.0, 1.0 - seed / 2)))
        require_same(graph, Cluster(devices, link, parallel_transfers=bool(seed)), some_children(graph, seed) if seed else None)


def test_both_directions_are_the_same_compiled_code() -> None:
    graph, cluster = branchy_blocks(3, 3, 0), cluster_of(2)
    there = arrays(graph, cluster, None)
    back = turned_arrays(graph, *there)
    assert [typeof(x) for both in there for x in both] == [typeof(x) for both in back for x in both]


def test_runs_that_would_look_at_too_much_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the limit, what is left are whole schedules as they would be without it; the one on the fastest device always is."""
    graph, cluster = branchy_blocks(3, 3, 0), cluster_of(2)
    expected = schedules(graph, cluster)
    monkeypatch.setattr(list_scheduler, "_LOOKS_EACH", 0)
    found = []
    for limit in range(0, 2000, 100):
        monkeypatch.setattr(list_scheduler, "_MOST_LOOKS", limit)
        found.append(schedules(graph, cluster))
        assert all(schedule in expected for schedule in found[-1])
    assert found[0] == expected[-1:]
    assert found[-1] == expected


def test_the_time_limit_leaves_out_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first begins in any case, and ends early where it would look at more than is usual."""
    graph, cluster = branchy_blocks(3, 3, 0), cluster_of(2)
    every, left_seconds = schedules(graph, cluster), iter([2.0, 1.0, 1.0, 0.0])
    assert schedules(graph, cluster, left_seconds=lambda: 0.0) == [every[0], every[-1]]
    assert schedules(graph, cluster, left_seconds=lambda: next(left_seconds)) == [*every[:2], every[-1]]
    monkeypatch.setattr(list_scheduler, "_LOOKS_EACH", 0)
    assert schedules(graph, cluster, left_seconds=lambda: 1e-9) == every[-1:]
    assert schedules(graph, cluster, left_seconds=lambda: 9.0) == every


def test_after_a_schedule_that_takes_long_only_the_largest_reluctance_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, cluster = branchy_blocks(2, 4, 0), cluster_of(2)
    assert len(schedules(graph, cluster)) == 2 * len(list_scheduler.RELUCTANCES) + 1
    monkeypatch.setattr(list_scheduler, "_FEWEST_LONG_LOOKS", 0)
    monkeypatch.setattr(list_scheduler, "_LOOKS_EACH", 0)
    first, last, turned, _ = schedules(graph, cluster)
    run = runner(graph, cluster, None)
    assert (first, last, turned) == (run(0.0, False, None), run(4.0, False, None), run(4.0, True, None))
