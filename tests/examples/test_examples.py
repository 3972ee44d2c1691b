"""Every example runs, as its docstring says, with small sizes; and what it prints is right."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.runtime import forked
from tests.test_layers import ROOT

EXAMPLES = ROOT / "examples"
GRAPH = ROOT / "baechi_ext" / "datasets" / "graphs" / "nmt" / "graph_00.json.gz"
needs_tensorflow = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="tensorflow is not installed")


def run(folder: Path, *words: object) -> str:
    """The output of a Python command in a folder."""
    done = forked.python(*map(str, words), folder=folder, framework="tensorflow" if "tensorflow" in str(words[0]) else "torch")
    assert done.returncode == 0, done.stderr
    return done.stdout


def step_of(folder: Path, graph: Path, plan: Path) -> float:
    """The predicted step of a plan that breaks no rule."""
    said = json.loads(run(folder, "-m", "baechi_ext", "simulate", graph, plan, "--json"))
    assert said["violations"] == []
    return said["makespan_us"]


def test_a_training_script_prints_the_same_placed(tmp_path: Path) -> None:
    script, sizes = EXAMPLES / "training_script.py", ("--epochs=2", "--width=32", "--depth=2", "--examples=256")
    expected = run(tmp_path, script, *sizes)
    place = ("train", "--placement_method=round_robin", "--keep_placed", "--num_devices=2", "--comm_cost_coeffs=0.0001,30", "--out=run")
    assert run(tmp_path, "-m", "baechi_ext", *place, script, "--", *sizes) == expected
    assert expected.count("mean loss") == 2
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert set(plan["placement"].values()) == {0, 1}


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    printed = run(tmp_path, EXAMPLES / "own_loop.py", "--steps=4", "--width=16", "--experts=2", "--method=round_robin")
    assert re.search(r"round_robin, \d+ \+ \d+ ops on cpu:0, cpu:1; 3 steps placed, verified 2 of 3", printed)
    assert printed.endswith("unplaced: Mixture with 10 tensors\n")
    first, last = (float(loss) for loss in re.findall(r"loss (\S+)", printed)[:2])
    assert last < first


@needs_tensorflow
def test_a_step_of_tensorflow(tmp_path: Path) -> None:
    printed = run(tmp_path, EXAMPLES / "tensorflow_step.py", "--steps=5", "--width=16", "--method=round_robin", "--workers=thread")
    assert "round_robin, " in printed
    assert re.search(r"verified 2 of [345], last at call 2", printed)  # of five steps, of which some may run as they are in their turn
    assert printed.endswith("steps the optimizer counts: 5\n")
    first, last = (float(loss) for loss in re.findall(r"loss (\S+)", printed)[:2])
    assert last < first


def test_a_placer_of_ones_own_is_judged(tmp_path: Path) -> None:
    """It keeps to all rules, uses its devices, and is better than one of them alone, which has no transfers."""
    plan = tmp_path / "plan.json"
    run(tmp_path, EXAMPLES / "custom_placer.py", GRAPH, plan, "--num_devices=3")
    mine = step_of(tmp_path, GRAPH, plan)
    run(tmp_path, EXAMPLES / "custom_placer.py", GRAPH, plan, "--num_devices=1")
    assert mine < 0.9 * step_of(tmp_path, GRAPH, plan)


def test_a_network_of_ones_own_is_sharded(tmp_path: Path) -> None:
    printed = run(tmp_path, EXAMPLES / "shard_network.py", "--devices=4", "--batch=32", "--units=256", f"--out={tmp_path / 'shards.json'}")
    assert re.search(r"^optimal: .* by batch alone (\S+) times that$", printed, re.MULTILINE)
    assert float(re.search(r"alone (\S+) times", printed)[1]) > 1
    plan = json.loads((tmp_path / "shards.json").read_text())
    assert (plan["kind"], plan["status"], plan["devices"]) == ("baechi shard plan", "optimal", 4)


class Watched(NotebookClient):
    """Keeps what cells show, one after the other, as the outputs in the end do not."""

    def process_message(self, msg: dict, cell: dict, cell_index: int) -> object:
        if msg["msg_type"] in ("display_data", "update_display_data"):
            self.shown.append(msg["content"]["data"]["text/plain"])
        return super().process_message(msg, cell, cell_index)


SLOW_CELL = """
import time
from baechi_runtime.report.progress import progress
with progress("counting", delay_seconds=0.0) as show:
    while show.__closure__[0].cell_contents._handle is None:
        time.sleep(0.01)
    show("half of it")
"""


def test_the_notebook_runs_in_a_kernel_and_shows_plans_and_progress(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    assert [cell.outputs for cell in notebook.cells if cell.cell_type == "code"] == [[]] * 10
    notebook.cells.append(nbformat.v4.new_code_cell(SLOW_CELL))
    client = Watched(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.shown = []
    paths = os.pathsep.join([str(ROOT), str(ROOT / "runtime")])
    client.execute(env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(tmp_path)})
    results = [output.data for cell in notebook.cells for output in cell.get("outputs", ()) if output.output_type == "execute_result"]
    planned, explained, layer, pinned, what_if, compared, report, page = results
    for run in (planned, pinned, what_if):
        assert run["text/plain"].startswith("<Run of Mixture: m_etf, ")
        assert "<svg" in run["text/html"]
    assert "on 4 devices" in what_if["text/plain"]
    assert explained["text/plain"].startswith("The step is ")
    assert re.match(r"The \d+ ops of experts\.0 are", layer["text/plain"])
    assert compared["text/html"].count("<tr>") == 4
    assert report["text/plain"].startswith("Mixture: ")
    assert "report.html" in page["text/plain"]
    assert {path.name for path in (tmp_path / "runs" / "notebook").iterdir()} == {"graph.json", "plan.json", "profile.json", "report.html"}
    assert [re.sub(r"\d+ s", "N s", text) for text in client.shown[-3:]] == ["counting ...", "counting: half of it (N s)", ""]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_every_example_says_what_it_shows_and_is_tried(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert f"examples/{path.name}" in text
    assert f'"{path.name}"' in Path(__file__).read_text(encoding="utf-8")


def test_the_framework_free_examples_need_no_framework() -> None:
    for name in ("custom_placer", "shard_network"):
        code = f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); import {name}; print({{'torch', 'tensorflow'}} & set(sys.modules))"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
