"""--only_important_ops: which ops count, and whom the others follow."""

from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.group.forward import NEGLIGIBLE_SHARE, fold_unimportant, important_ops
from baechi_ext.group.grouping import GroupOptions
from baechi_ext.group.registry import group
from tests.group.training_graphs import PROPERTY, any_graphs, names, small, training_graphs

TIMES = {"big": 900.0, "also": 90.0, "q1": 2.0, "q2": 3.0, "q3": 6.0}


def test_the_quickest_ops_do_not_count_up_to_one_percent() -> None:
    """1,001 in all: 2 + 3 are within 10.01, and 6 more are not."""
    graph = small("big>q1 q1>also q2>also q3>also", compute_us=TIMES)
    assert dict(zip((op.id for op in graph.ops), important_ops(graph), strict=True)) == {
        "big": True, "q1": False, "also": True, "q2": False, "q3": True,
    }  # fmt: skip


def test_groups_and_parameters_count() -> None:
    graph = small("big>q1 q1>also", {"q1": "g"}, compute_us=TIMES)
    assert important_ops(graph) == (True, True, True)
    graph = small("big>q1 q1>also", compute_us=TIMES, persistent_bytes={"q1": 1})
    assert important_ops(graph) == (True, True, True)


def test_whom_the_others_follow() -> None:
    """r reads from both, c last; s reads nothing and goes to its reader, and i is alone."""
    graph = small("a>c a>r c>r r>z s>c i>j", compute_us=dict.fromkeys("acz", 100.0))
    assert names(graph, fold_unimportant(graph).members) == [["a"], ["i", "j"], ["s", "c", "r"], ["z"]]


def test_a_chain_of_them_follows_what_it_began_with() -> None:
    graph = small("a>p p>q q>r r>z", compute_us={"a": 100.0, "z": 100.0})
    assert names(graph, fold_unimportant(graph).members) == [["a", "p", "q", "r"], ["z"]]


def test_they_take_the_device_of_the_op_they_follow() -> None:
    graph = small("a>v v>b a>b", {"a": "g"}, compute_us={"a": 100.0, "b": 100.0})
    grouping = group(graph, options=GroupOptions(only_important_ops=True))
    assert len(grouping.coarse) == 2
    assert len(group(graph).coarse) == 3
    assert [grouping.coarse.ops[g].colocation for g in grouping.expand(range(2))] == ["g", "g", None]


@PROPERTY
@given(st.one_of(training_graphs(), any_graphs()))
def test_every_important_op_stands_for_one_coarse_op(graph):
    grouping, counts = fold_unimportant(graph), important_ops(graph)
    for members in grouping.members:
        assert sum(counts[v] for v in members) <= 1
        assert len({graph.ops[v].colocation for v in members} - {None}) <= 1
    folded = [graph.ops[v].compute_us for v in range(len(graph)) if not counts[v]]
    assert sum(folded) <= NEGLIGIBLE_SHARE * graph.total_compute_us() * (1 + 1e-9)
