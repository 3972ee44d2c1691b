"""The measured speed of the decision process: what is counted."""

import json
from pathlib import Path

import pytest

from benchmarks import placeto_speed
from benchmarks.placeto_speed import main, rate


def test_a_rate_by_hand() -> None:
    """60 steps in 2, 3 and 1 seconds."""
    assert rate(60, [1.0, 3.0, 6.0, 7.0]) == {"steps_per_second": 30.0, "least": 20.0, "most": 60.0}


def test_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("GRAPHS", "REPEATS"):
        monkeypatch.setattr(placeto_speed, name, 1)
    main(["--episodes=2", "--num_devices=2", f"--out={tmp_path / 'speed.json'}"])
    found = json.loads((tmp_path / "speed.json").read_text())
    assert (found["nodes"], len(found["decisions"]), found["devices"]) == (200, 1, 2)
    assert found["episodes"]["steps_per_second"] > found["training"]["steps_per_second"] > 0
    assert f"{found['training']['steps_per_second']:.0f} steps a second" in capsys.readouterr().out
