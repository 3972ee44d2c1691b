"""`baechi explain` and `baechi diff`: what they say, and where they find a plan's graph."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from baechi_ext.ir import files
from tests.cli.files import ROOT, a_graph, write

LINK = {"us_per_byte": 1, "latency_us": 0}
Run = Callable[..., tuple[int, str, str]]


def changed(plan: Path, name: str, **fields: Any) -> Path:
    """Another plan file beside one, with other fields; those that are None are left out."""
    value = {**json.loads(plan.read_text()), **fields}
    return write(plan.parent / name, {key: v for key, v in value.items() if v is not None})


def on_groups(folder: Path, name: str = "groups.json", share: float = 0.5) -> Path:
    """A plan file of the graph on two groups of two devices, which have so much of each op to do."""
    devices = [{"name": name} for name in "pqrs"]
    cluster = {"devices": devices, "links": {"default": LINK}}
    shard = {v: {"node": v, "splits": {"rows": 2}, "compute_share": share} for v in "abc"}
    placement = {"a": 0, "b": 0, "c": 2}
    return write(folder / name, {"cluster": cluster, "placement": placement, "device_groups": [[0, 1], [2, 3]], "shard": shard})


def said(run: Run, *argv: object) -> list[str]:
    """But for who made it."""
    code, out, err = run(*argv)
    assert code == 0, err
    return [" ".join(line.split()) for line in out.splitlines()[:-1] if line.strip()]


def parsed(run: Run, *argv: object) -> dict[str, Any]:
    code, out, err = run(*argv, "--json")
    assert code == 0, err
    return {key: value for key, value in json.loads(out).items() if key not in ("command", "versions")}


def test_the_page_shows_what_the_commands_print(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.split(r"^    \$ ", (ROOT / "docs" / "explain.md").read_text(), flags=re.MULTILINE)[1:]
    shown = {command: [line[4:].rstrip() for line in takewhile(indented, lines)] for command, *lines in map(str.splitlines, blocks)}
    name, _, graph = next(iter(shown)).partition("=")
    assert name == "G"
    checked = 0
    for command, expected in list(shown.items())[1:]:
        program, *argv = shlex.split(command.replace("$G", str(ROOT / graph)))
        code, out, err = run(*argv)
        assert (program, code) == ("baechi", 0), err
        printed = iter([line.rstrip() for line in out.splitlines()])
        for line in expected:
            if line in ("", "..."):
                continue
            assert line in printed, f"{command}: {line!r} does not follow"
            checked += 1
    assert checked > 30


def indented(line: str) -> bool:
    return not line or line.startswith("    ")


# Explain: a 0-10 and b 10-20 on x; a's 4 bytes take 10-14 to y, where c runs 14-24.


def test_what_bounds_a_step(run: Run, graph: Path, plan: Path) -> None:
    lines = said(run, "explain", plan)
    assert lines[0] == (
        "The step is 42% compute on x, along its critical path of 24 us; the rest of it is 42% compute on y, 17% transfers."
    )
    assert lines[1].startswith("Along what the last op depends on, 100% is compute and transfers, 0% waiting")
    assert "a x y 4 B 4 us 0 us -16.7%" in lines
    assert "x 83% 0% 0% 0% 17% 24 B 100 B its own tensors" not in lines  # its parameters are more
    assert "y 0 us 14 us c a x 10 us 0 us 4 us" in lines
    assert not any(line.startswith("Every device") for line in lines)
    assert lines[-1].startswith("What would change it: links that take no time -16.7%; links twice as fast -8.3%; ")


def test_a_step_that_waits_for_its_host(run: Run, graph: Path, plan: Path) -> None:
    write(graph, a_graph(a={"issue_us": 40}, b={"issue_us": 8}))
    lines = said(run, "explain", plan)
    assert lines[0] == (
        "The step is 50% waiting for the host, along its critical path of 48 us; the rest of it is 21% compute on x, 21% compute on y, "
        "8% transfers."
    )
    assert lines[1].endswith(" 0% for busy links, 50% for the host.")
    assert "waiting for the host on y 24 us 50%" in lines


def test_the_same_for_a_program(run: Run, graph: Path, plan: Path) -> None:
    value = parsed(run, "explain", plan)
    assert (value["step_us"], value["devices"]) == (24, ["x", "y"])
    assert [(p["kind"], p["device"], p["us"]) for p in value["critical_path"]["parts"]] == [
        ("compute", 0, 10),
        ("compute", 1, 10),
        ("transfer", 0, 4),
    ]
    assert value["transfers"]["by_gain"][0]["gain_us"] == 4
    assert value["memory"][0]["by_kind_bytes"]["persistent"] == 20


def test_why_an_op_is_where_it_is(run: Run, graph: Path, plan: Path) -> None:
    lines = said(run, "explain", plan, "c")
    assert lines[0] == "c is on y: on x, the best other device, the step would take 30 us, +25.0%."
    assert "runs for 10 us, 10 us of it on the critical path" in lines
    assert "x 30 us +25.0% yes 34 B 100 B 0 0 B" in lines
    assert "y 24 us (here) yes 14 B 100 B 1 4 B" in lines
    assert parsed(run, "explain", plan, "[ab]")["on_devices"] == [2, 0]


def test_a_plans_pins_are_those_of_its_file(run: Run, graph: Path, tmp_path: Path) -> None:
    """They are in no graph file. On devices that lack theirs nothing is pinned."""
    out = tmp_path / "pinned.json"
    assert run("place", graph, "--num_devices=2", "--placement_method=m_etf", "--pin=a=device:0", "--pin=b=1", f"--out={out}")[0] == 0
    asked = ("explain", out, "b", f"--graph={graph}")
    assert said(run, *asked)[0] == "b is on device:1: pinned to device:1."
    assert [parsed(run, "explain", out, op, f"--graph={graph}")["pin"] for op in "abc"] == [0, 1, None]
    named = write(tmp_path / "cluster.json", {"devices": [{"name": "p"}, {"name": "q"}], "links": {"default": LINK}})
    assert parsed(run, *asked, f"--cluster={named}")["pin"] is None
    for pins in (["b"], ["z=1"], ["b=0"], [5], "b=1", {"b": 1}):
        assert parsed(run, "explain", changed(out, "other.json", options={"pins": pins}), "b", f"--graph={graph}")["pin"] is None


def test_a_balanced_step(run: Run, graph: Path, plan: Path) -> None:
    both = changed(plan, "both.json", placement={"a": 0, "b": 0, "c": 0})
    lines = said(run, "explain", both, "--num_devices=1")
    assert lines[0] == "The step is 100% compute on device:0, along its critical path of 30 us."
    even = write(plan.parent / "even.json", a_graph(edges=(), a={"compute_us": 20}))
    apart = changed(plan, "apart.json", op_digests=None, placement={"a": 0, "b": 1, "c": 1})
    lines = said(run, "explain", apart, f"--graph={even}")
    assert lines[1] == "Every device computes for at least 100% of it: only more or faster devices would shorten it much."
    assert lines[-1] == "What would change it: all devices 10% faster -9.1%."


def test_devices_that_send_and_receive_are_busy_and_cheaper_transfers_would_shorten_the_step(tmp_path: Path, run: Run) -> None:
    """Each device has an op of 10 us, sends to the other one, receives and has another op: 220 us, all of them busy."""
    edges = [{"source": v, "target": w, "bytes": 0} for v, w in ("ad", "bc")]
    write(tmp_path / "graph.json", {"nodes": [{"id": v, "compute_us": 10} for v in "abcd"], "edges": edges})
    link = {**LINK, "send_us": 100, "receive_us": 100}
    cluster = {"devices": [{"name": "x"}, {"name": "y"}], "links": {"default": link}}
    plan = write(tmp_path / "plan.json", {"cluster": cluster, "placement": {"a": 0, "b": 1, "c": 0, "d": 1}})
    value = parsed(run, "explain", plan)
    assert (value["step_us"], [idle["idle_us"] for idle in value["idle"]]) == (220, [0, 0])
    assert not [line for line in said(run, "explain", plan) if "only more or faster devices" in line]
    assert "runs for 110 us, 110 us of it on the critical path" in said(run, "explain", plan, "d")


def test_many_devices(run: Run, graph: Path, plan: Path) -> None:
    lines = said(run, "explain", plan, "--num_devices=20")
    assert "the 16 busiest of 20 devices" in lines
    assert sum(line.startswith("device:") for line in lines) == 16 + 1 + 2  # devices, gaps, what-ifs
    lines = said(run, "explain", plan, "c", "--num_devices=20")
    assert sum(line.startswith("device:") for line in lines) == 16
    assert any(line.startswith("device:1 24 us (here)") for line in lines)
    wide = changed(plan, "wide.json", cluster={"devices": [{"name": f"d{i}"} for i in range(20)], "links": {"default": LINK}})
    assert "4 more devices" in said(run, "diff", wide, changed(wide, "moved.json", placement={"a": 0, "b": 0, "c": 2}))


def test_transfers_that_were_not_tried_are_not_said_to_cost_nothing(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"n{i}" for i in range(13)]
    edges = [{"source": a, "target": b, "bytes": 4} for a, b in zip(names, names[1:], strict=False)]
    graph = write(tmp_path / "g.json", {"nodes": [{"id": name, "compute_us": 10} for name in names], "edges": edges})
    cluster = {"devices": [{"name": "p"}, {"name": "q"}], "links": {"default": {"us_per_byte": 0, "latency_us": 0}}}
    plan = write(tmp_path / "p.json", {"cluster": cluster, "placement": {name: i % 2 for i, name in enumerate(names)}})
    explained = ("explain", plan, f"--graph={graph}")
    assert "longest of 12 transfers, of which none holds the step up by itself" in said(run, *explained)
    monkeypatch.setattr("baechi_ext.explain.sensitivity.OPS_TRIED", 0)
    assert "longest of 12 transfers; of 10 that were tried none holds the step up by itself" in said(run, *explained)


def test_memory_that_is_short_is_said(run: Run, graph: Path, plan: Path) -> None:
    lines = said(run, "explain", plan, "--device_memory=25")
    assert lines[2] == "x is short of memory: its peak is 96% of 25 B at 0 us, 20 B of it parameters."


def test_a_run_folder_is_enough(run: Run, graph: Path, plan: Path, tmp_path: Path) -> None:
    assert parsed(run, "explain", tmp_path) == parsed(run, "explain", plan)


def test_a_plan_whose_graph_is_elsewhere(run: Run, graph: Path, plan: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    moved = plan.rename(tmp_path / "other" / "plan.json")
    assert "cannot read plan file" in run("explain", plan, "--graph", graph)[2]
    assert "cannot read plan file" in run("explain", tmp_path / "other" / "plan")[2]
    code, out, err = run("explain", moved)
    assert (code, out) == (1, "")
    where = "there is no graph.json beside it; name the graph's file: --graph=FILE"
    assert err == f"error: {moved}: a plan is explained with its graph, and {where}\n"
    assert parsed(run, "explain", moved, f"--graph={graph}")["step_us"] == 24
    assert run("explain", tmp_path / "absent.json", f"--graph={graph}")[0] == 1


def test_names_that_nothing_has(run: Run, graph: Path, plan: Path) -> None:
    code, _, err = run("explain", plan, "encoder")
    assert code == 2
    assert err.startswith("error: 'encoder' matches nothing: no module, parameter, op or colocation group of the graph is called so")


def test_a_plan_on_groups_is_explained_by_group(run: Run, graph: Path, tmp_path: Path) -> None:
    groups = on_groups(tmp_path)
    value = parsed(run, "explain", groups)
    assert (value["devices"], value["step_us"]) == (["p+q", "r+s"], parsed(run, "simulate", graph, groups)["makespan_us"])
    assert len(parsed(run, "explain", groups, "c")["choices"]) == 2
    assert "not on other devices or links" in run("explain", groups, "--comm_cost_coeffs=1,1")[2]


def test_a_name_is_text_and_no_markup(run: Run, tmp_path: Path, plan: Path) -> None:
    value = json.loads(json.dumps(a_graph()).replace('"c"', '"[red]c"'))
    path = write(tmp_path / "marked.json", value)
    other = changed(plan, "marked_plan.json", placement={"a": 0, "b": 0, "[red]c": 1}, op_digests=None)
    assert any("[red]c" in line for line in said(run, "explain", other, f"--graph={path}"))


# Diff


def test_two_plans(run: Run, graph: Path, plan: Path) -> None:
    other = changed(plan, "other.json", placement={"a": 0, "b": 1, "c": 1})
    lines = said(run, "diff", plan, other)
    assert lines[0] == (
        "B takes 34 us, A 24 us (+41.7%): 1 of 3 ops moved (33% of the compute, 10 B of parameters)."
    )
    assert "step 24 us 34 us" in lines
    assert "x 2 ops, 83% busy, 24 B of 100 B 1 op, 29% busy, 14 B of 100 B" in lines
    assert "test x y 1 3 10 us 10 B" in lines
    value = parsed(run, "diff", plan, other)
    assert [move["op"] for move in value["moved"]] == ["b"]
    assert (value["before"]["makespan_us"], value["after"]["makespan_us"]) == (24, 34)


def test_plan_files_are_read_for_their_kind_and_their_plan(run: Run, graph: Path, plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other, read, original = changed(plan, "other.json", placement={"a": 0, "b": 0, "c": 0}), [], files.parse_json
    monkeypatch.setattr(files, "parse_json", lambda text, path, kind: read.append(Path(path)) or original(text, path, kind))
    assert run("diff", plan, other, "--graph", graph)[0] == 0
    assert sorted(path for path in read if path != graph) == sorted([plan, other] * 2)


def test_equal_plans(run: Run, graph: Path, plan: Path) -> None:
    assert said(run, "diff", plan, plan.parent) == [
        "The plans are the same: every op is on the same device, and each device runs its ops in the same order."
    ]
    assert parsed(run, "diff", plan, plan)["same"] is True


def test_what_the_difference_comes_from(run: Run, graph: Path, plan: Path) -> None:
    # A: a 0-10, b 10-20, on y c 14-24. B: b before c on x, c from 20 on; a alone on y, so that x waits for its bytes.
    first = changed(plan, "first.json", priority={"a": 0, "b": 1, "c": 2}, placement={"a": 0, "b": 0, "c": 0})
    second = changed(plan, "second.json", priority={"a": 0, "b": 2, "c": 1}, placement={"a": 1, "b": 0, "c": 0})
    lines = said(run, "diff", first, second)
    assert lines[0].endswith("10 B of parameters), 1 of the others changed its place in its device's order.")
    assert "B's placement with A's priorities: +13.3%; A's placement with B's priorities: no change." in lines
    assert "Only A has priorities." in said(run, "diff", first, plan)


def test_devices_that_change_places(run: Run, graph: Path, plan: Path) -> None:
    other = changed(plan, "other.json", placement={"a": 1, "b": 1, "c": 0})
    assert "The devices are alike: with B's x as y, y as x, only 0 of the ops would have moved." in said(run, "diff", plan, other)


def test_plans_on_groups_and_on_devices(run: Run, graph: Path, plan: Path, tmp_path: Path) -> None:
    groups = on_groups(tmp_path)
    assert said(run, "diff", groups, groups)[0].startswith("The plans are the same")
    lines = said(run, "diff", groups, on_groups(tmp_path, "others.json", 0.75))
    assert lines[0] == "B takes 19 us, A 14 us (+35.7%): no op moved."
    assert "3 ops have other costs: the devices of a group split them in another way." in lines
    lines = said(run, "diff", plan, groups)
    assert "c y r+s 1 3 10 us 10 B" not in lines
    assert "device 'x' is called 'p+q'" in lines


def test_a_plan_of_another_graph(run: Run, graph: Path, plan: Path) -> None:
    other = changed(plan, "other.json", placement={"a": 0, "b": 1}, op_digests=None)
    code, out, err = run("diff", plan, other)
    assert (code, out) == (1, "")
    assert "the first op that differs is 'c'" in err


def test_letters_that_stdout_has_not_are_escaped(tmp_path: Path, plan: Path) -> None:
    write(tmp_path / "graph.json", a_graph(edges=[("a", "\xe4", 4)], b={"id": "\xe4"}))
    other = changed(plan, "other.json", placement={"a": 0, "\xe4": 1, "c": 0}, op_digests=None)
    line, ascii_ = [sys.executable, "-m", "baechi_ext", "explain", str(other)], {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False, env=ascii_)
    assert done.returncode == 0, done.stderr
    assert "\\xe4" in done.stdout


@pytest.mark.parametrize("command", ["explain", "diff"])
def test_as_a_process(command: str, graph: Path, plan: Path) -> None:
    plans = [str(plan)] * (2 if command == "diff" else 1)
    done = subprocess.run([sys.executable, "-m", "baechi_ext", command, *plans], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The ")
