"""Every report and every file says what made it: all commands, as the parser has them, really run."""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

import baechi_ext
from baechi_ext.ir import OpGraph
from baechi_ext.ir.made_by import MadeBy
from baechi_runtime.cli.main import make_parser
from tests.cli.files import ROOT, write
from tests.docs.report_schema import require_reported
from tests.place.placeto.graphs import distinct, towers, write_family
from tests.runtime import forked

Run = Callable[..., tuple[int, str, str]]
BASE = {"baechi": baechi_ext.__version__, "python": platform.python_version()}
GIVEN = ["--comm_cost_coeffs=0.001,50", "--device_speeds=1"]
STEP = ["--model_name=wide_towers", "--image_size=8", "--batch_size=2", "--num_steps=2", *GIVEN]
TWO = ["--num_devices=2", "--device_memory=1GiB"]
FEW = ["--evaluations=10", "--episodes=2", "--repeats=1"]
CALLS: dict[str, tuple[list[str], bool]] = {
    "place": (["graph.json", *TWO, "--placement_method=m_etf", "--out=OUT/plan.json"], False),
    "train": ([*STEP, "--placement_method=m_etf", "--out=OUT"], True),
    "compare": ([*STEP, "--placement_methods=m_etf", "--out=OUT"], True),
    "probe-links": (["--max_exponent=3", "--out=OUT/cluster.json", "--samples=OUT/samples.json"], True),
    "datasets": (["list", "ptb", "--folder=."], False),
    "placeto train": (["ptb", "--folder=.", *TWO, "--updates=1", "--graphs=1", "--episodes=2", "--out=OUT"], True),
    "placeto evaluate": (["ptb", "--folder=.", *TWO, FEW[0], "--methods=single,m_etf", "--out=OUT", "--plot"], True),
    "placeto study": (["ptb", "--folder=.", FEW[1], FEW[2], "--orders=topo,bfs", "--most_graphs=2", "--out=OUT", "--plot"], True),
    "pase": (["-g", "alexnet", "-p", "4", "--out=OUT/shard_plan.json", "-d", "OUT/network.dot"], False),
    "simulate": (["graph.json", "plan.json"], False),
    "explain": (["plan.json"], False),
    "diff": (["plan.json", "plan.json"], False),
    "export": (["graph.json", "plan.json", "--format=node_link", "--out=OUT/graph.json"], False),
    "export-device-map": (["graph.json", "plan.json", "--out=map.json"], False),
    "doctor": ([], False),
}
"""By command: its arguments, in a folder of input files, and whether PyTorch runs in it."""


def with_json(parser: argparse.ArgumentParser, name: str = "") -> Iterator[str]:
    """The commands below a parser that know --json."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in nested:
        for word, sub in action.choices.items():
            yield from with_json(sub, f"{name} {word}".strip())
    if not nested and "--json" in parser._option_string_actions:
        yield name


COMMANDS = list(with_json(make_parser()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A graph whose ops know their modules, a plan for it, and a family of graphs."""
    modules = {"f0": "a", "f1": "b"}
    nodes = [{"id": id_, "compute_us": 10.0, "module": module} for id_, module in modules.items()]
    write(tmp_path / "graph.json", {"nodes": nodes, "edges": [{"source": "f0", "target": "f1", "bytes": 8}]})
    cluster = {"devices": [{"name": "x"}, {"name": "y"}], "links": {"default": {"us_per_byte": 0.001, "latency_us": 1}}}
    write(tmp_path / "plan.json", {"cluster": cluster, "placement": {"f0": 0, "f1": 1}})
    write_family(tmp_path, "ptb", [distinct(8, seed) for seed in range(3)], [towers(), distinct(9, 7)])
    (tmp_path / "out").mkdir()
    return tmp_path


def command_of(name: str, *more: str) -> list[str]:
    return [*name.split(), *(word.replace("OUT", "out") for word in CALLS[name][0]), *more]


def baechi(folder: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "baechi_ext", *words], capture_output=True, text=True, timeout=240, cwd=folder, env=environment, check=False
    )
    assert (done.returncode, done.stderr if done.returncode else "") == (0, "")
    return done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_what_json_prints_and_every_file_name_command_and_versions(name: str, folder: Path) -> None:
    """Where PyTorch runs, from a process that has imported it; the others show that they name none."""
    words, runs_torch = command_of(name, "--json"), CALLS[name][1]
    said = json.loads(forked.output(*words, folder=folder) if runs_torch else baechi(folder, *words))
    require_reported(said)
    assert said["command"] == ["baechi", *words]
    assert {key: said["versions"].get(key) for key in BASE} == BASE
    assert set(said["versions"]) - set(BASE) == ({"torch"} if runs_torch else set())
    made_by = MadeBy(tuple(said["command"]), said["versions"])
    for path in (folder / "out").rglob("*"):
        assert path.suffix in (".csv", ".safetensors") or is_signed(path, made_by), path.name
    assert name not in ("train", "compare", "pase") or list((folder / "out").iterdir())


def is_signed(path: Path, made_by: MadeBy) -> bool:
    """True if a file says who made it, in the place that its format has for that."""
    if path.suffix != ".json":
        text = path.read_bytes().decode("latin-1")
        return made_by.command_line in text and made_by.programs in text
    value: dict[str, Any] = json.loads(path.read_text())
    attributes = value.get("graph")
    return made_by.to_json().items() <= (attributes if isinstance(attributes, dict) else value).items()


@pytest.mark.parametrize("name", COMMANDS)
def test_what_people_read_ends_with_it(name: str, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    code, out, err = run(*command_of(name))
    assert code == 0, err
    *report, last = out.splitlines()
    words = re.escape(f"made by        {MadeBy(('baechi', *command_of(name))).command_line} (baechi {BASE['baechi']}, ")
    assert re.fullmatch(rf"{words}.*Python {re.escape(BASE['python'])}\)", last)
    assert report
    assert not any(line.startswith("made by") for line in report)


def test_only_the_plan_counts_where_plans_are_compared(folder: Path) -> None:
    """The command is in the file: two commands that make the same plan write two files, of plans that are equal."""
    for seed, out in enumerate(("one.json", "two.json")):
        baechi(folder, "place", "graph.json", *TWO, "--placement_method=m_etf", f"--out={out}", "--seed=0" if seed else "--seed=00")
    first, second = (json.loads((folder / name).read_text()) for name in ("one.json", "two.json"))
    differ = {key for key in first if first[key] != second[key]}
    assert differ - {"placement_seconds"} == {"command"}
    assert json.loads(baechi(folder, "diff", "one.json", "two.json", "--json"))["same"]


def test_no_plan_is_said_with_the_command_too(folder: Path, run: Run) -> None:
    write(folder / "graph.json", {"nodes": [{"id": "a", "compute_us": 1, "persistent_bytes": 100}], "edges": []})
    words = ["place", str(folder / "graph.json"), "--num_devices=1", "--device_memory=10", "--json"]
    code, out, _ = run(*words)
    said = json.loads(out)
    assert code == 1
    assert (said["status"], said["command"]) == ("infeasible", ["baechi", *words])


@pytest.mark.parametrize("kind", ["dot", "split_spec", "device_map", "node_link"])
def test_exports_are_signed_where_the_format_is_ours_to_write(kind: str, folder: Path) -> None:
    words = ["export", "graph.json", "plan.json", f"--format={kind}", "--out=exported"]
    baechi(folder, *words)
    text, line = (folder / "exported").read_text(), MadeBy(("baechi", *words)).command_line
    if kind == "dot":
        assert text.startswith(f"// {line} (baechi ")
    elif kind == "node_link":
        assert nx.node_link_graph(json.loads(text)).graph["command"] == ["baechi", *words]
        assert OpGraph.load(folder / "exported").fingerprint == OpGraph.load(folder / "graph.json").fingerprint
    else:  # as accelerate and torch.distributed.pipelining read it
        assert "command" not in json.loads(text)


def test_a_run_made_by_place_names_its_command_on_its_page(folder: Path) -> None:
    """Where there is no report.json the plan says it."""
    words = command_of("place")
    baechi(folder, *words)
    (folder / "out" / "graph.json").write_bytes((folder / "graph.json").read_bytes())
    baechi(folder, "report", "out", "--out=page.html")
    assert " ".join(["baechi", *words]) in (folder / "page.html").read_text()
