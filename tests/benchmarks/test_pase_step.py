"""Measured steps of split models: the benchmark runs, and keeps what it found."""

import json
from pathlib import Path

import pytest

from benchmarks import pase_step


def test_reports_are_kept_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--batch_size=4", "--vocab_size=64", "--rnn_units=16", "--max_seq_length=8", "--rnn_chunk=4")
    monkeypatch.setitem(pase_step.MODELS, "rnnlm", small)
    monkeypatch.setattr(pase_step, "STRATEGIES", ("pase", "ddp"))
    path = tmp_path / "steps.json"
    pase_step.main(["--models=rnnlm", "--processes=2", "--steps=2", f"--out={path}"])
    (report,) = json.loads(path.read_text())["reports"]
    assert [run["name"] for run in report["strategies"]] == ["pase", "ddp"]
    shown = capsys.readouterr().out
    assert "rnnlm" in shown
    assert "ddp" in shown
