"""`baechi simulate`: what a plan is worth, also a broken one, also on other devices."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.files import a_graph, write

Run = Callable[..., tuple[int, str, str]]


def simulated(run: Run, *argv: object) -> dict[str, Any]:
    code, out, err = run("simulate", *argv, "--json")
    assert (code, "error" in err) == (0, False), err  # a machine at work may show progress there
    return {key: value for key, value in json.loads(out).items() if key not in ("schema_version", "kind", "command", "versions")}


def test_json(run: Run, graph: Path, plan: Path) -> None:
    # a 0-10 and b 10-20 on x; a's 4 bytes take 10-14 to y, where c runs 14-24.
    value = simulated(run, graph, plan)
    assert value.pop("lower_bound_us") == pytest.approx(24)  # c on another device than a waits for its bytes
    assert value == {
        "makespan_us": 24,
        "busy_us": [20, 10],
        "peak_memory_bytes": [24, 14],
        "transfers": 1,
        "bytes_moved": 4,
        "violations": [],
        "notes": [],
    }


def test_the_table(run: Run, graph: Path, plan: Path) -> None:
    code, out, _ = run("simulate", graph, plan)
    assert code == 0
    assert [" ".join(line.split()) for line in out.splitlines()[:-1]] == [
        "predicted step 24 us",
        "lower bound 24 us (the step is 0.0% above it)",
        "transfers 1 (4 B)",
        "violations none",
        "device ops busy peak memory limit",
        "x 2 83% 24 B 100 B",
        "y 1 42% 14 B 100 B",
    ]


def test_other_costs_are_no_other_graph(run: Run, tmp_path: Path, plan: Path) -> None:
    slower = write(tmp_path / "slower.json", a_graph(c={"compute_us": 50}))
    assert simulated(run, slower, plan)["makespan_us"] == 64


def test_devices_that_are_called_otherwise_now_are_one_row(run: Run, graph: Path, plan: Path, tmp_path: Path) -> None:
    renamed = json.loads(plan.read_text())
    for device, name in zip(renamed["cluster"]["devices"], ("p", "q"), strict=True):
        device["name"] = name
    code, out, _ = run("diff", plan, write(tmp_path / "renamed.json", renamed), f"--graph={graph}")
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0
    assert "x, now p 2 ops, 83% busy, 24 B of 100 B 2 ops, 83% busy, 24 B of 100 B" in rows
    assert "y, now q 1 op, 42% busy, 14 B of 100 B 1 op, 42% busy, 14 B of 100 B" in rows


def test_a_plan_that_was_made_with_other_costs(run: Run, graph: Path, tmp_path: Path) -> None:
    """Its own step is another one then. On another cluster it is as well, but that is no news."""
    plan, slower = tmp_path / "p.json", write(tmp_path / "slower.json", a_graph(c={"compute_us": 50}))
    assert run("place", graph, "--num_devices=2", "--comm_cost_coeffs=1,0", "--placement_method=m_etf", f"--out={plan}")[0] == 0
    said = json.loads(plan.read_text())["predicted_step_us"]
    faster_links, asked = "--comm_cost_coeffs=0,0", ("simulate", slower, plan)
    for flags in ([], [faster_links], ["--comm_cost_factor=3"]):
        assert simulated(run, graph, plan, *flags)["notes"] == []
        (note,) = simulated(run, slower, plan, *flags)["notes"]
        assert note.startswith(f"the plan was made with other costs: its file says a step of {said:g} us, on this graph it takes 64 us; ")
        code, out, _ = run(*asked, *flags)
        assert (code, " ".join(out.split()).count(f"note {note}")) == (0, 1)
    for op in ([], ["c"]):
        assert json.loads(run("explain", plan, *op, f"--graph={graph}", "--json")[1])["notes"] == []
        assert json.loads(run("explain", plan, *op, f"--graph={slower}", faster_links, "--json")[1])["notes"] == [note]
        assert f"Note: {note}." in run("explain", plan, *op, f"--graph={slower}")[1]
    assert json.loads(run("diff", plan, plan, f"--graph={graph}", "--json")[1])["notes"] == []
    assert json.loads(run("diff", plan, plan, f"--graph={slower}", "--json")[1])["notes"] == [f"A: {note}", f"B: {note}"]
    assert f"Note: B: {note}." in run("diff", plan, plan, f"--graph={slower}")[1]


def test_a_priority_in_the_file_counts(run: Run, graph: Path, plan: Path, tmp_path: Path) -> None:
    value = json.loads(plan.read_text())
    value["placement"] = {"a": 0, "b": 0, "c": 0}
    for order, last in (({"a": 0, "b": 1, "c": 2}, [20, 30]), ({"a": 0, "b": 2, "c": 1}, [30, 20])):
        path = write(tmp_path / "p.json", {**value, "priority": order})
        assert simulated(run, graph, path)["makespan_us"] == max(last)


def test_broken_rules_are_listed_and_the_plan_is_simulated(run: Run, tmp_path: Path, plan: Path) -> None:
    heavy = write(tmp_path / "heavy.json", a_graph(b={"persistent_bytes": 95}))
    value = simulated(run, heavy, plan)
    assert value["makespan_us"] == 24
    assert value["violations"] == ["device 'x' needs 109 bytes and has 100"]
    code, out, _ = run("simulate", heavy, plan)
    assert code == 0
    assert "violations      device 'x' needs 109 bytes and has 100" in out


def test_a_split_group_is_listed(run: Run, tmp_path: Path, plan: Path) -> None:
    split = write(tmp_path / "split.json", a_graph(a={"colocation": "g"}, c={"colocation": "g"}))
    value = json.loads(plan.read_text())
    del value["op_digests"]  # colocation is part of an op's digest; another program writes none
    path = write(tmp_path / "foreign.json", value)
    assert simulated(run, split, path)["violations"] == ["colocation group 'g' is split over devices 0, 1"]


# Other devices


def test_a_step_beyond_all_numbers_is_refused(run: Run, graph: Path, plan: Path) -> None:
    code, out, err = run("simulate", graph, plan, "--comm_cost_coeffs=1e308,1e308", "--json")
    assert (code, out) == (1, "")
    assert "the step takes longer than can be said in numbers" in err


def test_links_and_memory_can_be_overridden(run: Run, graph: Path, plan: Path) -> None:
    assert simulated(run, graph, plan, "--comm_cost_coeffs=2,5")["makespan_us"] == 33
    assert simulated(run, graph, plan, "--device_memory=20")["violations"] == ["device 'x' needs 24 bytes and has 20"]
    _, out, _ = run("simulate", graph, plan, "--device_memory=20")
    assert out.startswith("The plan could not be run so: device 'x' needs 24 bytes and has 20.\nThe step would take ")
    assert simulated(run, graph, plan, "--memory_fraction=0.2")["violations"] == ["device 'x' needs 24 bytes and has 20"]
    assert len(simulated(run, graph, plan, "--num_devices=3")["busy_us"]) == 3
    assert simulated(run, graph, plan, "--num_devices=3")["makespan_us"] == 24  # the plan's own default link


def test_so_many_devices_send_as_the_plans_own_do(run: Run, tmp_path: Path, plan: Path) -> None:
    """Transfers of a's 50 bytes, from 10 on, and of b's, from 20 on: the latter do not wait for the former."""
    graph = write(tmp_path / "g.json", a_graph(edges=[("a", "c", 50), ("b", "c", 50)]))
    value = {key: found for key, found in json.loads(plan.read_text()).items() if key != "op_digests"}
    value["cluster"]["parallel_transfers"] = True
    parallel = write(tmp_path / "parallel.json", value)
    assert simulated(run, graph, parallel)["makespan_us"] == 80
    assert simulated(run, graph, parallel, "--num_devices=2")["makespan_us"] == 80


def test_a_cluster_file_replaces_the_plans_cluster(run: Run, graph: Path, plan: Path, tmp_path: Path) -> None:
    slow = {"devices": [{"name": "p", "speed": 0.5}, {"name": "q"}], "links": {"default": {"us_per_byte": 0, "latency_us": 0}}}
    assert simulated(run, graph, plan, "--cluster", write(tmp_path / "c.json", slow))["makespan_us"] == 40
    value = json.loads(plan.read_text())
    del value["cluster"]
    bare = write(tmp_path / "bare.json", value)
    assert simulated(run, graph, bare, "--cluster", tmp_path / "c.json")["makespan_us"] == 40


# What if


def test_a_change_is_set_beside_the_plan(run: Run, graph: Path, plan: Path) -> None:
    value = simulated(run, graph, plan, "--comm_cost_factor=2.5")
    assert (value["makespan_us"], value["before"]["makespan_us"]) == (30, 24)
    code, out, _ = run("simulate", graph, plan, "--comm_cost_factor=2.5")
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "The step would take 30 us instead of 24 us: +25.0%."
    assert "step 24 us 30 us" in lines
    assert "before" not in simulated(run, graph, plan, "--comm_cost_factor=1")


def test_another_cluster_is_set_beside_the_plans_own(run: Run, graph: Path, plan: Path) -> None:
    assert simulated(run, graph, plan, "--comm_cost_coeffs=2,5")["before"]["makespan_us"] == 24
    assert "before" not in simulated(run, graph, plan, "--device_memory=100")


def test_ops_elsewhere(run: Run, tmp_path: Path, graph: Path, plan: Path) -> None:
    value = simulated(run, graph, plan, "--pin=c=x")
    assert (value["makespan_us"], value["transfers"], value["before"]["transfers"]) == (30, 0, 1)
    assert simulated(run, graph, plan, "--pin=[bc]=y", "--pin=a=1")["busy_us"] == [0, 30]
    assert "before" not in simulated(run, graph, plan, "--pin=c=y")  # where it is
    code, _, err = run("simulate", graph, plan, "--pin=c=z")
    assert (code, err) == (2, "error: the pin 'c=z' names no device; there are 0 to 1: x, y\n")
    grouped = write(tmp_path / "grouped.json", a_graph(b={"colocation": "g"}, c={"colocation": "g"}))
    value = json.loads(plan.read_text())
    del value["op_digests"]
    value["placement"] = {"a": 0, "b": 0, "c": 0}
    moved = simulated(run, grouped, write(tmp_path / "p.json", value), "--pin=c=y")
    assert (moved["busy_us"], moved["violations"]) == ([10, 20], [])


def test_wrong_costs(run: Run, graph: Path, plan: Path) -> None:
    value = simulated(run, graph, plan, "--cost_factor=3", "--seed=5")
    assert 24 < value["makespan_us"] < 72
    assert value == simulated(run, graph, plan, "--cost_factor=3", "--seed=5")
    assert value["makespan_us"] != simulated(run, graph, plan, "--cost_factor=3", "--seed=6")["makespan_us"]
