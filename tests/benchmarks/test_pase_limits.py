"""Searches at their limits: what the rows say of them."""

import json
from pathlib import Path

import pytest

from benchmarks import pase_limits


def test_limits_are_kept_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "limits.json"
    pase_limits.main(["--devices=2", "--batches=16,16", "--limits=3000", f"--out={path}"])
    found = json.loads(path.read_text())
    beam = found["beam"]
    assert "and 16 MiB are allowed" in beam["without_beam"]
    assert beam["lower_bound_flop"] <= beam["cost_flop"] * (1 + 1e-9)
    free, limited = found["memory"]
    assert limited["held_bytes"] <= 3000 * 2**20 < free["held_bytes"]
    assert free["cost_flop"] <= limited["lower_bound_flop"] * (1 + 1e-9) <= limited["cost_flop"] * (1 + 1e-9)
    shown = capsys.readouterr().out
    assert "densenet121" in shown
    assert "3000" in shown
