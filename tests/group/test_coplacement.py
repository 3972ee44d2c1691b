"""Colocation labels and the coplace grouper, on graphs small enough to check by eye."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.errors import OptionError
from baechi_ext.group.colocation import Labels, coplace, tf
from tests.group.training_graphs import PROPERTY, any_graphs, names, small, training_graphs

GRAPHS = st.one_of(training_graphs(), any_graphs())


def labels(graph) -> dict[str, str | None]:
    return {op.id: op.colocation for op in graph.ops}


def test_tf_takes_the_groups_as_they_are():
    graph = small("a>b b>c", {"a": "x", "c": "x"})
    assert tf(graph) == graph


def test_joined_groups_take_the_shortest_then_first_string():
    graph = small("a>b b>c c>d", {"a": "long", "b": "zz", "c": "yy", "d": "other"})
    joined = Labels(graph)
    joined.join(0, 1)
    joined.join(2, 1)
    assert labels(joined.relabelled()) == {"a": "yy", "b": "yy", "c": "yy", "d": "other"}


def test_a_group_without_strings_is_named_by_an_op_unless_another_group_has_that_name():
    graph = small("a>b c>d d>e", {"c": "a", "d": "a"})
    joined = Labels(graph)
    joined.join(0, 1)
    assert labels(joined.relabelled()) == {"a": "a'", "b": "a'", "c": "a", "d": "a", "e": None}


def test_an_op_with_one_successor_joins_it_and_one_with_two_does_not():
    graph = small("s>x s>y x>t y>t t>u t>v")
    assert labels(coplace(graph, 1.0)) == {"s": None, "x": "t", "y": "t", "t": "t", "u": None, "v": None}


def test_two_tensors_to_one_op_are_one_successor():
    assert labels(coplace(small("a>b:1:x a>b:2:y a>b:3"), 1.0)) == {"a": "a", "b": "a"}


def test_what_is_pinned_to_different_devices_stays_apart():
    assert labels(coplace(small("a>b b>c c>d", pin={"a": 0, "b": 0, "d": 1}), 1.0)) == {"a": "a", "b": "a", "c": "a", "d": None}
    grouped = small("a>b x>b y>c y>d", {"a": "g", "x": "h", "y": "h"}, pin={"a": 0, "y": 1})
    assert labels(coplace(grouped, 1.0)) == {"a": "g", "b": "g", "x": "h", "y": "h", "c": None, "d": None}


def test_an_op_brings_its_whole_group_along():
    graph = small("w>conv conv>loss loss>conv_bw conv_bw>step", {"conv": "w", "conv_bw": "w"})
    assert labels(coplace(graph, 1.0)) == dict.fromkeys(["w", "conv", "loss", "conv_bw", "step"], "w")


def test_no_merge_takes_more_than_its_share_of_the_time():
    cost = dict.fromkeys("abcd", 1.0)
    assert labels(coplace(small("a>b b>c c>d", compute_us=cost), 0.5)) == {"a": "a", "b": "a", "c": "c", "d": "c"}
    assert labels(coplace(small("a>b b>c c>d", compute_us=cost), 0.49)) == dict.fromkeys("abcd")


def test_no_merge_takes_more_than_its_share_of_the_memory():
    graph = small("a>b b>c c>d", persistent_bytes=dict.fromkeys("abcd", 1))
    assert labels(coplace(graph, 0.5)) == {"a": "a", "b": "a", "c": "c", "d": "c"}


def test_ops_that_take_nothing_join_groups_of_any_size():
    graph = small("view>mm mm>out", compute_us={"mm": 10.0}, persistent_bytes={"mm": 10})
    assert labels(coplace(graph, 0.1)) == {"view": "mm", "mm": "mm", "out": "mm"}


def test_the_largest_tensors_are_joined_first():
    graph = small("a>b:1 b>c:9 c>d:1", compute_us=dict.fromkeys("abcd", 1.0))
    assert labels(coplace(graph, 0.5)) == {"a": None, "b": "b", "c": "b", "d": None}


@pytest.mark.parametrize("share", [0.0, -1.0, float("nan")])
def test_a_share_that_is_not_positive_is_refused(share):
    with pytest.raises(OptionError, match="max_share is .*; expected a positive share"):
        coplace(small("a>b"), share)


@PROPERTY
@given(GRAPHS)
def test_without_a_limit_every_only_successor_is_joined(graph):
    relabelled = coplace(graph, 1.0)
    for v, successors in enumerate(graph.successors):
        if len(successors) == 1:
            assert relabelled.ops[v].colocation == relabelled.ops[successors[0]].colocation is not None


@PROPERTY
@given(GRAPHS, st.floats(0.01, 1.0))
def test_groups_only_grow_and_merged_ones_keep_their_share(graph, share):
    relabelled = coplace(graph, share)
    before, after = names(graph, graph.groups.values()), names(relabelled, relabelled.groups.values())
    assert all(any(set(group) <= set(larger) for larger in after) for group in before)
    for field in ("compute_us", "persistent_bytes"):
        limit = share * sum(getattr(op, field) for op in graph.ops)
        for group in relabelled.groups.values():
            parts: Counter[str] = Counter()
            for v in group:
                parts[graph.ops[v].colocation or f"op {v}"] += getattr(graph.ops[v], field)
            loaded = [load for load in parts.values() if load]
            assert len(loaded) < 2 or sum(loaded) <= limit * (1 + 1e-9)


@PROPERTY
@given(GRAPHS, st.floats(0.01, 1.0))
def test_a_second_pass_changes_nothing(graph, share):
    once = coplace(graph, share)
    assert coplace(once, share) == once
