"""heft: ranks, earliest finish, gaps, groups, links, memory, on schedules worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.ir import Cluster, Device, Link
from baechi_ext.place.earliest_finish import Slots, upward_ranks_us
from baechi_ext.place.registry import place
from tests.build import cluster_of, graph_of


def test_upward_ranks() -> None:
    """Speeds 1 and 2: an op of 4 takes 3 on average. d: 3; b: 3 + 5 + 3 = 11, c: 6 + 1 + 3 = 10; a: 3 + max(2 + 11, 9 + 10) = 22."""
    graph = graph_of(
        {"a": 4, "b": 4, "c": 8, "d": 4}, ("a", "b", 2, "x"), ("a", "c", 9, "y"), ("b", "d", 5), ("c", "d", 1)
    )
    assert upward_ranks_us(graph, cluster_of(2, speeds=(1.0, 2.0))) == [22, 11, 10, 3]


def test_each_op_goes_where_it_ends_first() -> None:
    """40 of work for speeds 4 and 1: the fast device ends the third op at 7.5, and either would end the fourth at 10."""
    graph = graph_of(dict.fromkeys("abcd", 10))
    result = place("heft", graph, cluster_of(2, speeds=(4.0, 1.0)))
    assert (result.plan.placement, result.predicted_step_us) == ((0, 0, 0, 0), 10)


def test_a_gap_is_used() -> None:
    """b, of higher rank, waits on x for the 8 that a's tensor takes from y; s runs there meanwhile."""
    graph = graph_of(
        {"a": 1, "p": 1, "b": 10, "s": 5}, ("a", "b", 8), ("p", "b", 0), colocation={"a": "y", "p": "x", "b": "x", "s": "x"}
    )
    result = place("heft", graph, cluster_of(2))
    start = result.timeline.start_us
    assert (start[3], start[2]) == (1, 9)


def test_directed_links_and_channels_count() -> None:
    """Sending from x to y is dear, the other way free: a could end as early on either, and goes to y."""
    graph = graph_of({"a": 1, "b": 10, "c": 10}, ("a", "b", 0), ("a", "c", 0))
    cluster = Cluster((Device("x"), Device("y")), Link(0, 0), {("x", "y"): Link(0, 1000)})
    assert place("heft", graph, cluster).predicted_step_us == 11
    assert place("heft", graph, Cluster(cluster.devices, Link(0, 1))).predicted_step_us == 12


def test_transfers_share_a_channel() -> None:
    """b stays with a, 1-10; c arrives elsewhere at 7 and ends at 16. d may do so, too, but in one channel it would end at 22."""
    graph = graph_of({"a": 1, "b": 9, "c": 9, "d": 9}, ("a", "b", 6, "x"), ("a", "c", 6, "y"), ("a", "d", 6, "z"))
    assert place("heft", graph, cluster_of(3, parallel_transfers=True)).predicted_step_us == 16
    result = place("heft", graph, cluster_of(3))
    assert (result.plan.placement, result.predicted_step_us) == ((0, 0, 1, 0), 19)


def test_groups_and_memory() -> None:
    graph = graph_of(
        {"a": 5, "b": 5, "c": 5},
        persistent_bytes={"a": 4, "b": 4, "c": 4},
        colocation={"a": "g", "b": "g"},
    )
    plan = place("heft", graph, Cluster((Device("0", 4), Device("1", 8)))).plan
    assert plan.placement == (1, 1, 0)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 6)), max_size=40))
def test_slots_against_a_calendar(requests: list[tuple[int, int]]) -> None:
    """Every request gets the first free run of whole units, as found by looking at each unit. Every other one is not taken."""
    slots, taken = Slots(), [False] * 400
    for i, (ready, duration) in enumerate(requests):
        at = slots.earliest(ready, duration)
        expected = next(t for t in range(ready, 400) if not any(taken[t : t + duration]) and (duration or t == ready or not taken[t - 1]))
        if duration:
            assert at == expected
        assert at >= ready
        assert not any(taken[int(at) : int(at) + duration])
        if i % 2 == 0:
            slots.take(at, duration)
            taken[int(at) : int(at) + duration] = [True] * duration
    assert all(start < end for start, end in zip(slots.starts, slots.ends, strict=True))
    assert all(end < start for end, start in zip(slots.ends, slots.starts[1:], strict=False))


@pytest.mark.parametrize("charge", ["send_us", "receive_us"])
def test_what_transfers_take_from_devices_counts(charge: str) -> None:
    """5 and 4 after 1: apart they end at 1 + 3 + 5 where the transfer takes 3 from a device; where it takes 6, together at 10."""
    graph = graph_of({"a": 1, "b": 5, "c": 4}, ("a", "b", 0), ("a", "c", 0))
    for us, step_us in ((0, 6), (3, 9), (6, 10)):
        assert place("heft", graph, Cluster.uniform(2, link=Link(0, 1 if us else 0, **{charge: us}))).predicted_step_us == step_us
