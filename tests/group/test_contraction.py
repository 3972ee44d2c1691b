"""The coarse graph's costs, tensors and names, against sums taken from the fine graph by other means."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.errors import GraphError
from baechi_ext.group.grouping import Grouping, bundled, compose, contract, crossing_tensors, first_members, identity
from baechi_ext.ir.op_graph import Op, OpGraph
from tests.group.training_graphs import PROPERTY, any_graphs, small, training_graphs


@st.composite
def partitions(draw: st.DrawFn) -> tuple[OpGraph, list[int]]:
    """A graph, and a part for each op: runs of a topological order, so that contracting them closes no cycle."""
    graph = draw(st.one_of(training_graphs(), any_graphs()))
    starts = draw(st.sets(st.sampled_from(range(len(graph)))))
    part = [0] * len(graph)
    for i, v in enumerate(graph.order):
        part[v] = max([s for s in starts if s <= i], default=0)
    return graph, part


def contracted(graph: OpGraph, part: list[int]) -> Grouping:
    return contract(graph, first_members(graph, part))


@PROPERTY
@given(partitions())
def test_costs_are_those_of_the_members(case):
    graph, part = case
    grouping = contracted(graph, part)
    for op, group in zip(grouping.coarse.ops, grouping.members, strict=True):
        members = [graph.ops[v] for v in group]
        assert op.id == members[0].id
        assert op.compute_us == sum(m.compute_us for m in members)
        assert op.persistent_bytes == sum(m.persistent_bytes for m in members)
        assert op.phase == min((m.phase for m in members), key=["forward", "backward", "update"].index)
        assert op.expert == next((m.expert for m in members if m.expert is not None), None)
        assert op.temporary_bytes >= max(m.temporary_bytes for m in members)


@PROPERTY
@given(partitions())
def test_temporary_bytes_are_the_peak_of_what_stays_inside(case):
    graph, part = case
    grouping = contracted(graph, part)
    for op, group in zip(grouping.coarse.ops, grouping.members, strict=True):
        inside = [t for t in graph.tensors if t.producer in group and set(t.readers) <= set(group)]
        peaks = []
        for i, v in enumerate(group):
            live = [t.bytes for t in inside if group.index(t.producer) <= i <= max(group.index(w) for w in t.readers)]
            unread = graph.ops[v].output_bytes - sum(t.bytes for t in graph.tensors if t.producer == v)
            peaks.append(sum(live) + graph.ops[v].temporary_bytes + max(0, unread))
        leaving = sum(t.bytes for t in graph.tensors if t.producer in group and not set(t.readers) <= set(group))
        if len(group) == 1:
            assert (op.temporary_bytes, op.output_bytes) == (graph.ops[v].temporary_bytes, graph.ops[v].output_bytes)
        else:
            assert (op.temporary_bytes, op.output_bytes) == (max(peaks), leaving)


@PROPERTY
@given(partitions())
def test_each_tensor_that_leaves_a_group_keeps_its_identity(case):
    graph, part = case
    grouping = contracted(graph, part)
    group_of = grouping.expand(range(len(grouping.coarse)))
    expected = []
    for t in graph.tensors:
        readers = {group_of[w] for w in t.readers} - {group_of[t.producer]}
        if readers:
            expected.append((group_of[t.producer], t.bytes, readers))
    found = [(t.producer, t.bytes, set(t.readers)) for t in grouping.coarse.tensors]
    assert sorted(found, key=repr) == sorted(expected, key=repr)


def test_tensor_names_say_who_made_them():
    graph = small("a>b:1:grad a>c:2:a:0 a>c:3")
    assert [t.name for t in contracted(graph, [0, 1, 2]).coarse.tensors] == ["a:grad", "a:0", "a"]


def test_tensor_names_are_unique_where_ids_hold_colons():
    ops = [Op("a"), Op("a:b"), Op("reader")]
    graph = OpGraph.from_edges(ops, [("a", "reader", 1, "b:x"), ("a:b", "reader", 2, "x"), ("a", "a:b", 3, "")])
    coarse = contracted(graph, [0, 0, 1]).coarse
    assert sorted(t.name for t in coarse.tensors) == ["a:b:x", "a:b:x'"]
    assert coarse.ops[0].output_bytes == 3


def test_the_unread_part_of_an_output_counts_while_the_member_runs():
    graph = small("a>b:4", output_bytes={"a": 10, "b": 7}, temporary_bytes={"a": 1, "b": 1})
    assert contracted(graph, [0, 0]).coarse.ops[0].temporary_bytes == 12  # b: 4 read, 1, 7 unread; a: 4 made, 1, 6 unread


def test_what_is_resident_inside_takes_no_more_memory_and_what_leaves_is_resident_where_all_of_it_is():
    graph = small("w>x:4 x>y:2 w>z:4", persistent_bytes={"w": 4}, resident={"w": True})
    inside = contracted(graph, [0, 0, 0, 0]).coarse.ops[0]
    assert (inside.resident, inside.temporary_bytes) == (False, 2)
    assert [op.resident for op in contracted(graph, [0, 0, 2, 2]).coarse.ops] == [False, False]  # x leaves, too
    by_name = {v: graph.index[v] for v in "wxyz"}
    part = [0] * 4
    part[by_name["z"]] = 1
    assert [op.resident for op in contracted(graph, part).coarse.ops] == [True, False]


def test_a_coarse_op_is_of_the_only_part_of_its_members():
    graph = small("w>a w>b a>c b>d", part={"a": 0, "b": 1, "c": 0})
    parts = dict(zip("wabcd", ([graph.index[v] for v in "wabcd"]), strict=True))
    together = [0] * len(graph)
    for name, head in {"w": "w", "a": "a", "c": "a", "b": "b", "d": "b"}.items():
        together[parts[name]] = parts[head]
    assert {op.id: op.part for op in contracted(graph, together).coarse.ops} == {"w": None, "a": 0, "b": 1}
    assert [op.part for op in contracted(graph, [0] * len(graph)).coarse.ops] == [None]


def test_forward_op_names_the_coarse_op_that_holds_it():
    followers = [Op(id_, phase=phase, forward_op="conv") for id_, phase in (("conv_bw", "backward"), ("step", "update"))]
    ops = [Op("pad"), Op("conv"), *followers]
    graph = OpGraph.from_edges(ops, [("pad", "conv", 1, ""), ("conv", "conv_bw", 1, ""), ("conv_bw", "step", 1, "")])
    assert [op.forward_op for op in contracted(graph, [0, 0, 1, 2]).coarse.ops] == [None, "pad", "pad"]
    assert [op.forward_op for op in contracted(graph, [0, 0, 1, 1]).coarse.ops] == [None, "pad"]
    assert [op.forward_op for op in contracted(graph, [0, 0, 0, 0]).coarse.ops] == [None]


def test_a_partition_that_closes_a_cycle_is_refused():
    with pytest.raises(GraphError, match="cycle of 2 ops"):
        contracted(small("a>b b>c"), [0, 1, 0])


def test_crossing_tensors_counts_a_tensor_once_per_reading_group():
    graph = small("a>b:5 a>c:5 a>d:5 b>d:2")
    assert crossing_tensors(graph, [0, 1, 1, 3]) == [(0, 1, 5, "a"), (0, 3, 5, "a"), (1, 3, 2, "b")]


def test_compose_leads_from_the_first_fine_to_the_last_coarse_graph():
    graph = small("a>b b>c c>d")
    pairs = contracted(graph, [0, 0, 2, 2])
    both = compose(pairs, contracted(pairs.coarse, [0, 0]))
    assert both.fine is graph
    assert both.members == ((0, 1, 2, 3),)
    assert compose(identity(graph), pairs) == pairs


def test_tensors_of_the_same_readers_are_one() -> None:
    graph = small("a>b:2:x a>c:2:x a>c:3:y a>b:3:y a>b:5:z b>c:7:w")
    edges = [(graph.ops[t.producer].id, t.name, t.bytes, [graph.ops[w].id for w in t.readers]) for t in bundled(graph).tensors]
    assert edges == [("a", "0", 5, ["b", "c"]), ("a", "1", 5, ["b"]), ("b", "", 7, ["c"])]


@PROPERTY
@given(st.one_of(training_graphs(), any_graphs()))
def test_bundles_carry_all_bytes(graph):
    """To each reader, and from each op: no more and no less than before."""
    found = bundled(graph)

    def carried(g: OpGraph) -> tuple[list[float], list[float]]:
        size = [t.bytes for t in g.tensors]
        return [sum(size[t] for t in i) for i in g.inputs], [sum(size[t] for t in o) for o in g.outputs]

    assert carried(found) == carried(graph)
    assert found.ops == graph.ops
    for outputs in found.outputs:
        assert len({found.tensors[t].readers for t in outputs}) == len(outputs)
