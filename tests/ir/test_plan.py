"""Plan: its file, and the refusal of a plan that belongs to another graph."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baechi_ext.errors import FileError, MismatchError, PlanError
from baechi_ext.ir import Cluster, OpGraph, Plan
from baechi_ext.ir.made_by import MadeBy
from baechi_ext.simulate import simulate
from tests.build import cluster_of, graph_of

GRAPH = graph_of({"a": 1, "b": 2, "c": 3}, ("a", "b", 4), ("b", "c", 4))
MADE_BY = MadeBy(("baechi", "place", "a graph.json"), {"baechi": "1", "python": "3"})


def a_plan(graph: OpGraph = GRAPH, **fields: Any) -> Plan:
    known = Plan(
        graph=graph,
        method="by hand",
        status="feasible",
        cluster=cluster_of(2, memory_bytes=1000),
        placement=(0, 1, 1),
        priority=(0, 1.5, -2),
        predicted_step_us=10.0,
        lower_bound_us=6.0,
        peak_memory_bytes=(4, 8.5),
        placement_seconds=0.25,
        options={"grouper": "none"},
        seed=3,
        made_by=MADE_BY,
    )
    return replace(known, **fields)


def a_file(**fields: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(a_plan().to_json())), **fields}


@pytest.mark.parametrize("priority", [(0, 1.5, -2), None])
def test_round_trip(tmp_path: Path, priority: tuple[float, ...] | None) -> None:
    plan = a_plan(priority=priority)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json", GRAPH)
    assert (again, again.made_by) == (plan, MADE_BY)


def test_who_made_a_plan_is_in_its_file_and_no_part_of_it(tmp_path: Path) -> None:
    another = MadeBy(("baechi", "place", "it"), {"baechi": "9"})
    a_plan().save(tmp_path / "plan.json", another)
    again = Plan.load(tmp_path / "plan.json", GRAPH)
    assert (again, again.made_by) == (a_plan(), another)
    assert Plan.from_json({"cluster": cluster_of(2).to_json(), "placement": {"a": 0, "b": 1, "c": 0}}, GRAPH).made_by == MadeBy((), {})
    assert Plan.from_json(a_file(command="solve --fast"), GRAPH).made_by == MadeBy((), MADE_BY.versions)


def test_the_file_is_keyed_by_op_id() -> None:
    value = a_file()
    assert value["placement"] == {"a": 0, "b": 1, "c": 1}
    assert value["priority"] == {"a": 0, "b": 1.5, "c": -2}
    assert "priority" not in a_plan(priority=None).to_json()


def test_another_programs_plan_needs_little() -> None:
    value = {"cluster": cluster_of(2).to_json(), "placement": {"a": 0, "b": 1, "c": 0}}
    plan = Plan.from_json(value, GRAPH)
    assert (plan.placement, plan.priority, plan.status, plan.predicted_step_us) == ((0, 1, 0), None, "feasible", 0.0)


def test_integer_ids_are_strings_in_a_plan() -> None:
    graph = OpGraph.from_json({"nodes": [{"id": 3, "compute_us": 1}], "edges": []})
    assert Plan.from_json({"cluster": cluster_of(1).to_json(), "placement": {"3": 0}}, graph).placement == (0,)


def test_another_cluster_overrides_the_plans_own() -> None:
    assert len(Plan.from_json(a_file(), GRAPH, cluster_of(5)).cluster) == 5
    with pytest.raises(PlanError, match="op 'b' is placed on device 1; expected 0, the only one: place the graph on these again, or"):
        Plan.from_json(a_file(), GRAPH, cluster_of(1))


def test_the_same_plan_on_another_cluster() -> None:
    assert a_plan().on(cluster_of(5)) == a_plan(cluster=cluster_of(5))
    with pytest.raises(PlanError, match="op 'b' is placed on device 1; expected 0, the only one: place the graph on these again, or"):
        a_plan().on(cluster_of(1))


REFUSED = [
    ({"placement": None}, 'the plan has no object "placement"'),
    ({"placement": [0, 1, 1]}, 'the plan has no object "placement"'),
    ({"graph": {}, "nodes": [], "placement": None}, 'the plan has no object "placement": this is a graph, of which'),
    ({"placement": {"a": 0, "b": 1, "c": 2}}, "op 'c' is placed on device 2; expected 0 to 1"),
    ({"placement": {"a": 0, "b": 1, "c": -1}}, "op 'c' is placed on device -1"),
    ({"placement": {"a": 0, "b": 1, "c": "1"}}, "op 'c' is placed on device '1'"),
    ({"placement": {"a": 0, "b": 1, "c": True}}, "op 'c' is placed on device True"),
    ({"cluster": None}, 'the plan\'s cluster: a cluster needs a list "devices"'),
    ({"status": "infeasible"}, "the plan's status is 'infeasible'; expected one of optimal, feasible"),
    ({"priority": [1, 2, 3]}, 'the plan\'s "priority" is not an object'),
    ({"priority": {"a": 0, "b": 1}}, "op 'c' has no priority; give every op one, or none at all"),
    ({"priority": {"a": 0, "b": 2**53, "c": 2**53 + 1}}, "priority of op 'c' is 9007199254740993, too long to be told from its neighbours"),
    ({"priority": {"a": 0, "b": 1, "c": "x"}}, "priority of op 'c' is 'x'; expected a number"),
    ({"predicted_step_us": -1}, "predicted_step_us is -1; expected at least 0"),
    ({"lower_bound_us": "x"}, "lower_bound_us is 'x'"),
    ({"peak_memory_bytes": 7}, '"peak_memory_bytes" is 7; expected a list'),
    ({"peak_memory_bytes": [None]}, "an entry of peak_memory_bytes is None"),
    ({"placement_seconds": None}, "placement_seconds is None"),
    ({"options": 3}, '"options" is 3; expected an object'),
    ({"versions": [1]}, r'"versions" is \[1\]; expected an object'),
    ({"seed": "x"}, "seed is 'x'"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_a_broken_rule_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_json(a_file(**fields), GRAPH)


def without(key: str) -> dict[str, Any]:
    value = a_file()
    del value[key]
    return value


CHANGED_B = graph_of({"a": 1, "b": 2, "c": 3}, ("a", "b", 5), ("b", "c", 4))
RENAMED_C = graph_of({"a": 1, "b": 2, "d": 3}, ("a", "b", 4), ("b", "d", 4))
SHORTER = graph_of({"a": 1, "b": 2}, ("a", "b", 4))
EXTRA = {"a": 0, "b": 0, "c": 0, "zz": 0}

MISMATCHES = [
    (CHANGED_B, a_file(), r"the first op that differs is 'b' \(its type, phase, colocation or inputs changed\); make a new plan"),
    (RENAMED_C, a_file(), "the first op that differs is 'd', which it lacks; make a new plan"),
    (RENAMED_C, without("op_digests"), "the first op that differs is 'd', which it lacks"),
    (SHORTER, a_file(), "the first op that differs is 'c', which the graph lacks"),
    (SHORTER, without("op_digests"), "the first op that differs is 'c', which the graph lacks"),
    (GRAPH, a_file(placement=EXTRA), "the first op that differs is 'zz', which the graph lacks"),
    (CHANGED_B, without("op_digests"), r"its fingerprint is .*\(it carries no digests per op, so the op can't be named\)"),
    (GRAPH, a_file(op_digests=[1]), 'the plan\'s "op_digests" is list, expected an object'),
]


@pytest.mark.parametrize(("graph", "value", "message"), MISMATCHES, ids=[m for _, _, m in MISMATCHES])
def test_another_graphs_plan_is_refused(graph: OpGraph, value: dict[str, Any], message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        Plan.from_json(value, graph)


def test_other_costs_are_not_another_graph() -> None:
    costlier = GRAPH.replace_ops([replace(op, compute_us=op.compute_us * 3) for op in GRAPH.ops])
    assert Plan.from_json(a_file(), costlier).placement == (0, 1, 1)


@pytest.mark.parametrize(("value", "error"), [(a_file(status="x"), PlanError), (a_file(placement=EXTRA), MismatchError)])
def test_load_names_the_file(tmp_path: Path, value: dict[str, Any], error: type[Exception]) -> None:
    (tmp_path / "p.json").write_text(json.dumps(value))
    with pytest.raises(error, match=r"p\.json: the plan"):
        Plan.load(tmp_path / "p.json", GRAPH)


def test_load_of_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot read plan file"):
        Plan.load(tmp_path / "p.json", GRAPH, Cluster.uniform(1))


def test_what_a_prompt_shows_is_short() -> None:
    assert repr(a_plan()) == "<Plan by hand: 3 ops on 2 devices, step 0.01 ms, bound 0.006 ms, feasible>"
    assert repr(GRAPH) == "<OpGraph a graph: 3 ops, 2 tensors>"
    assert repr(simulate(GRAPH, a_plan().cluster, (0, 1, 1))).startswith("<Timeline: ")
