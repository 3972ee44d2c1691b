"""`baechi export`: a plan in other programs' formats, read back as these programs would read it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

from baechi_ext.ir import OpGraph, Plan
from baechi_ext.simulate import simulate
from baechi_runtime.report.palette import device_colour
from tests.cli.files import write

Run = Callable[..., tuple[int, str, str]]
STRING = r'"(?:[^"\\]|\\.)*"'


def layers(modules: list[str]) -> dict[str, Any]:
    """One forward op a module, in a chain, a loss, and a backward op each."""
    nodes = [{"id": f"f{i}", "compute_us": 10.0, "module": m} for i, m in enumerate(modules)] + [{"id": "loss", "compute_us": 1.0}]
    nodes += [{"id": f"b{i}", "phase": "backward", "compute_us": 20.0, "module": m, "forward_op": f"f{i}"} for i, m in enumerate(modules)]
    names = [*(f"f{i}" for i in range(len(modules))), "loss", *(f"b{i}" for i in reversed(range(len(modules))))]
    pairs = list(zip(names, names[1:], strict=False))
    return {"nodes": nodes, "edges": [{"source": a, "target": b, "bytes": 2048} for a, b in pairs]}


def exported(run: Run, tmp_path: Path, modules: list[str], devices: list[int], kind: str) -> tuple[int, str, str, Path]:
    graph = write(tmp_path / "graph.json", layers(modules))
    placement = {f"{phase}{i}": d for i, d in enumerate(devices) for phase in "fb"} | {"loss": 0}
    cluster = {"devices": [{"name": f'gpu "{i}"'} for i in range(3)], "links": {"default": {"us_per_byte": 0.001, "latency_us": 1}}}
    plan = write(tmp_path / "plan.json", {"cluster": cluster, "placement": placement})
    out = tmp_path / "out"
    return *run("export", graph, plan, f"--format={kind}", f"--out={out}"), out


@pytest.mark.parametrize(
    ("modules", "devices", "spec"),
    [
        (["l.0", "l.1", "l.2", "head"], [0, 0, 1, 1], {"l.2": "BEGINNING"}),
        (["l.0.a", "l.0.b", "l.1.a", "l.1.b"], [2, 2, 0, 0], {"l.1": "BEGINNING"}),
        (["l.0.a", "l.0.b", "l.1.a", "l.1.b"], [0, 1, 1, 2], {"l.0.b": "BEGINNING", "l.1.b": "BEGINNING"}),
        (["a", "b"], [1, 1], {}),
        (["a", "", "b"], [0, 1, 1], {"b": "BEGINNING"}),
        (["l.0", "act", "l.1", "act", "head"], [0, 0, 1, 1, 1], {"l.1": "BEGINNING"}),
        (["l.0.a", "l.1.a", "l.2", "l.1.b", "head"], [0, 1, 1, 1, 1], {"l.1.a": "BEGINNING"}),
        (["", "a", "b"], [1, 0, 1], {"b": "BEGINNING"}),
    ],
)
def test_split_spec(run: Run, tmp_path: Path, modules: list[str], devices: list[int], spec: dict[str, str]) -> None:
    code, said, err, out = exported(run, tmp_path, modules, devices, "split_spec")
    assert (code, json.loads(out.read_text())) == (0, spec), err
    assert said.count("stage") == len(spec) + 1


@pytest.mark.parametrize(
    ("modules", "devices", "why"),
    [
        (["a", "b", "c"], [0, 1, 0], "module 'c' is on device 0 again, after 'b' on device 1"),
        (["a", "a", "b"], [0, 1, 1], "op 'f1', inside module 'a', is on device 1, and what runs before it there is on another"),
        (["l.0", "l.1", "l.0"], [0, 1, 2], "op 'f2', inside module 'l.0', is on device 2"),
        (["a", "act", "b", "act"], [0, 1, 1, 1], "op 'f1', inside module 'act', is on device 1, and what begins there runs again"),
    ],
)
def test_what_is_no_chain_of_modules_is_refused(run: Run, tmp_path: Path, modules: list[str], devices: list[int], why: str) -> None:
    code, said, err, out = exported(run, tmp_path, modules, devices, "split_spec")
    assert (code, said, out.exists()) == (1, "", False)
    assert f"the plan is not a chain of modules: {why}" in err
    assert "--format=device_map takes any plan" in err


def test_networkx_reads_node_link(run: Run, tmp_path: Path) -> None:
    code, _, err, out = exported(run, tmp_path, ["a", "b"], [0, 1], "node_link")
    assert code == 0, err
    read = nx.node_link_graph(json.loads(out.read_text()))
    plan = Plan.load(tmp_path / "plan.json", OpGraph.load(tmp_path / "graph.json"))
    timeline = simulate(plan.graph, plan.cluster, plan.placement, plan.priority)
    assert set(read) == set(plan.graph.index)
    for v, op in enumerate(plan.graph.ops):
        node = read.nodes[op.id]
        found = (node["device"], node["device_name"], node["start_us"], node["end_us"])
        assert found == (plan.placement[v], f'gpu "{plan.placement[v]}"', timeline.start_us[v], timeline.end_us[v])
    assert list(read.edges) == [(*ends, 0) for ends in zip(["f0", "f1", "loss", "b1"], ["f1", "loss", "b1", "b0"], strict=True)]
    assert OpGraph.load(out).ops == plan.graph.ops  # a graph file still


def statements(dot: str) -> list[str]:
    """The statements of a DOT text; fails where one does not keep to the grammar of what is written."""
    name = re.match(rf"// baechi export .*\ndigraph {STRING} {{\n", dot)
    assert name is not None
    lines = dot[name.end() :].splitlines()
    assert lines[-1] == "}"
    for line in lines[1:-1]:
        bare = re.sub(STRING, "S", line)
        assert re.fullmatch(r"  S(?: -> S)?(?: \[\w+=[\w]+(?:, \w+=\w+)*\])?;", bare), line
    return lines[1:-1]


def test_dot_is_escaped_and_coloured_by_device(run: Run, tmp_path: Path) -> None:
    evil = 'x"]; y [label="\\'
    graph = {"nodes": [{"id": evil, "compute_us": 1, "op": "a\nb\x1b"}, {"id": "z", "compute_us": 1}], "edges": []}
    graph["edges"] = [{"source": evil, "target": "z", "bytes": 4096}]
    cluster = {"devices": [{"name": "p"}, {"name": "q"}], "links": {"default": {"us_per_byte": 1, "latency_us": 0}}}
    plan = {"cluster": cluster, "placement": {evil: 0, "z": 1}}
    code, out, err = run("export", write(tmp_path / "g.json", graph), write(tmp_path / "p.json", plan), "--format=dot", "--json")
    assert code == 0, err
    lines = statements(json.loads(out)["dot"])
    assert len(lines) == 5  # two devices, two ops, one tensor
    strings = [json.loads(s) for s in re.findall(STRING, "\n".join(lines[2:])) if "\x1b" not in s]
    assert f"op {evil}" in strings
    assert [device_colour(d) in line for line in lines[2:4] for d in (0, 1)] == [True, False, False, True]
    assert 'style=bold, label="4 KiB"' in lines[4]
    assert all(c.isprintable() or c == "\n" for c in json.loads(out)["dot"])


def test_the_device_map_is_that_of_its_own_command(run: Run, tmp_path: Path) -> None:
    code, said, _, out = exported(run, tmp_path, ["a", "b"], [0, 1], "device_map")
    other = tmp_path / "other.json"
    again, told, _ = run("export-device-map", tmp_path / "graph.json", tmp_path / "plan.json", f"--out={other}")
    assert (again, told.splitlines()[:-1]) == (code, said.replace(str(out), str(other)).splitlines()[:-1])
    assert out.read_bytes() == other.read_bytes()
    assert json.loads(out.read_text()) == {"a": 0, "b": 1}


def test_an_unknown_format_lists_the_known(run: Run) -> None:
    code, _, err = run("export", "g", "p", "--format=svg")
    assert (code, "choose one of device_map, split_spec, dot, node_link" in err) == (2, True)
