"""OpGraph: what its file may hold, what is refused, and what the fingerprint means."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.errors import GraphError
from baechi_ext.ir import Op, OpGraph
from tests.build import graph_of


def a_file() -> dict[str, Any]:
    return {
        "nodes": [{"id": "a", "compute_us": 1.5}, {"id": 7, "compute_us": 2}, {"id": "c", "compute_us": 0}],
        "edges": [
            {"source": "a", "target": 7, "bytes": 4, "tensor": "a:0"},
            {"source": "a", "target": "c", "bytes": 4, "tensor": "a:0"},
            {"source": 7, "target": "c", "bytes": 8},
        ],
    }


def change(path: tuple[Any, ...], new: Any) -> dict[str, Any]:
    """`a_file()` with the entry at `path` set to `new`, or dropped where `new` is `...`."""
    value = a_file()
    at: Any = value
    for key in path[:-1]:
        at = at[key]
    if new is ...:
        del at[path[-1]]
    elif isinstance(at, list) and path[-1] == len(at):
        at.append(new)
    else:
        at[path[-1]] = new
    return value


REFUSED = [
    (change(("directed",), False), r'"directed": false'),
    (change(("graph",), [1]), r'"graph" is \[1\]; expected an object'),
    (change(("nodes",), ...), r'no list "nodes"'),
    (change(("edges",), ...), r'no list "edges"'),
    (change(("edges",), {}), r'no list "edges"'),
    (change(("nodes", 0), "a"), r"node 0 is 'a'; expected an object"),
    (change(("nodes", 0, "id"), ...), r'node 0 has no "id"'),
    (change(("nodes", 0, "id"), 1.5), r"the id of node 0 is 1.5; expected a string or an integer"),
    (change(("nodes", 0, "id"), True), r"the id of node 0 is True"),
    (change(("nodes", 0, "id"), "7"), r"op id '7' appears twice, at positions 0 and 1"),
    (change(("nodes", 0, "compute_us"), ...), r"op 'a' has no \"compute_us\""),
    (change(("nodes", 0, "compute_us"), None), r"op 'a' has no \"compute_us\""),
    (change(("nodes", 0, "compute_us"), -1), r"compute_us of op 'a' is -1; expected at least 0"),
    (change(("nodes", 0, "compute_us"), "3"), r"compute_us of op 'a' is '3'; expected a number"),
    (change(("nodes", 0, "compute_us"), True), r"compute_us of op 'a' is True; expected a number"),
    (change(("nodes", 0, "compute_us"), float("inf")), r"compute_us of op 'a' is inf; expected a finite number"),
    (change(("nodes", 0, "persistent_bytes"), 1e308), r"persistent_bytes of op 'a' is 1e\+308; expected at most 1e\+300"),
    (change(("nodes", 0, "compute_us"), 10**400), r"compute_us of op 'a' is 1000.*; expected a finite number"),
    (change(("nodes", 0, "persistent_bytes"), -5), r"persistent_bytes of op 'a' is -5; expected at least 0"),
    (change(("nodes", 0, "persistent_bytes"), False), r"persistent_bytes of op 'a' is False; expected a number"),
    (change(("nodes", 0, "output_bytes"), "big"), r"output_bytes of op 'a' is 'big'"),
    (change(("nodes", 0, "temporary_bytes"), []), r"temporary_bytes of op 'a' is \[\]"),
    (change(("nodes", 0, "phase"), "sideways"), r"phase 'sideways'; expected one of forward, backward, update"),
    (change(("nodes", 0, "expert"), 1.5), r"\"expert\": 1.5; expected a device index or null"),
    (change(("nodes", 0, "expert"), True), r"\"expert\": True"),
    (change(("nodes", 0, "colocation"), 1.5), r"colocation of op 'a' is 1.5"),
    (change(("nodes", 0, "forward_op"), []), r"forward_op of op 'a' is \[\]"),
    (change(("edges", 0), 3), r"edge 0 is 3; expected an object"),
    (change(("edges", 0, "source"), ...), r"edge 0 \(None -> 7\) has no \"source\""),
    (change(("edges", 0, "target"), ...), r"edge 0 .* has no \"target\""),
    (change(("edges", 0, "bytes"), ...), r"edge 0 .* has no \"bytes\""),
    (change(("edges", 0, "bytes"), -4), r"bytes of edge 'a' -> '7' is -4; expected at least 0"),
    (change(("edges", 0, "tensor"), [1]), r"the tensor of edge 'a' -> '7' is \[1\]"),
    (change(("edges", 0, "source"), "x"), r"edge 'x' -> '7': its source 'x' is not an op"),
    (change(("edges", 0, "target"), "y"), r"edge 'a' -> 'y': its target 'y' is not an op"),
    (change(("edges", 1, "bytes"), 5), r"tensor 'a:0' of op 'a' has two sizes, 4 and 5 bytes \(edge to 'c'\)"),
    (change(("edges", 3), {"source": "c", "target": "a", "bytes": 1}), r"a cycle of [23] ops: .*; remove one of its edges"),
    (change(("edges", 3), {"source": "c", "target": "c", "bytes": 1}), r"a cycle of 1 op: 'c' -> 'c'; remove"),
]


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_a_broken_rule_is_named(value: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        OpGraph.from_json(value)


def test_the_cycle_is_shown_in_edge_direction() -> None:
    edges = [("a", "b", 1), ("b", "c", 1), ("c", "d", 1), ("d", "b", 1), ("d", "e", 1)]
    with pytest.raises(GraphError, match="a cycle of 3 ops: 'b' -> 'c' -> 'd' -> 'b'; remove"):
        graph_of(dict.fromkeys("abcde", 1.0), *edges)


def test_a_long_cycle_is_cut_short() -> None:
    ids = [f"n{i}" for i in range(20)]
    with pytest.raises(GraphError, match=r"a cycle of 20 ops: ('n\d+' -> ){9}\.\.\.; remove"):
        graph_of(dict.fromkeys(ids, 1.0), *((a, b, 1) for a, b in zip(ids, ids[1:] + ids[:1], strict=True)))


def test_defaults() -> None:
    graph = OpGraph.from_json(a_file())
    assert graph.ops[0] == Op(id="a", compute_us=1.5, phase="forward", colocation=None, expert=None)
    assert [op.id for op in graph.ops] == ["a", "7", "c"]
    assert [(t.producer, t.name, t.bytes, t.readers) for t in graph.tensors] == [(0, "a:0", 4, (1, 2)), (1, "", 8, (2,))]
    assert graph.inputs == ((), (0,), (0, 1))
    assert graph.outputs == ((0,), (1,), ())


def test_an_edge_that_stands_twice_counts_once() -> None:
    once, twice = graph_of({"a": 1, "b": 1}, ("a", "b", 4)), graph_of({"a": 1, "b": 1}, ("a", "b", 4), ("a", "b", 4))
    assert once == twice


def test_whole_sizes_become_integers_and_fractions_stay() -> None:
    value = change(("nodes", 0, "persistent_bytes"), 12.0)
    value["nodes"][1]["persistent_bytes"] = 0.25
    graph = OpGraph.from_json(value)
    assert [repr(op.persistent_bytes) for op in graph.ops] == ["12", "0.25", "0"]


def test_file_order_of_a_topological_order() -> None:
    graph = graph_of({"d": 1, "b": 1, "a": 1, "c": 1}, ("a", "d", 1), ("b", "c", 1), ("c", "d", 1))
    assert [graph.ops[v].id for v in graph.order] == ["b", "a", "c", "d"]


def test_neighbours_are_distinct() -> None:
    graph = graph_of({"a": 1, "b": 1, "c": 1}, ("a", "b", 4, "x"), ("a", "b", 8, "y"), ("a", "c", 4, "x"))
    assert graph.predecessors == ((), (0,), (0,))
    assert graph.successors == ((1, 2), (), ())


def test_groups_in_file_order() -> None:
    graph = graph_of({"a": 1, "b": 1, "c": 1}, colocation={"a": "g", "c": "g"})
    assert graph.groups == {"g": (0, 2)}


IDS = st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=8, unique=True)


@st.composite
def graphs(draw: st.DrawFn) -> OpGraph:
    ids = draw(IDS)
    size = st.integers(0, 2**60) | st.floats(0, 1e12)
    ops = [
        Op(
            id=id_,
            op=draw(st.sampled_from(["", "aten.add"])),
            phase=draw(st.sampled_from(["forward", "backward", "update"])),
            compute_us=draw(st.floats(0, 1e9)),
            persistent_bytes=draw(st.integers(0, 2**60)),
            colocation=draw(st.none() | st.sampled_from(["g", "h"])),
            expert=draw(st.none() | st.integers(-3, 9)),
            forward_op=draw(st.none() | st.just(ids[0])),
        )
        for id_ in ids
    ]
    tensors = [draw(st.tuples(st.just(i), st.sampled_from(["", "x", "y"]), size)) for i in range(len(ids))]
    pairs = st.tuples(st.integers(0, len(ids) - 1), st.integers(0, len(ids) - 1)).filter(lambda p: p[0] < p[1])
    edges = draw(st.lists(pairs, max_size=12)) if len(ids) > 1 else []
    return OpGraph.from_edges(ops, [(ids[s], ids[d], tensors[s][2], tensors[s][1]) for s, d in edges], name="g")


@given(graphs())
def test_json_round_trip(graph: OpGraph) -> None:
    again = OpGraph.from_json(json.loads(json.dumps(graph.to_json())))
    assert again.ops == graph.ops
    assert again.fingerprint == graph.fingerprint
    assert again.op_digests == graph.op_digests
    assert again.to_json() == graph.to_json()


@given(graphs())
def test_networkx_reads_the_file(graph: OpGraph) -> None:
    read = nx.node_link_graph(json.loads(json.dumps(graph.to_json())))
    assert isinstance(read, nx.MultiDiGraph)
    assert list(read.nodes) == [op.id for op in graph.ops]
    assert sum(data["bytes"] for _, _, data in read.edges(data=True)) == pytest.approx(
        sum(len(t.readers) * t.bytes for t in graph.tensors)
    )
    again = OpGraph.from_json(nx.node_link_data(read))
    assert again.ops == graph.ops
    assert {(t.producer, t.name, t.bytes, frozenset(t.readers)) for t in again.tensors} == {
        (t.producer, t.name, t.bytes, frozenset(t.readers)) for t in graph.tensors
    }
    assert read.graph["fingerprint"] == graph.fingerprint


def test_networkx_writes_a_file_we_read() -> None:
    made = nx.DiGraph()
    made.add_node(0, compute_us=5)
    made.add_node(1, compute_us=6)
    made.add_edge(0, 1, bytes=10)
    graph = OpGraph.from_json(nx.node_link_data(made))
    assert [op.compute_us for op in graph.ops] == [5, 6]
    assert graph.tensors[0].bytes == 10


def test_save_and_load(tmp_path: Path) -> None:
    graph = OpGraph.from_json(a_file())
    graph.save(tmp_path / "graph.json")
    again = OpGraph.load(tmp_path / "graph.json")
    assert again.to_json() == graph.to_json()


def test_load_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(json.dumps(change(("nodes", 0, "id"), "7")))
    with pytest.raises(GraphError, match=r"bad\.json: op id '7' appears twice"):
        OpGraph.load(tmp_path / "bad.json")


# What the fingerprint sees


def fingerprint(value: dict[str, Any]) -> str:
    return OpGraph.from_json(value).fingerprint


@pytest.mark.parametrize(
    ("path", "new"),
    [
        (("nodes", 0, "compute_us"), 99.0),
        (("nodes", 0, "persistent_bytes"), 4),
        (("nodes", 0, "output_bytes"), 4),
        (("nodes", 0, "temporary_bytes"), 4),
        (("nodes", 0, "expert"), 1),
        (("nodes", 1, "id"), "7"),
        (("graph",), {"name": "other"}),
    ],
)
def test_the_fingerprint_leaves_costs_out(path: tuple[Any, ...], new: Any) -> None:
    assert fingerprint(change(path, new)) == fingerprint(a_file())


@pytest.mark.parametrize(
    ("path", "new"),
    [
        (("nodes", 0, "op"), "other"),
        (("nodes", 0, "phase"), "backward"),
        (("nodes", 0, "colocation"), "g"),
        (("edges", 2, "bytes"), 9),
        (("edges", 2, "tensor"), "t"),
        (("edges", 2), ...),
        (("nodes", 3), {"id": "d", "compute_us": 1}),
    ],
)
def test_the_fingerprint_sees_structure(path: tuple[Any, ...], new: Any) -> None:
    assert fingerprint(change(path, new)) != fingerprint(a_file())


def test_a_changed_op_changes_its_own_digest_alone() -> None:
    before, after = OpGraph.from_json(a_file()), OpGraph.from_json(change(("nodes", 1, "op"), "other"))
    assert [a == b for a, b in zip(before.op_digests, after.op_digests, strict=True)] == [True, False, True]


def test_a_given_fingerprint_is_kept_until_the_structure_changes() -> None:
    graph = OpGraph.from_json(change(("graph",), {"fingerprint": "f00d"}))
    assert graph.fingerprint == "f00d"
    assert graph.replace_ops([replace(op, compute_us=5.0) for op in graph.ops]).fingerprint == "f00d"
    assert graph.replace_ops([replace(op, colocation="g") for op in graph.ops]).fingerprint != "f00d"


def test_replace_ops_wants_the_same_ops() -> None:
    graph = OpGraph.from_json(a_file())
    with pytest.raises(GraphError, match="replace_ops needs the same op ids in the same order"):
        graph.replace_ops(graph.ops[::-1])


def test_whole_floats_and_integers_have_one_fingerprint() -> None:
    assert graph_of({"a": 1, "b": 1}, ("a", "b", 4.0)).fingerprint == graph_of({"a": 1, "b": 1}, ("a", "b", 4)).fingerprint
