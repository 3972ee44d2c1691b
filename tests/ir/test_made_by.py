"""MadeBy: how a file says where it comes from, and what it says on a line."""

import json
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import networkx as nx
import pytest

import baechi_ext
from baechi_ext.cost import Profile
from baechi_ext.errors import FileError
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.ir.made_by import MadeBy, signed, versions
from baechi_ext.ir.measured import MeasuredOp, MeasuredStep
from tests.build import cluster_of, graph_of

MADE_BY = MadeBy(("baechi", "train", "--out=my runs"), {"baechi": "0.1.0", "python": "3.11.7", "torch": "2.13.0"})
GRAPH = graph_of({"a": 1, "b": 2}, ("a", "b", 4))


def test_only_what_the_process_has_loaded_has_a_version() -> None:
    code = "import json; from baechi_ext.ir.made_by import versions; print(json.dumps(versions()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(found) == {"baechi": baechi_ext.__version__, "python": platform.python_version()}


def test_a_loaded_framework_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="7.1+cpu"))
    assert versions()["torch"] == "7.1+cpu"
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())  # as while it is being imported
    assert "torch" not in versions()


def test_a_line_for_people() -> None:
    assert str(MADE_BY) == "baechi train '--out=my runs' (baechi 0.1.0, torch 2.13.0, Python 3.11.7)"
    assert str(MadeBy((), MADE_BY.versions)) == MADE_BY.programs == "baechi 0.1.0, torch 2.13.0, Python 3.11.7"


def test_what_a_terminal_would_obey_is_not_shown() -> None:
    assert MadeBy(("baechi", "place", "a\x1b[2J\nb\udcff")).command_line == "baechi place 'a?[2J?b?'"


def test_round_trip() -> None:
    assert MadeBy.from_json(json.loads(json.dumps(signed({"a": 1}, MADE_BY))), FileError) == MADE_BY
    assert signed({"a": 1}, None) == {"a": 1}


def test_what_a_file_leaves_out_is_empty() -> None:
    assert MadeBy.from_json({}, FileError) == MadeBy.from_json({"command": None, "versions": None}, FileError) == MadeBy((), {})


@pytest.mark.parametrize(("value", "said"), [({"command": "baechi"}, "a list of words"), ({"versions": ["1"]}, "an object")])
def test_what_is_neither_is_refused(value: dict[str, object], said: str) -> None:
    with pytest.raises(FileError, match=f"expected {said}"):
        MadeBy.from_json(value, FileError)


def test_a_graph_file_is_signed_among_networkx_graph_attributes(tmp_path: Path) -> None:
    GRAPH.save(tmp_path / "graph.json", MADE_BY)
    there = nx.node_link_graph(json.loads((tmp_path / "graph.json").read_text()))
    assert (there.graph["command"], there.graph["versions"]) == (list(MADE_BY.command), MADE_BY.versions)
    again = OpGraph.load(tmp_path / "graph.json")
    assert (again.ops, again.tensors, again.fingerprint) == (GRAPH.ops, GRAPH.tensors, GRAPH.fingerprint)


def test_a_cluster_file_is_signed(tmp_path: Path) -> None:
    cluster_of(2).save(tmp_path / "cluster.json", MADE_BY)
    assert MadeBy.from_json(json.loads((tmp_path / "cluster.json").read_text()), FileError) == MADE_BY
    assert Cluster.load(tmp_path / "cluster.json") == cluster_of(2)


def test_a_measured_step_is_signed(tmp_path: Path) -> None:
    step = MeasuredStep(GRAPH.fingerprint, "thread", "monotonic", 9.0, (MeasuredOp("a", 0, 0, 1), MeasuredOp("b", 0, 2, 9)))
    step.save(tmp_path / "measured.json", MADE_BY)
    assert MadeBy.from_json(json.loads((tmp_path / "measured.json").read_text()), FileError) == MADE_BY
    assert MeasuredStep.load(tmp_path / "measured.json", GRAPH) == step


def test_a_profile_is_signed(tmp_path: Path) -> None:
    op = {"compute_us": 1.0, "samples_us": [1.0], "output_bytes": 4, "temporary_bytes": 0, "persistent_bytes": 0}
    profile = Profile.from_json({"ops": {"a": op, "b": op}, "clock": "thread_cpu"}, GRAPH)
    profile.save(tmp_path / "profile.json", MADE_BY)
    assert MadeBy.from_json(json.loads((tmp_path / "profile.json").read_text()), FileError) == MADE_BY
    assert Profile.load(tmp_path / "profile.json", GRAPH) == profile
