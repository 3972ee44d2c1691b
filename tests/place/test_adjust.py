"""Adjustment methods: where a group goes whose ops were placed apart."""

import pytest

from baechi_ext.errors import OptionError
from baechi_ext.ir import Cluster, Device
from baechi_ext.place.adjust import ADJUSTMENTS, adjust
from tests.build import cluster_of, graph_of

FIVE = graph_of(
    {"a": 1, "b": 2, "c": 2, "d": 4, "e": 1, "free": 9},
    persistent_bytes={"a": 9, "b": 5, "c": 5, "d": 1, "e": 0, "free": 50},
    colocation=dict.fromkeys("abcde", "g"),
)
APART = (0, 1, 1, 2, 3, 0)


@pytest.mark.parametrize(
    ("method", "device"),
    [("memory", 0), ("memory_sum", 1), ("time", 2), ("time_sum", 1), ("frequent", 1)],
)
def test_where_the_group_goes(method: str, device: int) -> None:
    """The largest op (9 bytes) is on 0, most bytes (5 + 5) are on 1; the longest op on 2; 2 + 2 us, the first such sum, on 1."""
    assert adjust(FIVE, cluster_of(4), APART, method) == (*(device,) * 5, 0)


def test_noop_changes_nothing() -> None:
    assert adjust(FIVE, cluster_of(4), APART, "noop") == APART


def test_random_draws_from_the_devices_of_its_ops() -> None:
    drawn = [adjust(FIVE, cluster_of(5), APART, "random", seed=seed)[0] for seed in range(40)]
    assert drawn == [adjust(FIVE, cluster_of(5), APART, "random", seed=seed)[0] for seed in range(40)]
    assert set(drawn) == {0, 1, 2, 3}


def test_a_full_device_is_passed_over() -> None:
    """The group's 20 bytes have no room beside the 50 on device 0; of the others device 1 is the next choice."""
    cluster = Cluster((Device("0", 60), Device("1", 20), Device("2", 19), Device("3", 100)))
    for method, device in (("memory", 1), ("time", 1), ("frequent", 1)):
        assert adjust(FIVE, cluster, APART, method, with_memory_limit=True) == (*(device,) * 5, 0)
    assert adjust(FIVE, cluster, APART, "memory") == (0,) * 6


def test_where_no_device_of_its_ops_has_room_it_goes_where_most_is() -> None:
    cluster = Cluster((Device("0", 60), Device("1", 10), Device("2", 10), Device("3", 10), Device("4", 30)))
    assert adjust(FIVE, cluster, APART, "memory", with_memory_limit=True) == (*(4,) * 5, 0)


def test_groups_see_what_the_ones_before_them_took() -> None:
    graph = graph_of(
        {"a1": 2, "a2": 1, "b1": 2, "b2": 1},
        persistent_bytes=dict.fromkeys(("a1", "a2", "b1", "b2"), 5),
        colocation={"a1": "a", "a2": "a", "b1": "b", "b2": "b"},
    )
    assert adjust(graph, cluster_of(2, memory_bytes=12), (0, 1, 0, 1), "time", with_memory_limit=True) == (0, 0, 1, 1)
    assert adjust(graph, cluster_of(2, memory_bytes=12), (0, 1, 0, 1), "time") == (0, 0, 0, 0)


def test_an_unknown_method_lists_the_known() -> None:
    with pytest.raises(OptionError, match=f"'best'; choose one of {', '.join(ADJUSTMENTS)}$"):
        adjust(FIVE, cluster_of(4), APART, "best")
