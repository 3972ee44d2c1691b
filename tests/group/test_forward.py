"""Which forward op each op follows, and the graph with one op per forward op."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.errors import GraphError
from baechi_ext.group.forward import forward_nodes, forward_of, joined
from baechi_ext.ir.op_graph import Op, OpGraph
from tests.group.training_graphs import PROPERTY, any_graphs, chain, names, training_graphs


def graph_of(edges: str, *ops: Op) -> OpGraph:
    return OpGraph.from_edges(ops, [(*edge.split(">"), 1, "") for edge in edges.split()])


def follows(graph: OpGraph) -> dict[str, str]:
    return {op.id: graph.ops[f].id for op, f in zip(graph.ops, forward_of(graph), strict=True)}


def backward(id_: str, forward_op: str | None = None, colocation: str | None = None) -> Op:
    return Op(id_, phase="backward", forward_op=forward_op, colocation=colocation)


def update(id_: str, colocation: str | None = None) -> Op:
    return Op(id_, phase="update", colocation=colocation)


def test_an_op_follows_the_one_it_names_and_an_update_its_parameter():
    found = follows(chain(2))
    assert found["relu1_bw"] == found["relu1"] == "relu1"
    assert found["conv2_bw"] == found["update2"] == "conv2"


def test_an_op_without_a_name_follows_the_first_forward_op_of_its_group():
    tied = [Op(id_, colocation="w") for id_ in ("f2", "f1")]
    graph = graph_of("a>f1 f1>f2 f2>g f1>g", *tied, Op("a"), backward("g", None, "w"))
    assert follows(graph)["g"] == "f1"


def test_a_forward_op_leads_its_group_even_if_another_member_names_a_different_one():
    graph = graph_of("f1>g g>f2 f2>u", Op("f1"), Op("f2", colocation="w"), backward("g", "f1", "w"), update("u", "w"))
    assert follows(graph) == {"f1": "f1", "f2": "f2", "g": "f1", "u": "f2"}


def test_a_group_without_forward_op_follows_what_its_named_member_follows():
    graph = graph_of("f>g g>h h>u", Op("f"), backward("g", "f", "w"), backward("h"), update("u", "w"))
    assert follows(graph) == dict.fromkeys("fghu", "f")


def test_a_sum_of_gradients_follows_the_nearest_before_it_and_its_first_input():
    named = [Op("f1"), Op("f2"), backward("g1", "f1"), backward("g2", "f2")]
    assert follows(graph_of("f1>g1 f2>g2 g2>sum g1>sum", *named, backward("sum")))["sum"] == "f2"
    # g1 names its forward op itself, scaled only follows g2
    graph = graph_of("f1>g1 f2>g2 g2>scaled scaled>sum g1>sum", *named, backward("scaled"), backward("sum"))
    assert (follows(graph)["scaled"], follows(graph)["sum"]) == ("f2", "f1")


def test_a_gradient_is_nearer_than_an_activation():
    graph = graph_of("f1>f2 f2>g2 f1>mul g2>mul", Op("f1"), Op("f2"), backward("g2", "f2"), backward("mul"))
    assert follows(graph)["mul"] == "f2"


def test_an_op_with_nothing_before_it_follows_what_reads_it():
    others = [backward("ones"), backward("scaled"), update("rate"), update("u"), update("other")]
    graph = graph_of("f>g ones>g rate>scaled scaled>u g>u rate>other", Op("f"), backward("g", "f"), *others)
    assert follows(graph) == dict.fromkeys(graph.index, "f")


def test_an_op_connected_to_no_forward_op_follows_itself():
    graph = graph_of("count>write", Op("f"), update("count"), update("write"))
    assert follows(graph) == {"f": "f", "count": "count", "write": "write"}
    assert names(graph, forward_nodes(graph).members) == [["count"], ["f"], ["write"]]


@pytest.mark.parametrize(("name", "why"), [("gone", "is not in the graph"), ("b2", "has phase 'backward'"), ("b1", "has phase 'backward'")])
def test_a_forward_op_that_is_none_is_refused(name, why):
    graph = graph_of("f>b1 b1>b2", Op("f"), backward("b1", name), backward("b2"))
    with pytest.raises(GraphError, match=f"op 'b1' names '{name}' as its forward op, which {why}"):
        forward_nodes(graph)


def test_labels_join_the_groups_of_an_op_and_its_forward_op():
    graph = graph_of("f>g g>h h>u", Op("f"), backward("g", "f", "w"), backward("h"), update("u", "ww"))
    assert [op.colocation for op in joined(graph, forward_of(graph)).ops] == ["w", "w", "w", "w"]
    assert [op.colocation for op in graph.ops] == [None, "w", None, "ww"]


def test_one_op_per_forward_op_with_all_that_follows_it():
    graph = chain(2)
    grouping = forward_nodes(graph)
    convs = [[f"conv{i}", f"conv{i}_bw", f"update{i}"] for i in (1, 2)]
    assert names(graph, grouping.members) == [*convs, ["loss"], ["relu1", "relu1_bw"], ["relu2", "relu2_bw"]]
    by_id = {op.id: op for op in grouping.coarse.ops}
    assert [(by_id[i].compute_us, by_id[i].persistent_bytes) for i in ("conv1", "relu1", "loss")] == [(3, 100), (2, 0), (1, 0)]
    assert {op.phase for op in by_id.values()} == {"forward"}
    assert by_id["conv1"].colocation == "w1"
    edges = {(e["source"], e["target"], e["tensor"], e["bytes"]) for e in grouping.coarse.to_json()["edges"]}
    forward = ["conv1", "relu1", "conv2", "relu2", "loss"]
    tensors = [(a, b, f"{a}:out", 4) for a, b in zip(forward, forward[1:], strict=False)]
    gradients = [(a, b, f"{b}_bw:out", 4) for a, b in zip(forward[:-2], forward[1:-1], strict=True)]
    assert edges == {*tensors, *gradients, ("relu2", "loss", "loss:out", 4)}


def test_a_node_is_named_by_its_forward_op_even_if_another_op_comes_first():
    graph = graph_of("rate>u f>g g>u", update("rate"), Op("f"), backward("g", "f"), update("u"))
    grouping = forward_nodes(graph)
    assert [op.id for op in grouping.coarse.ops] == ["f"]
    assert names(graph, grouping.members) == [["rate", "f", "g", "u"]]


@PROPERTY
@given(st.one_of(training_graphs(), any_graphs()))
def test_one_node_per_forward_op_in_the_order_of_the_forward_ops(graph):
    grouping = forward_nodes(graph)
    forward = {op.id for op in graph.ops if op.phase == "forward"}
    assert forward <= set(grouping.coarse.index)
    for op, group in zip(grouping.coarse.ops, grouping.members, strict=True):
        assert [graph.ops[v].id for v in group if graph.ops[v].phase == "forward"] == ([op.id] if op.id in forward else [])
    rank = {graph.ops[v].id: i for i, v in enumerate(graph.order)}
    for tensor in grouping.coarse.tensors:
        for w in tensor.readers:
            assert rank[grouping.coarse.ops[tensor.producer].id] < rank[grouping.coarse.ops[w].id]


@PROPERTY
@given(training_graphs())
def test_training_graphs_leave_nothing_but_forward_ops(graph):
    assert {op.id for op in forward_nodes(graph).coarse.ops} == {op.id for op in graph.ops if op.phase == "forward"}
