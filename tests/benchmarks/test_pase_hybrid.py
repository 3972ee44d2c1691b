"""Predicted steps by the size of groups: the benchmark runs, and keeps what it found."""

import json
from pathlib import Path

import pytest

from benchmarks import pase_hybrid
from runtime.models.registry import ModelOptions


def test_every_size_of_groups_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(pase_hybrid.MODELS, "wide_towers", ModelOptions(batch_size=4, image_size=8))
    path = tmp_path / "hybrid.json"
    pase_hybrid.main(["--models", "wide_towers", "--devices=4", "--seconds=0.2", f"--out={path}"])
    (row,) = json.loads(path.read_text())["rows"]
    assert list(row["steps_us"]) == ["1", "2", "4"]
    assert row["steps_us"][str(row["group_size"])] == min(row["steps_us"].values())
    assert min(row["steps_us"].values()) >= row["lower_bound_us"] > 0
    assert "groups of" in capsys.readouterr().out
