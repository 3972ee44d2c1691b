"""The examples in docs/files.md are files."""

import json
import re
from pathlib import Path

from baechi_ext.ir import Cluster, OpGraph, Plan
from tests.build import cluster_of, graph_of

TEXT = (Path(__file__).parent.parent.parent / "docs" / "files.md").read_text(encoding="utf-8")
GRAPH, CLUSTER, PLAN, COMPARISON = map(json.loads, re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL))


def test_the_examples_can_be_read() -> None:
    graph = OpGraph.from_json(GRAPH)
    assert [op.id for op in graph.ops] == ["conv", "relu"]
    assert [d.name for d in Cluster.from_json(CLUSTER).devices] == ["cuda:0", "cuda:1"]
    of_this_graph = {**PLAN, "op_digests": dict(zip(graph.index, graph.op_digests, strict=True))}
    assert Plan.from_json(of_this_graph, graph).placement == (0, 1)


def test_the_plan_that_the_example_of_a_comparison_recommends_is_one_of_its_own() -> None:
    assert COMPARISON["recommended"] in [method["method"] for method in COMPARISON["methods"]]


def test_the_examples_name_every_field_that_is_written() -> None:
    graph = graph_of({"a": 1, "b": 1}, ("a", "b", 4))
    written = graph.to_json()
    assert set(written) == set(GRAPH)
    assert set(written["nodes"][0]) == set(GRAPH["nodes"][0])
    assert set(written["edges"][0]) == set(GRAPH["edges"][0])
    assert set(cluster_of(2).to_json()) == set(CLUSTER)
    plan = Plan(graph, "m", "feasible", cluster_of(2), (0, 1), (0, 1), 1.0, 1.0, (0, 0), 0.0)
    assert set(plan.to_json()) == set(PLAN)
