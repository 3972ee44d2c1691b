"""The table of placing times: what it times, how often, and what its ratios compare."""

import json
from pathlib import Path

import pytest

from baechi_ext.place.registry import place
from benchmarks import placers
from benchmarks.placers import Task


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


def test_ratios_are_of_pairs_on_the_same_graph() -> None:
    seconds = {"contiguous": (4.0, 6.0), "single": (2.0, 2.0), "simulate": (1.0, 1.0)}
    samples = {Task(name, 500): [{"seconds": s} for s in some] for name, some in seconds.items()}
    contiguous, single, simulated = placers.rows(samples)
    assert (contiguous["times_as_fast"], simulated["times_as_fast"]) == (None, None)
    assert single["times_as_fast"] == {"as": "contiguous", "median": 2.5, "low": 2.0, "high": 3.0}
