"""Expert hints: what follows from a few, and files of them."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baechi_ext.errors import FileError
from baechi_ext.ir import OpGraph
from baechi_ext.ir.hints import ExpertFile, with_experts
from tests.build import graph_of


def hints_of(graph: OpGraph) -> dict[str, int | None]:
    return {op.id: op.expert for op in graph.ops}


def spread(graph: OpGraph, **hints: int) -> dict[str, int | None]:
    return hints_of(with_experts(graph, [hints.get(op.id) for op in graph.ops]))


def test_an_op_follows_the_last_op_that_it_reads_from() -> None:
    graph = graph_of({"a": 1, "b": 1, "sum": 1, "relu": 1}, ("a", "b", 1), ("a", "sum", 1), ("b", "sum", 1), ("sum", "relu", 1))
    assert spread(graph, a=3, b=5) == {"a": 3, "b": 5, "sum": 5, "relu": 5}


def test_an_op_that_reads_nothing_follows_its_first_reader() -> None:
    graph = graph_of({"x": 1, "cast": 1, "a": 1, "b": 1}, ("x", "cast", 1), ("cast", "b", 1), ("cast", "a", 1), ("a", "b", 1))
    assert spread(graph, a=1, b=2) == {"x": 1, "cast": 1, "a": 1, "b": 2}


def test_a_backward_op_follows_its_forward_op() -> None:
    graph = graph_of(
        {"low": 1, "f": 1, "high": 1, "high_b": 1, "f_b": 1},
        ("low", "f", 1),
        ("f", "high", 1),
        ("high", "high_b", 1),
        ("high_b", "f_b", 1),
        forward_op={"f_b": "f", "high_b": "not in this graph"},
    )
    assert spread(graph, low=0, high=1) == {"low": 0, "f": 0, "high": 1, "high_b": 1, "f_b": 0}


def test_a_group_takes_its_most_frequent_hint_and_follows_as_one() -> None:
    graph = graph_of({"a": 1, "b": 1, "c": 1, "d": 1}, colocation={"a": "g", "b": "g", "c": "g"})
    assert spread(graph, a=1, b=2, c=2) == {"a": 2, "b": 2, "c": 2, "d": None}
    assert spread(graph, a=4, c=1)["b"] == 4  # of equals the first
    graph = graph_of({"x": 1, "early": 1, "late": 1}, ("x", "late", 1), colocation={"early": "g", "late": "g"})
    assert spread(graph, x=6) == {"x": 6, "early": 6, "late": 6}


def test_hints_travel_against_and_along_edges_in_turn() -> None:
    """From hinted a back to the input, and from there on to a second reader, and back to that one's other input."""
    graph = graph_of({"x": 1, "a": 1, "b": 1, "y": 1, "alone": 1}, ("x", "a", 1), ("x", "b", 1), ("y", "b", 1))
    assert spread(graph, a=2) == {"x": 2, "a": 2, "b": 2, "y": 2, "alone": None}


def plainly_spread(graph: OpGraph, hints: list[int | None]) -> list[int | None]:
    """Sweeps over all ops, forward and back, until nothing changes; for hints that all of a group have."""
    found, rank = list(hints), {v: i for i, v in enumerate(graph.order)}
    before = None
    while before != found:
        before = list(found)
        for direction, turns in ((1, graph.order), (-1, graph.order[::-1])):
            for v in turns:
                near = graph.predecessors[v] if direction > 0 else graph.successors[v]
                leaders = sorted(near, key=lambda w: -direction * rank[w])
                if direction > 0 and graph.ops[v].forward_op in graph.index:
                    leaders.insert(0, graph.index[graph.ops[v].forward_op])
                hint = next((found[w] for w in leaders if found[w] is not None), None)
                label = graph.ops[v].colocation
                if found[v] is None:
                    for w in (v,) if label is None else graph.groups[label]:
                        found[w] = hint
    return found


@settings(max_examples=300)
@given(st.data())
def test_hints_are_those_of_sweeps_over_all_ops(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 12))
    order = data.draw(st.permutations(range(n)))
    pairs = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda p: p[0] < p[1])
    edges = data.draw(st.lists(pairs, max_size=14, unique=True))
    labels = data.draw(st.lists(st.sampled_from([None, None, None, "g", "h"]), min_size=n, max_size=n))
    of = st.one_of(st.none(), st.none(), st.integers(0, n - 1).map(lambda v: f"o{v}"))
    forward = data.draw(st.lists(of, min_size=n, max_size=n))
    given_ = data.draw(st.lists(st.sampled_from([None, None, None, 0, 1, 2]), min_size=n, max_size=n))
    graph = graph_of(
        {f"o{v}": 1 for v in range(n)},
        *((f"o{order[a]}", f"o{order[b]}", 1) for a, b in edges),
        colocation={f"o{v}": label for v, label in enumerate(labels) if label is not None},
        forward_op={f"o{v}": name for v, name in enumerate(forward) if name is not None},
    )
    hints = [given_[graph.groups[label][0] if label is not None else v] for v, label in enumerate(labels)]
    assert [op.expert for op in with_experts(graph, hints).ops] == plainly_spread(graph, hints)


def test_a_hint_at_the_end_of_a_long_zigzag() -> None:
    """Each sweep comes one op further, so that sweeps over all ops would be 20,000."""
    n = 20_000
    edges = [(f"a{i}", f"b{i + j}", 1) for i in range(n) for j in (0, 1) if i + j < n]
    graph = graph_of({f"{kind}{i}": 1 for kind in "ab" for i in range(n)}, *edges)
    assert {op.expert for op in with_experts(graph, [3 if op.id == "a0" else None for op in graph.ops]).ops} == {3}


def test_only_hints_change() -> None:
    graph = graph_of({"a": 1, "b": 2}, ("a", "b", 3), expert={"a": 9})
    hinted = with_experts(graph, [1, None])
    assert hints_of(hinted) == {"a": 1, "b": 1}
    assert hinted.fingerprint == graph.fingerprint
    assert hinted.tensors == graph.tensors
    assert hints_of(with_experts(graph, [None, None])) == {"a": None, "b": None}


@given(st.data())
def test_all_ops_that_a_path_connects_with_a_hint_get_one(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 8))
    pairs = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda p: p[0] < p[1])
    edges = data.draw(st.lists(pairs, max_size=10, unique=True)) if n > 1 else []
    labels = data.draw(st.lists(st.sampled_from([None, None, "g", "h"]), min_size=n, max_size=n))
    hints = data.draw(st.lists(st.sampled_from([None, 0, 1]), min_size=n, max_size=n))
    colocation = {f"o{v}": label for v, label in enumerate(labels) if label is not None}
    graph = graph_of({f"o{v}": 1 for v in range(n)}, *((f"o{a}", f"o{b}", 1) for a, b in edges), colocation=colocation)
    found = [op.expert for op in with_experts(graph, hints).ops]
    reached = {v for v in range(n) if hints[v] is not None}
    near = [{*graph.predecessors[v], *graph.successors[v], *graph.groups.get(labels[v] or "", ())} for v in range(n)]
    while more := {w for v in reached for w in near[v]} - reached:
        reached |= more
    assert {v for v in range(n) if found[v] is not None} == reached
    for members in graph.groups.values():
        assert len({found[v] for v in members}) == 1
    assert all(found[v] == hints[v] for v in range(n) if labels[v] is None and hints[v] is not None)


LAYERS = graph_of(
    {"low": 1, "low_b": 1, "high": 1, "high_b": 1, "loss": 1},
    ("low", "high", 1),
    ("high", "loss", 1),
    ("loss", "high_b", 1),
    ("high_b", "low_b", 1),
    colocation={"low": "layers.0.weight", "low_b": "layers.0.weight", "high": "layers.1.weight", "high_b": "layers.1.weight"},
    expert={"loss": 7},
)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"low": 0, "high": 1}, (0, 0, 1, 1, 1)),
        ({"layers.0.weight": 2, "layers.1.weight": 3}, (2, 2, 3, 3, 3)),
        ({"layers.0.*": 2, "layers.*": 3, "loss": 0}, (2, 2, 3, 3, 0)),
        ({"*": 4, "layers.1.weight": 0}, (4, 4, 0, 0, 4)),
        ({"schema_version": 1, "l?w*": 1, "[h]igh": 2}, (1, 1, 2, 2, 2)),
        ({"layers.1.weight": 5}, (5, 5, 5, 5, 5)),
    ],
)
def test_names_and_patterns_in_a_file(tmp_path: Path, rules: dict[str, int], expected: tuple[int, ...]) -> None:
    """The file's hints take the place of the graph's own (the loss's 7)."""
    (tmp_path / "expert.json").write_text(json.dumps(rules))
    assert tuple(op.expert for op in ExpertFile.load(tmp_path / "expert.json").apply(LAYERS).ops) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"low": "cpu"}', r"expert.json: the device of 'low' is 'cpu'; expected its index, a whole number"),
        ('{"low": true}', r"the device of 'low' is True; expected its index"),
        ('{"low": 0, "middle": 1, "x*": 1}', r"no op and no colocation group of the graph is called 'middle', 'x\*'; take names from"),
        ("[0, 1]", r"expert file .* holds a JSON list, expected an object"),
    ],
)
def test_bad_files(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "expert.json").write_text(content)
    with pytest.raises(FileError, match=message):
        ExpertFile.load(tmp_path / "expert.json").apply(LAYERS)
