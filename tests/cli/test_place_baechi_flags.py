"""The effects of Baechi's flags on `baechi place`: each changes something on a small graph."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baechi_ext.ir import OpGraph, Plan
from baechi_ext.simulate import simulate
from tests.cli.files import write

Run = Callable[..., tuple[int, str, str]]


def write_graph(folder: Path, nodes: dict[str, dict[str, Any]], edges: list[tuple[str, str, int]]) -> Path:
    value = {
        "nodes": [{"id": name, **fields} for name, fields in nodes.items()],
        "edges": [{"source": s, "target": d, "bytes": size, "tensor": f"{s}{d}"} for s, d, size in edges],
    }
    return write(folder / "g.json", value)


def placed(run: Run, graph: Path, *flags: str) -> dict[str, Any]:
    """The plan that is printed, after a look at whether it is what it says."""
    code, out, err = run("place", graph, "--placement_method=m_etf", "--num_devices=2", "--comm_cost_coeffs=0,1", "--json", *flags)
    assert (code, "error" in err) == (0, False), err  # a machine at work may show progress there
    value = json.loads(out)
    costed = OpGraph.load(graph)
    plan = Plan.from_json(value, costed)
    timeline = simulate(costed, plan.cluster, plan.placement, plan.priority)
    assert timeline.makespan_us == pytest.approx(plan.predicted_step_us)
    for members in costed.groups.values():
        assert len({plan.placement[v] for v in members}) == 1
    return value


def test_only_important_ops(run: Run, tmp_path: Path) -> None:
    """q alone would wait for b on the second device; as it hardly takes time it stays where it was made."""
    nodes = {"a": {"compute_us": 1000}, "b": {"compute_us": 1000}, "q": {"compute_us": 1}}
    graph = write_graph(tmp_path, nodes, [("a", "q", 1)])
    value = placed(run, graph, "--only_important_ops")
    assert value["placement"]["a"] == value["placement"]["q"] != value["placement"]["b"]
    assert value["options"]["only_important_ops"] is True
    assert "only_important_ops" not in placed(run, graph)["options"]


@pytest.mark.parametrize(
    ("flags", "option"),
    [
        (("--placer_type=colocation", "--resolve_cycle"), "resolve_cycle"),
        (("--placer_type=colocation", "--consider_all_edges_in_grouping"), "consider_all_edges"),
        (("--placer_type=fusion", "--fusion_check_disjoint_paths"), "check_disjoint_paths"),
        (("--placer_type=fusion", "--fusion_allow_cycle"), "allow_cycle"),
    ],
)
def test_grouping(run: Run, tmp_path: Path, flags: tuple[str, ...], option: str) -> None:
    nodes = {
        "f": {"compute_us": 5, "colocation": "w"},
        "loss": {"compute_us": 1},
        "b": {"compute_us": 5, "colocation": "w", "phase": "backward"},
        "u": {"compute_us": 1, "colocation": "w", "phase": "update"},
    }
    graph = write_graph(tmp_path, nodes, [("f", "loss", 4), ("loss", "b", 4), ("b", "u", 4), ("loss", "u", 0)])
    assert placed(run, graph, *flags)["options"][option] is True
    assert option not in placed(run, graph, flags[0])["options"]


def test_adjustment(run: Run, tmp_path: Path) -> None:
    """Bound, the group's two long ops take 20 on one device. So they do when adjusted, and their device then depends on the method."""
    nodes = {
        "a": {"compute_us": 10, "colocation": "g", "persistent_bytes": 1},
        "b": {"compute_us": 9, "colocation": "g", "persistent_bytes": 8},
        "c": {"compute_us": 1, "persistent_bytes": 1},
    }
    graph = write_graph(tmp_path, nodes, [])
    by_time = placed(run, graph, "--adjustment_method=time")
    by_memory = placed(run, graph, "--adjustment_method=memory")
    assert by_time["placement"]["a"] != by_memory["placement"]["a"]
    assert by_memory["options"]["adjustment_method"] == "memory"
    flags = ("--adjustment_method=memory", "--adjustment_with_memory_limit", "--device_memory=9")
    limited = placed(run, graph, *flags)
    assert limited["options"]["adjustment_with_memory_limit"] is True
    assert max(limited["peak_memory_bytes"]) <= 9
    assert "adjustment_method" not in placed(run, graph)["options"]


def test_the_placer_sees_a_part_of_the_memory(run: Run, tmp_path: Path) -> None:
    graph = write_graph(tmp_path, {"a": {"compute_us": 1, "persistent_bytes": 40}, "b": {"compute_us": 1, "persistent_bytes": 40}}, [])
    flags = ("--device_memory=200", "--memory_fraction=0.5")
    assert placed(run, graph, *flags)["cluster"]["devices"][0]["memory_bytes"] == 100
    value = placed(run, graph, *flags, "--placer_memory_fraction=0.5")
    assert value["cluster"]["devices"][0]["memory_bytes"] == 50
    code, _, said = run("place", graph, "--num_devices=2", "--placer_memory_fraction=0.5")
    assert (code, "--placer_memory_fraction needs devices of limited memory; add --device_memory=SIZE" in said) == (2, True)
    assert value["placement"]["a"] != value["placement"]["b"]


def test_dearer_links_keep_ops_together(run: Run, tmp_path: Path) -> None:
    """A fork of 10 each: with a transfer of 1 they part, with one of 20 they stay."""
    nodes = {name: {"compute_us": 10} for name in "abc"}
    graph = write_graph(tmp_path, nodes, [("a", "b", 1), ("a", "c", 1)])
    assert placed(run, graph)["predicted_step_us"] == 21
    value = placed(run, graph, "--comm_cost_factor=20")
    assert value["predicted_step_us"] == 30
    assert value["cluster"]["links"]["default"] == {"us_per_byte": 0, "latency_us": 20}


def test_a_plan_made_with_wrong_costs_is_judged_with_the_right_ones(run: Run, tmp_path: Path) -> None:
    """`placed` simulates the plan with the graph's costs, on the cluster's links, which --cost_factor leaves alone."""
    nodes = {f"o{i}": {"compute_us": 10 + i} for i in range(9)}
    graph = write_graph(tmp_path, nodes, [])
    right = placed(run, graph)
    wrong = [placed(run, graph, "--cost_factor=8", f"--seed={seed}") for seed in range(3)]
    assert all(value["predicted_step_us"] >= right["lower_bound_us"] for value in wrong)
    assert any(value["placement"] != right["placement"] for value in wrong)
    assert max(value["predicted_step_us"] for value in wrong) > right["predicted_step_us"]
    assert [value["cluster"] for value in wrong] == [right["cluster"]] * 3
    assert wrong[0]["options"]["cost_factor"] == 8


def test_a_threshold_of_nothing_is_one(run: Run, tmp_path: Path) -> None:
    """Baechi takes its default instead of 0."""
    nodes = {"a": {"compute_us": 1}, "b": {"compute_us": 5}, "c": {"compute_us": 5}}
    graph = write_graph(tmp_path, nodes, [("a", "b", 4), ("a", "c", 4)])
    for threshold in (0.0, 0.5):
        value = placed(run, graph, "--placement_method=m_sct", f"--sct_threshold={threshold}")
        assert value["options"]["sct_threshold"] == threshold
