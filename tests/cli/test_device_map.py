"""Device maps and pins on the command line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baechi_ext.ir import OpGraph, Plan
from baechi_ext.place.registry import METHODS
from tests.cli.files import write

Run = Callable[..., tuple[int, str, str]]
CLUSTER = ("--num_devices=2", "--comm_cost_coeffs=0.01,1")


def towers() -> dict[str, Any]:
    """Two towers of two layers, and a head that both feed."""
    nodes: list[dict[str, Any]] = []
    edges = []
    for tower in "ab":
        for layer in (f"{tower}.0", f"{tower}.1"):
            common = {"colocation": f"{layer}.weight", "module": layer}
            nodes.append({"id": layer, "compute_us": 100, **common})
            nodes.append({"id": f"update.{layer}.weight", "phase": "update", "compute_us": 10, "persistent_bytes": 50, **common})
            edges.append((layer, f"update.{layer}.weight"))
        edges += [(f"{tower}.0", f"{tower}.1"), (f"{tower}.1", "head")]
    nodes += [{"id": "head", "compute_us": 20, "module": "head"}, {"id": "loss", "compute_us": 5}]
    return {"nodes": nodes, "edges": [{"source": s, "target": d, "bytes": 100} for s, d in [*edges, ("head", "loss")]]}


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    return write(tmp_path / "graph.json", towers())


def devices_of(graph: Path, plan: Path) -> dict[str, int]:
    found = Plan.load(plan, OpGraph.load(graph))
    return {op.id: d for op, d in zip(found.graph.ops, found.placement, strict=True)}


@pytest.mark.parametrize("method", METHODS)
def test_pins_hold(run: Run, graph: Path, tmp_path: Path, method: str) -> None:
    out = tmp_path / "plan.json"
    other = write(tmp_path / "expert.json", {"*": 0})
    flags = (f"--expert_file={other}",) if method == "expert" else ()
    pins = ("--pin=a.1=1", "--pin", "b.?=0")
    code, _, said = run("place", graph, *CLUSTER, f"--placement_method={method}", *flags, *pins, "--time_limit=0.3", "--out", out)
    assert (code, "error" in said) == (0, False)
    found = devices_of(graph, out)
    assert (found["a.1"], found["update.a.1.weight"], found["b.0"], found["b.1"]) == (1, 1, 0, 0)
    assert json.loads(out.read_text())["options"]["pins"] == ["a.1=1", "b.?=0"]


@pytest.mark.parametrize(
    "flags",
    [("--grouper=coplace",), ("--only_forward",), ("--placer_type=fusion",), ("--placer_type=colocation", "--resolve_cycle"),
     ("--only_important_ops",), ("--adjustment_method=time_sum",), ("--cost_factor=1.5",), ("--device_memory=500",)],
)  # fmt: skip
def test_pins_hold_whatever_is_grouped(run: Run, graph: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    out = tmp_path / "plan.json"
    pins = ("--pin=a.1=1", "--pin=b.0=0", "--pin=head=1", "--pin=loss=0")
    assert run("place", graph, *CLUSTER, "--placement_method=m_etf", *pins, *flags, "--out", out)[0] == 0
    found = devices_of(graph, out)
    assert (found["a.1"], found["b.0"], found["head"], found["loss"]) == (1, 0, 1, 0)


@pytest.mark.parametrize(
    ("pins", "code", "message"),
    [
        (("nothing.*=0",), 2, "the pin 'nothing.*=0' matches nothing"),
        (("a=0", "a.1=1"), 2, "the pin 'a=0' and the pin 'a.1=1' contradict each other"),
        (("a=2",), 2, "the pin 'a=2' names no device"),
        (("a",), 2, "'a' is not a pin"),
        (("a=0", "b=0"), 1, "what is pinned to device"),
    ],
)
def test_pins_that_cannot_be(run: Run, graph: Path, pins: tuple[str, ...], code: int, message: str) -> None:
    found, _, said = run("place", graph, *CLUSTER, "--device_memory=199", *(f"--pin={pin}" for pin in pins))
    assert found == code
    assert said.startswith("error: ")
    assert message in said


def test_a_device_map_is_a_plan(run: Run, graph: Path, tmp_path: Path) -> None:
    out, given = tmp_path / "plan.json", write(tmp_path / "map.json", {"": 0, "b": 1})
    code, shown, _ = run("place", graph, *CLUSTER, "--placement_method=expert", f"--device_map={given}", "--out", out)
    assert code == 0
    found = devices_of(graph, out)
    assert {found[v] for v in ("a.0", "a.1", "head", "loss")} == {0}
    assert {found[v] for v in ("b.0", "b.1", "update.b.0.weight")} == {1}
    assert json.loads(out.read_text())["options"]["device_map"] == {"": 0, "b": 1}
    assert "not where the device map has them" not in shown


def test_what_a_device_map_cannot_have_is_said(run: Run, graph: Path, tmp_path: Path) -> None:
    given = write(tmp_path / "map.json", {"": 0, "b": 1})
    flags = ("--placement_method=expert", f"--device_map={given}", "--pin=b.0=0", "--json")
    code, shown, _ = run("place", graph, *CLUSTER, *flags)
    assert code == 0
    assert json.loads(shown)["notes"] == [
        "2 ops are not where the device map has them: they are pinned, or share a colocation group with ops of other modules"
    ]


def test_a_search_starts_from_a_device_map(run: Run, graph: Path, tmp_path: Path) -> None:
    """With so little time that nothing but the start is seen."""
    given = write(tmp_path / "map.json", {"a": 1, "b": 0, "head": 1})
    flags = ("--placement_method=refine", f"--device_map={given}", "--time_limit=0.000001")
    out = tmp_path / "plan.json"
    assert run("place", graph, *CLUSTER, *flags, "--out", out)[0] == 0
    assert [devices_of(graph, out)[v] for v in ("a.0", "a.1", "b.0", "b.1", "head")] == [1, 1, 0, 0, 1]


def test_where_device_maps_are_taken(run: Run, graph: Path, tmp_path: Path) -> None:
    given, plan = write(tmp_path / "map.json", {"": 0}), tmp_path / "plan.json"
    assert run("place", graph, *CLUSTER, "--placement_method=single", f"--out={plan}")[0] == 0
    for flags, message in (
        (("--placement_method=m_etf",), "--device_map is only for --placement_method=expert, auto, refine"),
        ((f"--initial_plan={plan}",), "--device_map and --initial_plan cannot be used together"),
    ):
        code, _, said = run("place", graph, *CLUSTER, f"--device_map={given}", *flags)
        assert (code, message in said) == (2, True)


def test_export(run: Run, graph: Path, tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "map.json"
    flags = ("--placement_method=m_etf", "--pin=a=0", "--pin=b=1", "--pin=head=1", "--pin=loss=1")
    assert run("place", graph, *CLUSTER, *flags, "--out", plan)[0] == 0
    code, shown, _ = run("export-device-map", graph, plan, "--out", out)
    assert code == 0
    assert json.loads(out.read_text()) == {"a": 0, "b": 1, "head": 1}
    assert "kept            100.0% of the plan's compute time, 100.0% of its parameters and states" in shown
    code, shown, _ = run("export-device-map", graph, plan, "--json")
    found = json.loads(shown)
    assert found["device_map"] == {"a": 0, "b": 1, "head": 1}
    assert found["predicted_step_us"] == found["plan_step_us"]
    assert (found["violations"], found["kept_time"]) == ([], 1.0)
    code, shown, _ = run("place", graph, *CLUSTER, "--placement_method=expert", f"--device_map={out}", "--json")
    assert (code, json.loads(shown)["placement"]) == (0, json.loads(plan.read_text())["placement"])


def test_export_of_what_is_split_below_modules(run: Run, graph: Path, tmp_path: Path) -> None:
    """An update far from its module's op costs what the map keeps; memory that the map does not keep is said."""
    plan = tmp_path / "plan.json"
    assert run("place", graph, *CLUSTER, "--placement_method=single", "--out", plan)[0] == 0
    value = json.loads(plan.read_text())
    value["placement"]["head"] = value["placement"]["loss"] = 1
    value["cluster"]["devices"][0]["memory_bytes"] = 10
    write(plan, value)
    found = json.loads(run("export-device-map", graph, plan, "--json")[1])
    assert found["device_map"] == {"a": 0, "b": 0, "head": 1}
    assert found["violations"]
    value["placement"] |= {"loss": 0}
    write(plan, value)
    found = json.loads(run("export-device-map", graph, plan, "--json")[1])
    assert found["kept_time"] == pytest.approx(1 - 5 / 465)


def test_export_needs_modules(run: Run, tmp_path: Path) -> None:
    graph = write(tmp_path / "graph.json", {"nodes": [{"id": "a", "compute_us": 1}], "edges": []})
    assert run("place", graph, *CLUSTER, "--out", tmp_path / "plan.json")[0] == 0
    code, _, said = run("export-device-map", graph, tmp_path / "plan.json")
    assert (code, "don't say which modules they come from" in said) == (1, True)
