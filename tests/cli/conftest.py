"""A runner of command lines in this process, and files to run them on."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from baechi_ext.ir import OpGraph
from baechi_runtime.cli.main import main
from tests.cli.files import a_graph, write
from tests.docs.report_schema import require_reported


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command line; returns its exit code, stdout and stderr. What --json prints is what its kind declares."""

    def run_line(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(a) for a in argv])
        out, err = capsys.readouterr()
        if "--json" in argv and out.startswith("{"):
            require_reported(json.loads(out))
        return code, out, err

    return run_line


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """A graph file."""
    return write(tmp_path / "graph.json", a_graph())


@pytest.fixture
def plan(tmp_path: Path, graph: Path) -> Path:
    """A plan file of that graph for two devices: a and b on the first, c on the second; one microsecond a byte."""
    cluster = {
        "devices": [{"name": "x", "memory_bytes": 100}, {"name": "y", "memory_bytes": 100}],
        "links": {"default": {"us_per_byte": 1, "latency_us": 0}},
    }
    known = {"schema_version": 1, "method": "by hand", "cluster": cluster, "placement": {"a": 0, "b": 0, "c": 1}}
    costed = OpGraph.load(graph)
    return write(tmp_path / "plan.json", {**known, "op_digests": dict(zip("abc", costed.op_digests, strict=True))})
