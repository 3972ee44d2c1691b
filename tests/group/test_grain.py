"""The grain grouper, on graphs small enough to check by eye, and its fixed point worked out anew from any graph."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.errors import OptionError
from baechi_ext.group.grain import grain
from baechi_ext.group.registry import group
from baechi_ext.ir import Cluster, Link, OpGraph
from tests.group.training_graphs import PROPERTY, any_graphs, chain, small, training_graphs

GRAPHS = st.one_of(training_graphs(), any_graphs())
A_TENSOR = Link(latency_us=4.0, send_us=1.0, receive_us=2.0)
"""7 us, whatever its bytes."""
LINKS = st.builds(Link, *[st.integers(0, 3).map(float)] * 6)


def labels(graph: OpGraph) -> dict[str, str | None]:
    return {op.id: op.colocation for op in graph.ops}


def test_ops_join_where_parting_them_costs_what_the_quicker_one_takes() -> None:
    cost = {"a": 100.0, "b": 7.0, "c": 7.5, "d": 100.0}
    assert labels(grain(small("a>b c>d", compute_us=cost), 1.0, A_TENSOR)) == {"a": "a", "b": "a", "c": None, "d": None}


def test_bytes_count_on_the_link_and_on_both_devices() -> None:
    link = Link(us_per_byte=1.0, send_us_per_byte=2.0, receive_us_per_byte=4.0)
    assert labels(grain(small("a>b:10", compute_us={"a": 70.0, "b": 80.0}), 1.0, link)) == {"a": "a", "b": "a"}
    assert labels(grain(small("a>b:10", compute_us={"a": 70.1, "b": 80.0}), 1.0, link)) == {"a": None, "b": None}


def test_tensors_between_two_groups_add_up_and_each_is_sent_once_a_group() -> None:
    cost = dict.fromkeys("abc", 10.0)
    assert labels(grain(small("a>b:1:x a>b:1:y b>c", compute_us=cost), 1.0, A_TENSOR)) == {"a": "a", "b": "a", "c": None}
    once = small("a>b:1:x a>c:1:x", {"b": "g", "c": "g"}, compute_us={"a": 10.0, "b": 10.0, "c": 10.0})
    assert labels(grain(once, 1.0, A_TENSOR)) == {"a": None, "b": "g", "c": "g"}
    twice = small("a>b:1:x a>c:1:y", {"b": "g", "c": "g"}, compute_us={"a": 10.0, "b": 10.0, "c": 10.0})
    assert labels(grain(twice, 1.0, A_TENSOR)) == {"a": "g", "b": "g", "c": "g"}


def test_what_costs_most_beside_its_time_is_joined_first() -> None:
    """b could join either side, and a and c both do not fit with it."""
    graph = small("a>b:1 b>c:9", compute_us={"a": 50.0, "b": 5.0, "c": 50.0})
    assert labels(grain(graph, 0.55, Link(us_per_byte=1.0, latency_us=5.0))) == {"a": None, "b": "b", "c": "b"}


def test_groups_stay_below_their_share_but_for_what_is_small() -> None:
    cost = dict.fromkeys("abcd", 6.0)
    assert len(grain(small("a>b b>c c>d", compute_us=cost), 0.5, A_TENSOR).groups) == 2
    tiny = small("a>b b>c c>t", compute_us={"a": 6.0, "b": 6.0, "c": 12.0, "t": 0.1})
    assert labels(grain(tiny, 0.5, A_TENSOR)) == {"a": "a", "b": "a", "c": "c", "t": "c"}
    heavy = small("a>b", compute_us={"a": 1.0, "b": 1.0}, persistent_bytes={"a": 100, "b": 100})
    assert labels(grain(heavy, 0.5, A_TENSOR)) == {"a": None, "b": None}


def test_what_is_pinned_to_different_devices_stays_apart() -> None:
    cost = dict.fromkeys("abcd", 1.0)
    graph = small("a>b b>c c>d", compute_us=cost, pin={"a": 0, "d": 1})
    found = labels(grain(graph, 1.0, A_TENSOR))
    assert found["a"] != found["d"]
    assert {found["b"], found["c"]} <= {found["a"], found["d"]}


def test_links_that_cost_nothing_join_nothing() -> None:
    graph = chain(4)
    assert grain(graph, 1.0, Link()) == graph


def test_a_chain_of_layers_becomes_units_of_layers() -> None:
    """16 layers of 5 us each and 7 us a tensor: with two devices no unit takes more than an eighth of the time."""
    graph = chain(16)
    units = group(graph, grouper="grain", cluster=Cluster.uniform(2, link=A_TENSOR)).coarse.groups
    assert len(units) < 16
    total = graph.total_compute_us()
    assert all(sum(graph.ops[v].compute_us for v in members) <= total / 8 * 1.125 for members in units.values())
    assert sum(map(len, units.values())) > 0.9 * len(graph)


@PROPERTY
@given(GRAPHS, LINKS, st.sampled_from([1.0, 0.5, 1 / 8]))
def test_no_two_groups_are_left_that_should_be_one(graph: OpGraph, link: Link, max_share: float) -> None:
    found = grain(graph, max_share, link)
    part = [op.colocation or f"{op.id} alone" for op in found.ops]
    time: dict[str, float] = dict.fromkeys(part, 0.0)
    held: dict[str, float] = dict.fromkeys(part, 0.0)
    for op, own in zip(graph.ops, part, strict=True):
        time[own] += op.compute_us
        held[own] += op.persistent_bytes
    between: dict[frozenset[str], float] = {}
    for tensor in graph.tensors:
        for reader in {part[w] for w in tensor.readers} - {part[tensor.producer]}:
            pair = frozenset((part[tensor.producer], reader))
            cost_us = link.transfer_us(tensor.bytes) + link.sending_us(tensor.bytes) + link.receiving_us(tensor.bytes)
            between[pair] = between.get(pair, 0.0) + cost_us
    for pair, cost_us in between.items():
        a, b = pair
        if cost_us > 0 and cost_us >= min(time[a], time[b]):
            over = [
                max_share < 1 and load[a] and load[b] and load[a] + load[b] > max_share * sum(load.values()) * (1 - 1e-9)
                for load in (time, held)
            ]
            assert any(over), (a, b)


@PROPERTY
@given(GRAPHS, LINKS)
def test_groups_only_grow_and_every_placement_of_them_is_one_of_the_graph(graph: OpGraph, link: Link) -> None:
    found = grain(graph, 1 / 8, link)
    for members in graph.groups.values():
        assert len({found.ops[v].colocation for v in members}) == 1
    for a, b in combinations(range(len(graph)), 2):
        if graph.ops[a].colocation is not None and graph.ops[a].colocation == graph.ops[b].colocation:
            assert found.ops[a].colocation == found.ops[b].colocation


def test_a_share_has_to_be_positive() -> None:
    with pytest.raises(OptionError, match="max_share is 0"):
        grain(chain(2), 0)


def test_the_mean_link() -> None:
    cluster = Cluster.uniform(3, link=Link(0.5, 10.0, send_us=4.0))
    assert cluster.mean_link() == Link(0.5, 10.0, send_us=4.0)
    names = [d.name for d in cluster.devices]
    uneven = Cluster(cluster.devices, Link(), {(names[0], names[1]): Link(latency_us=6.0)})
    assert uneven.mean_link() == Link(latency_us=1.0)
    assert Cluster.uniform(1, link=Link(1.0, 1.0)).mean_link() == Link()
