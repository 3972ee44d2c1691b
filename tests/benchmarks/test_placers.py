"""The table of placing times: what it times, and how often."""

import json
from pathlib import Path

import pytest

from baechi_ext.place.registry import place
from benchmarks import placers


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    placers.main(["--tasks=simulate,m_etf", "--most_ops=1000", "--repeats=2", f"--out={out}"])
    value = json.loads(out.read_text())
    assert value["command"] == f"python -m benchmarks.placers --tasks=simulate,m_etf --most_ops=1000 --repeats=2 --out={out}"
    assert value["versions"]["numba"]
    assert 0 <= value["load_of_others"] <= 1
    found = {(row["task"], row["ops"]): row for row in value["rows"]}
    assert set(found) == {("simulate", 500), ("m_etf", 1000)}
    placed = found["m_etf", 1000]
    assert placed["predicted_us"] == place("m_etf", *placers.instance(1000)).predicted_step_us
    assert placed["predicted_us"] >= placed["lower_bound_us"] > 0
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in value["rows"])
    assert "| m_etf" in capsys.readouterr().out
