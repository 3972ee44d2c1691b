"""A graph's columns beside sums over its ops and tensors, one by one."""

from hypothesis import given

from baechi_ext.ir import OpGraph
from tests.build import graph_of
from tests.simulate.strategies import graphs


@given(graphs())
def test_sums_over_columns_are_those_over_ops(graph: OpGraph) -> None:
    columns, tensors = graph.columns, graph.tensors
    for v, op in enumerate(graph.ops):
        sizes = sum(tensors[t].bytes for t in graph.outputs[v])
        made = 0 if op.resident else sizes
        read = sum(tensors[t].bytes for t in graph.inputs[v] if not graph.ops[tensors[t].producer].resident)
        working = op.temporary_bytes + max(0, op.output_bytes - sizes)
        assert columns.made_bytes()[v] == made
        assert columns.read_bytes()[v] == read
        assert columns.working_bytes()[v] == working
        assert columns.live_bytes()[v] == read + made + working
        assert columns.all_bytes()[v] == op.persistent_bytes + made + working


@given(graphs())
def test_lists_in_a_row_are_the_graphs_own(graph: OpGraph) -> None:
    for lists, plain in (
        (graph.columns.inputs, graph.inputs),
        (graph.columns.outputs, graph.outputs),
        (graph.columns.readers, [t.readers for t in graph.tensors]),
    ):
        assert [tuple(lists.items[a:b]) for a, b in zip(lists.begins, lists.begins[1:], strict=False)] == list(map(tuple, plain))
        assert lists.owners.tolist() == [i for i, items in enumerate(plain) for _ in items]


def test_whole_bytes_are_recognised() -> None:
    assert graph_of({"a": 0.5, "b": 1}, ("a", "b", 3)).columns.are_whole()
    assert not graph_of({"a": 1, "b": 1}, ("a", "b", 3.5)).columns.are_whole()
    assert not graph_of({"a": 1}, temporary_bytes={"a": 0.25}).columns.are_whole()


def test_tensors_are_ranked_by_name_among_those_of_their_op() -> None:
    graph = graph_of({"a": 1, "b": 1, "c": 1}, ("a", "b", 1, "y"), ("a", "c", 1, "x"), ("b", "c", 1, "z"))
    assert [(t.name, rank) for t, rank in zip(graph.tensors, graph.columns.name_rank, strict=True)] == [("y", 1), ("x", 0), ("z", 0)]
