"""The benchmark of lower bounds."""

import json
from pathlib import Path

import pytest

from benchmarks import bounds


def test_no_recorded_plan_is_faster_than_its_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bounds.json"
    bounds.main(["--most_ops=1000", f"--out={out}"])
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert len(rows) > 10
    assert all(row["bound_us"] <= row["step_us"] * (1 + 1e-9) for row in rows)
    assert "geometric means" in capsys.readouterr().out
