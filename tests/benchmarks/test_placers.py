"""The table of placing times: what it times, how often, and what its ratios compare."""

import json
from pathlib import Path

import pytest

from baechi_ext.place.registry import place
from benchmarks import placers
from benchmarks.families import TUNING

CASE = TUNING[0]


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    placers.main(["--tasks=simulate,m_etf", "--most_ops=1000", "--repeats=2", f"--out={out}"])
    value = json.loads(out.read_text())
    assert value["versions"]["numba"]
    assert 0 <= value["load_of_others"] <= 1
    found = {(row["task"], row["ops"]): row for row in value["rows"]}
    assert set(found) == {(f"simulate {name}", 500) for name in placers.SIMULATORS} | {("m_etf", 1000)}
    placed = found["m_etf", 1000]
    assert placed["predicted_us"] >= placed["lower_bound_us"] > 0
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in value["rows"])
    assert "| m_etf" in capsys.readouterr().out


def test_ratios_are_of_pairs_on_the_same_graph() -> None:
    tasks = [placers.place_task(method, CASE.graph, CASE.cluster) for method in ("contiguous", "single")]
    tasks.append(placers.simulate_task("reference", CASE.graph, CASE.cluster))
    for task, seconds in zip(tasks, ([4.0, 6.0], [2.0, 2.0], [1.0, 1.0]), strict=True):
        task.seconds += seconds
    contiguous, single, reference = placers.rows(tasks)
    assert (contiguous["times_as_fast"], reference["times_as_fast"]) == (None, None)
    assert single["times_as_fast"] == {"as": "contiguous", "median": 2.5, "low": 2.0, "high": 3.0}


def test_a_sample_of_a_placer() -> None:
    task = placers.place_task("m_etf", CASE.graph, CASE.cluster)
    assert task.wants(1)
    task.sample()
    assert not task.wants(1)
    assert task.seconds[0] > 0
    assert task.facts["predicted_us"] == place("m_etf", CASE.graph, CASE.cluster).predicted_step_us


def test_what_is_slow_is_repeated_less_often() -> None:
    task = placers.place_task("m_etf", CASE.graph, CASE.cluster)
    task.seconds += [placers.SLOW_SECONDS + 1] * placers.SLOW_REPEATS
    assert not task.wants(100)
