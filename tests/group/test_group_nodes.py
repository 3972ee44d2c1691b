"""The colocation placer type: as few coarse ops per group as the graph allows."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.group.fusion import fusion
from baechi_ext.group.group_nodes import colocation
from baechi_ext.group.grouping import GroupOptions
from baechi_ext.ir.op_graph import Op, OpGraph
from tests.group.training_graphs import PROPERTY, any_graphs, chain, names, small, training_graphs

GRAPHS = st.one_of(training_graphs(), any_graphs())


def test_a_group_that_closes_no_cycle_becomes_one_op():
    graph = small("a>b b>c x>c", {"a": "g", "b": "g", "x": "h", "c": "h"})
    assert names(graph, colocation(graph).members) == [["a", "b"], ["x", "c"]]


def test_a_group_need_not_be_connected():
    graph = small("a>x b>x x>c x>d", {"a": "in", "b": "in", "c": "out", "d": "out"})
    assert names(graph, colocation(graph).members) == [["a", "b"], ["c", "d"], ["x"]]


def test_a_convolution_is_cut_between_forward_and_backward():
    graph = chain(2)
    grouping = colocation(graph)
    expected = [["conv1"], ["conv1_bw", "update1"], ["conv2"], ["conv2_bw", "update2"], ["loss"]]
    assert names(graph, grouping.members) == sorted([*expected, ["relu1"], ["relu1_bw"], ["relu2"], ["relu2_bw"]])
    by_id = {op.id: op for op in grouping.coarse.ops}
    assert [by_id[i].colocation for i in ("conv1", "conv1_bw", "relu1")] == ["w1", "w1", None]
    assert [by_id[i].phase for i in ("conv1", "conv1_bw")] == ["forward", "backward"]


def test_updates_that_wait_for_all_gradients_are_a_third_part():
    graph = small(
        "f1>f2 f2>b2 b2>b1 b2>norm b1>norm norm>u1 norm>u2 b1>u1 b2>u2",
        {"f1": "w1", "b1": "w1", "u1": "w1", "f2": "w2", "b2": "w2", "u2": "w2"},
    )
    assert names(graph, colocation(graph).members) == [["b1"], ["f1"], ["f2", "b2"], ["norm"], ["u1"], ["u2"]]


def test_a_tied_parameter_is_cut_where_the_others_need_it_and_no_further():
    edges = "embed>cell cell>logits logits>loss loss>logits_bw logits_bw>cell_bw cell_bw>embed_bw embed_bw>step logits_bw>step"
    tied = dict.fromkeys(["embed", "logits", "logits_bw", "embed_bw", "step"], "tied")
    graph = small(edges, {**tied, "cell": "w", "cell_bw": "w"})
    expected = [["cell"], ["cell_bw"], ["embed"], ["embed_bw", "step"], ["logits"], ["logits_bw"], ["loss"]]
    assert names(graph, colocation(graph).members) == expected


def test_a_group_on_no_cycle_stays_whole_though_its_first_op_could_run_early():
    # "aux" has an op that can run at once and one that waits for the end; only "w" has to be cut
    graph = small("seed>note f>loss loss>b b>log", {"seed": "aux", "log": "aux", "f": "w", "b": "w"})
    assert names(graph, colocation(graph).members) == [["b"], ["f"], ["loss"], ["note"], ["seed", "log"]]


def test_an_op_is_not_cut_off_from_the_only_one_that_needs_it():
    graph = small("p>q r>q q>s", {"p": "g", "q": "g", "r": "h", "s": "h"})
    assert names(graph, colocation(graph).members) == [["p", "q"], ["r"], ["s"]]


def test_a_group_that_had_a_turn_waits_like_any_other_for_the_next():
    # after f1 and f2, b1 can run at once and b2 only after h1: "h" comes first
    groups = {"f1": "g", "f2": "g", "b1": "g", "b2": "g", "h1": "h", "h2": "h"}
    graph = small("f1>x x>h1 h1>n n>b2 b2>k k>h2 f2>m m>b1", groups)
    backward = [replace(op, phase="backward") if op.id in ("b1", "b2") else op for op in graph.ops]
    found = names(graph, colocation(graph.replace_ops(backward)).members)
    assert [group for group in found if group[0] in groups] == [["b1", "b2"], ["f1", "f2"], ["h1"], ["h2"]]


def test_the_forward_part_is_taken_whole_before_a_group_that_still_waits_for_some_of_it():
    # both groups must be cut; starting with "w" (its forward op is ready) lets "v" run its two forward ops together
    ops = [Op(i, phase="forward", colocation=g) for i, g in (("v1", "v"), ("w1", "w"), ("x", None), ("v2", "v"), ("loss", None))]
    ops += [Op(i, phase="backward", colocation=g) for i, g in (("v_bw", "v"), ("w_bw", "w"))]
    edges = "v1>loss w1>x x>v2 v2>loss loss>v_bw loss>y y>w_bw v_bw>y"
    ops.append(Op("y", phase="backward"))
    graph = OpGraph.from_edges(ops, [(*edge.split(">"), 1, "") for edge in edges.split()])
    assert ["v1", "v2"] in names(graph, colocation(graph).members)


def fewest(graph: OpGraph) -> int:
    """The fewest runs of one group each that a topological order can have, by breadth-first search over sets of done ops."""
    group = [op.colocation or f"op {v}" for v, op in enumerate(graph.ops)]
    needs = [sum(1 << p for p in predecessors) for predecessors in graph.predecessors]
    done, runs = {0}, 0
    while (1 << len(graph)) - 1 not in done:
        after = set()
        for state in done:
            for g in set(group):
                grown = state
                for v in graph.order:
                    if group[v] == g and needs[v] & ~grown == 0:
                        grown |= 1 << v
                after.add(grown)
        done, runs = after, runs + 1
    return runs


@PROPERTY
@given(training_graphs(max_layers=4))
def test_small_training_graphs_get_the_fewest_coarse_ops_possible(graph):
    assert len(colocation(graph).coarse) == fewest(graph)


@PROPERTY
@given(GRAPHS)
def test_never_more_coarse_ops_than_fusion(graph):
    assert len(colocation(graph).coarse) <= len(fusion(graph).coarse)


@PROPERTY
@given(GRAPHS)
def test_a_group_is_cut_only_where_one_op_per_group_has_a_cycle_through_it(graph):
    node = [op.colocation or f"op {v}" for v, op in enumerate(graph.ops)]
    reach = {g: {node[w] for v, s in enumerate(graph.successors) if node[v] == g for w in s} - {g} for g in node}
    for _ in reach:
        reach = {g: near.union(*(reach[h] for h in near)) for g, near in reach.items()}
    coarse = colocation(graph).coarse
    for name, members in coarse.groups.items():
        assert len(members) == 1 or name in reach[name]


# --resolve_cycle and --consider_all_edges_in_grouping


def test_with_resolve_cycle_every_group_is_one_op():
    graph = chain(3)
    grouping = colocation(graph, GroupOptions(resolve_cycle=True))
    assert names(graph, grouping.members) == sorted(
        [*[[f"conv{i}", f"conv{i}_bw", f"update{i}"] for i in (1, 2, 3)], *[[f"relu{i}"] for i in (1, 2, 3)]]
        + [[f"relu{i}_bw"] for i in (1, 2, 3)]
        + [["loss"]]
    )
    assert len(colocation(graph).coarse) == len(grouping.coarse) + 3


def test_an_edge_that_closes_a_cycle_counts_the_other_way():
    """w holds f and b; what loss sends back to b is counted from w to the loss, beside what f sends there."""
    graph = small("f>loss:7 loss>b:5", {"f": "w", "b": "w"})
    coarse = colocation(graph, GroupOptions(resolve_cycle=True)).coarse
    assert [(coarse.ops[t.producer].id, t.bytes, [coarse.ops[r].id for r in t.readers]) for t in coarse.tensors] == [
        ("f", 7, ["loss"]),
        ("f", 5, ["loss"]),
    ]


@PROPERTY
@given(GRAPHS)
def test_with_resolve_cycle_there_are_as_many_ops_as_groups(graph):
    grouping = colocation(graph, GroupOptions(resolve_cycle=True))
    assert len(grouping.coarse) == len(graph.groups) + sum(op.colocation is None for op in graph.ops)


def test_edges_that_only_order_updates_keep_ops_apart_where_all_edges_are_considered():
    graph = small("f>x x>u:0 f>u", {"f": "w", "u": "w"})
    graph = graph.replace_ops([replace(op, phase="update" if op.id == "u" else "forward") for op in graph.ops])
    assert names(graph, colocation(graph).members) == [["f", "u"], ["x"]]
    assert names(graph, colocation(graph, GroupOptions(consider_all_edges=True)).members) == [["f"], ["u"], ["x"]]
