"""The fusion placer type: Baechi's rule where it holds and where it does not."""

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.group.fusion import fusion
from baechi_ext.group.grouping import GroupOptions
from tests.group.training_graphs import PROPERTY, any_graphs, chain, names, small, training_graphs


def fused(edges: str, labels: dict[str, str], options: GroupOptions = GroupOptions()) -> list[list[str]]:  # noqa: B008 - frozen
    grouping = fusion(small(edges, labels), options)
    return names(grouping.fine, grouping.members)


def test_an_op_without_another_successor_is_fused():
    assert fused("u>v x>v", {"u": "g", "v": "g"}) == [["u", "v"], ["x"]]


def test_an_op_without_another_predecessor_is_fused():
    assert fused("u>v u>x", {"u": "g", "v": "g"}) == [["u", "v"], ["x"]]


def test_an_edge_with_a_second_way_around_it_stays():
    assert fused("u>v u>x x>v", {"u": "g", "v": "g"}) == [["u"], ["v"], ["x"]]


def test_an_edge_that_fails_the_rule_stays_even_if_no_cycle_would_close():
    assert fused("u>v u>x y>v", {"u": "g", "v": "g"}) == [["u"], ["v"], ["x"], ["y"]]


def test_groups_are_never_mixed_and_ops_without_one_stay_alone():
    assert fused("a>b b>c c>d", {"a": "g", "b": "h"}) == [["a"], ["b"], ["c"], ["d"]]


def test_degrees_are_those_of_the_graph_contracted_so_far():
    triangle = "u>v u>x x>v"
    assert fused(triangle, {"u": "g", "v": "g", "x": "g"}) == [["u", "x", "v"]]  # u>v passes only once x is folded in
    assert fused("u>v u>p u>q p>q q>v", {"u": "g", "v": "g", "p": "h", "q": "h"}) == [["p", "q"], ["u"], ["v"]]


def test_a_neighbour_that_loses_an_edge_is_looked_at_again():
    # b2 follows b1 at once; only then has a, which comes before both, a single successor
    edges = "a>b1 y>b1 a>b2 b1>b2 b2>z b2>q"
    assert fused(edges, dict.fromkeys(["a", "b1", "b2"], "g")) == [["a", "b1", "b2"], ["q"], ["y"], ["z"]]


def test_what_was_just_contracted_is_looked_at_again():
    # v joins its only predecessor u, which had two successors until then; x has a second predecessor
    assert fused("u>v u>x y>x", dict.fromkeys("uvx", "g")) == [["u", "v", "x"], ["y"]]


def test_a_training_graph_keeps_forward_and_backward_apart():
    graph = chain(2)
    expected = [["conv1"], ["conv1_bw", "update1"], ["conv2"], ["conv2_bw", "update2"], ["loss"]]
    assert names(graph, fusion(graph).members) == sorted([*expected, ["relu1"], ["relu1_bw"], ["relu2"], ["relu2_bw"]])


@PROPERTY
@given(st.one_of(training_graphs(), any_graphs()))
def test_no_edge_that_may_be_contracted_is_left(graph):
    coarse = fusion(graph).coarse
    for u, successors in enumerate(coarse.successors):
        for v in successors:
            same = coarse.ops[u].colocation is not None and coarse.ops[u].colocation == coarse.ops[v].colocation
            assert not same or (len(successors) > 1 and len(coarse.predecessors[v]) > 1)


@PROPERTY
@given(st.one_of(training_graphs(), any_graphs()))
def test_a_group_is_connected_by_its_own_edges(graph):
    for group in fusion(graph).members:
        reached, todo = {group[0]}, [group[0]]
        while todo:
            v = todo.pop()
            near = (set(graph.successors[v]) | set(graph.predecessors[v])) & set(group) - reached
            reached |= near
            todo += near
        assert reached == set(group)


# --fusion_check_disjoint_paths and --fusion_allow_cycle

DISJOINT, CYCLES = GroupOptions(check_disjoint_paths=True), GroupOptions(allow_cycle=True)


def test_an_edge_without_a_second_path_is_fused_where_paths_are_checked():
    edges, labels = "u>v u>x y>v", {"u": "g", "v": "g"}
    assert fused(edges, labels) == [["u"], ["v"], ["x"], ["y"]]
    assert fused(edges, labels, DISJOINT) == [["u", "v"], ["x"], ["y"]]
    assert fused("u>v u>x x>v", labels, DISJOINT) == [["u"], ["v"], ["x"]]


def test_what_was_fused_may_remove_a_second_path():
    # u>x fails the rule, has no second path, and takes the way around u>v with it
    assert fused("u>v u>x x>v y>x x>z", dict.fromkeys("uvx", "g"), DISJOINT) == [["u", "x", "v"], ["y"], ["z"]]


def test_cycles_may_be_closed_and_are_then_counted_one_way():
    graph = small("u>v:8:here u>x:3:there x>v:5", {"u": "g", "v": "g"})
    grouping = fusion(graph, CYCLES)
    assert names(graph, grouping.members) == [["u", "v"], ["x"]]
    coarse = grouping.coarse
    assert [[t.bytes for t in coarse.tensors if t.producer == v] for v in coarse.order] == [[3, 5], []]


@PROPERTY
@given(st.one_of(training_graphs(), any_graphs()))
def test_every_edge_left_inside_a_group_has_a_second_path(graph):
    coarse = fusion(graph, DISJOINT).coarse
    paths = nx.DiGraph((u, v) for u, successors in enumerate(coarse.successors) for v in successors)
    for u, successors in enumerate(coarse.successors):
        for v in successors:
            if coarse.ops[u].colocation is not None and coarse.ops[u].colocation == coarse.ops[v].colocation:
                paths.remove_edge(u, v)
                assert nx.has_path(paths, u, v)
                paths.add_edge(u, v)


@PROPERTY
@given(st.one_of(training_graphs(), any_graphs()))
def test_with_cycles_no_edge_inside_a_group_is_left(graph):
    grouping = fusion(graph, CYCLES)
    part = grouping.expand(range(len(grouping.coarse)))
    for v, successors in enumerate(graph.successors):
        for w in successors:
            same = graph.ops[v].colocation is not None and graph.ops[v].colocation == graph.ops[w].colocation
            assert not same or part[v] == part[w]
