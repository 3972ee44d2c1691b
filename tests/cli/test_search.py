"""`baechi place` with a search: where it starts, what it says, and what Ctrl-C leaves."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baechi_ext.ir import OpGraph, Plan
from tests.cli.files import ROOT, a_graph, write
from tests.processes import children_of

Run = Callable[..., tuple[int, str, str]]


def tangle(n: int) -> dict[str, Any]:
    """A graph on which a search has something to do for long."""
    rng = random.Random(n)
    nodes = [{"id": v, "compute_us": 100 * rng.paretovariate(1.3)} for v in range(n)]
    edges = sorted({(rng.randrange(max(0, v - 40), v), v) for v in range(1, n) for _ in range(2)})
    return {"nodes": nodes, "edges": [{"source": u, "target": v, "bytes": 1} for u, v in edges]}


@pytest.fixture
def tangled(tmp_path: Path) -> Path:
    return write(tmp_path / "tangle.json", tangle(400))


def interrupted(*argv: object, processes: int = 0) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line that gets SIGINT as soon as its search says how it goes.

    By then it has started so many processes; by the end none may be left.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "baechi_ext", *map(str, argv)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        said = ""
        for line in process.stderr:
            said += line
            if line.startswith("  best "):
                break
        started = children_of(process.pid)
        process.send_signal(signal.SIGINT)
        out, rest = process.communicate(timeout=60)
    assert len(started) == processes
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)
    return process.returncode, out, said + rest


def test_ctrl_c_writes_the_best_plan_so_far(tangled: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    code, shown, said = interrupted("place", tangled, "--num_devices=4", "--time_limit=3600", "--json", "--out", out)
    assert code == 130
    assert said.splitlines()[-1] == "error: interrupted; this is the best plan found until then"
    plan = Plan.load(out, OpGraph.load(tangled))
    assert json.loads(shown)["placement"] == json.loads(out.read_text())["placement"]
    assert plan.method == "auto"
    assert plan.lower_bound_us < plan.predicted_step_us


@pytest.mark.parametrize("ops", [40, 60])
def test_ctrl_c_ends_an_exact_search_and_its_solver(tmp_path: Path, ops: int) -> None:
    """With and without the search beside the solver: ops that nothing binds, on which both have something to do for ever."""
    rng = random.Random(ops)
    unbound = {"nodes": [{"id": v, "compute_us": 100 * rng.random()} for v in range(ops)], "edges": []}
    graph, out = write(tmp_path / "unbound.json", unbound), tmp_path / "plan.json"
    flags = ("--num_devices=3", "--comm_cost_coeffs=0,10", "--time_limit=3600", "--placement_method=exact")
    code, shown, said = interrupted("place", graph, *flags, "--json", "--out", out, processes=1)
    assert (code, said.splitlines()[-1]) == (130, "error: interrupted; this is the best plan found until then")
    assert json.loads(shown)["placement"] == json.loads(out.read_text())["placement"]
    plan = Plan.load(out, OpGraph.load(graph))
    assert (plan.method, plan.status) == ("exact", "feasible")
    assert plan.lower_bound_us < plan.predicted_step_us


def test_a_search_says_best_bound_gap_and_speed(tangled: Path) -> None:
    _, shown, said = interrupted("place", tangled, "--num_devices=4", "--time_limit=3600", "--placement_method=refine")
    news = said.splitlines()[1]
    assert re.fullmatch(r" *best .+, gap .+%, bound .+, \d+ plans/s", news)
    assert "predicted step" in shown


def test_refine_starts_from_a_plan_file(run: Run, tangled: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    cluster = ("--num_devices=3", "--comm_cost_coeffs=0,10")
    assert run("place", tangled, *cluster, "--placement_method=m_topo", "--out", first)[0] == 0
    flags = (*cluster, "--placement_method=refine", f"--initial_plan={first}", "--time_limit=1")
    assert run("place", tangled, *flags, "--out", second)[0] == 0
    before, after = (Plan.load(path, OpGraph.load(tangled)) for path in (first, second))
    assert after.predicted_step_us < before.predicted_step_us
    assert after.options["initial_plan"] == str(first)


def test_a_start_for_a_grouped_graph(run: Run, tmp_path: Path) -> None:
    graph = write(tmp_path / "g.json", a_graph(b={"phase": "backward", "forward_op": "a"}))
    start = write(tmp_path / "p.json", {"placement": {"a": 0, "b": 1, "c": 1}})
    flags = ("--num_devices=2", "--comm_cost_coeffs=0,1", "--only_forward", f"--initial_plan={start}")
    code, out, _ = run("place", graph, *flags, "--json")
    assert code == 0
    assert json.loads(out)["placement"]["a"] == json.loads(out)["placement"]["b"]


def test_an_initial_plan_that_is_of_no_use(run: Run, tangled: Path, graph: Path, plan: Path) -> None:
    code, _, said = run("place", graph, "--num_devices=2", "--placement_method=m_etf", f"--initial_plan={plan}")
    assert (code, "--initial_plan is only for --placement_method=auto and refine" in said) == (2, True)
    code, _, said = run("place", tangled, "--num_devices=2", f"--initial_plan={plan}")
    assert (code, "the plan is of another graph" in said) == (1, True)
    code, _, said = run("place", graph, "--num_devices=1", f"--initial_plan={plan}")
    assert (code, "op 'c' is placed on device 1; expected 0, the only one" in said) == (1, True)


def test_it_is_said_that_splitting_does_not_pay(run: Run, graph: Path) -> None:
    _, out, _ = run("place", graph, "--num_devices=2", "--comm_cost_coeffs=0,1000")
    assert "verdict         splitting does not pay: auto found nothing faster than one device" in out
    for flags in (("--num_devices=1",), ("--num_devices=2", "--placement_method=single"), ("--num_devices=2", "--comm_cost_coeffs=0,1")):
        assert "verdict" not in run("place", graph, *flags)[1]


def test_a_search_that_had_no_time_does_not_say_that_splitting_does_not_pay(run: Run, tmp_path: Path) -> None:
    """The graph is not small: between two ops there are many others, and on another device each has to wait for two transfers."""
    nodes = [{"id": f"n{v}", "compute_us": 1} for v in range(1200)]
    edges = [{"source": a, "target": b, "bytes": 1} for v in range(1, 1199) for a, b in (("n0", f"n{v}"), (f"n{v}", "n1199"))]
    graph = write(tmp_path / "wide.json", {"nodes": nodes, "edges": edges})
    request = ("place", graph, "--num_devices=2", "--comm_cost_coeffs=0,600")
    for grouping in ((), ("--only_forward",)):
        out = " ".join(run(*request, "--time_limit=1e-9", *grouping)[1].split())
        assert re.search("verdict whether splitting pays is not known: the time limit of auto left out .*heft, metis, m_sct;", out)
        assert "does not pay" not in out


def test_every_method_has_a_line_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    from baechi_ext.place.registry import METHODS
    from baechi_runtime.cli.main import make_parser

    for command in ("place", "train"):
        with pytest.raises(SystemExit, match="0"):
            make_parser().parse_args([command, "--help"])
        shown = " ".join(capsys.readouterr().out.split())
        assert all(f" {name}: {method.help}" in shown for name, method in METHODS.items())
