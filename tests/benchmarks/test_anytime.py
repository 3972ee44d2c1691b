"""Short searches beside longer ones: what a run records."""

import json
from pathlib import Path

import pytest

from baechi_ext.simulate import lower_bound_us
from benchmarks import anytime
from benchmarks.families import TUNING


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case, graph, out = TUNING[0], tmp_path / "graph.json", tmp_path / "result.json"
    case.graph.save(graph)
    anytime.main([str(graph), "--seconds=0.1,0.5", "--ccr=1", "--devices=2", f"--out={out}"])
    value = json.loads(out.read_text())
    assert value["command"].startswith("python -m benchmarks.anytime")
    short, longer = value["rows"]
    assert (short["limit_seconds"], longer["limit_seconds"], longer["of_longest"]) == (0.1, 0.5, 1)
    assert short["of_longest"] == short["predicted_us"] / longer["predicted_us"]
    assert min(short["predicted_us"], longer["predicted_us"]) >= longer["lower_bound_us"] >= lower_bound_us(case.graph, case.cluster)
    assert "| of the longest" in capsys.readouterr().out
