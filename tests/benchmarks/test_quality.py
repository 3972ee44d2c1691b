"""The comparison with real processes on small cases: what it records, what it skips, and how it reports failures."""

import argparse
import json
import math
from pathlib import Path

import pytest

from baechi_ext.ir import Plan
from baechi_ext.place.registry import place
from baechi_ext.python_process import command_of, surroundings
from baechi_ext.simulate import lower_bound_us, simulate
from benchmarks import quality, quality_table
from benchmarks.families import HELD_OUT, TUNING, Case
from benchmarks.quality_table import geometric_mean, report, summaries
from benchmarks.runner import ROOT, Ended, child

CASES = {case.name: case for case in TUNING}
TIGHT: Case = CASES["training-20-1-2-tight"]


def test_a_run_and_what_goes_on_from_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    options = ["--cases=training-20-", "--anneal_seconds=0.1", f"--out={out}"]
    quality.main(["--methods=m_etf,single", *options])
    first = json.loads(out.read_text())
    row = first["cases"][TIGHT.name]
    assert list(row["cells"]) == ["annealing", "m_etf", "single"]
    assert row["cells"]["m_etf"]["makespan_us"] == place("m_etf", TIGHT.graph, TIGHT.cluster).predicted_step_us
    assert row["lower_bound_us"] == lower_bound_us(TIGHT.graph, TIGHT.cluster)
    assert row["cells"]["annealing"]["evaluations"] > 0
    assert row["cells"]["single"]["status"] == "unknown"
    assert "device:0" in row["cells"]["single"]["error"]
    capsys.readouterr()
    quality.main(["--methods=m_etf,contiguous", *options])
    progress = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in progress] == ["contiguous"]
    again = json.loads(out.read_text())["cases"][TIGHT.name]["cells"]
    assert {name: again[name] for name in row["cells"]} == row["cells"]
    assert all(cell["cpu_seconds"] > 0 for cell in again.values())
    with pytest.raises(SystemExit, match="give the same options or another --out"):
        quality.main(["--methods=m_etf", *options[:2], "--time_limit=7", f"--out={out}"])
    capsys.readouterr()
    quality_table.main([str(out)])
    printed = capsys.readouterr().out
    assert json.loads(out.read_text())["command"] in printed
    assert f"| {TIGHT.name} | " in printed


def test_parts_share_the_cases() -> None:
    def names(part: str) -> list[str]:
        arguments = argparse.Namespace(set=["tuning", "held_out"], cases=["-20-"], part=quality.part_of(part))
        return [case.name for case in quality.chosen_cases(arguments)]

    assert len(names("1/1")) > 3
    assert sorted(names("1/2") + names("2/2")) == sorted(names("1/1"))
    assert names("1/1")[::2] == names("1/2")
    for wrong in ("0/2", "3/2", "x"):
        with pytest.raises(ValueError, match=wrong):
            quality.part_of(wrong)


def test_a_process_that_hangs_is_killed() -> None:
    ended = child(command_of("http.server", "0", "--bind=127.0.0.1"), 1.0, surroundings())
    assert ended.code is None
    assert 1.0 <= ended.seconds < 60
    assert quality.failed(ended) == {"status": "timeout", "error": "killed at the hard limit"}


def test_failures_say_why() -> None:
    def failed(code: int, out: str, err: str) -> dict:
        return quality.failed(Ended(code, out, err, 1.0, 1.0))

    assert failed(1, '{"status": "infeasible", "error": "too little"}', "x") == {"status": "infeasible", "error": "too little"}
    assert failed(1, "", "warning\nerror: no such file\n") == {"status": "error", "error": "error: no such file"}
    assert failed(139, "", "") == {"status": "error", "error": "exit code 139"}


def test_plans_are_judged_again() -> None:
    plan = place("m_etf", TIGHT.graph, TIGHT.cluster).plan
    assert quality.judged(plan, TIGHT.graph, TIGHT.cluster)["makespan_us"] == plan.predicted_step_us
    value = plan.to_json()
    lying = Plan.from_json({**value, "predicted_step_us": plan.predicted_step_us / 2}, TIGHT.graph, TIGHT.cluster)
    assert "simulates to" in quality.judged(lying, TIGHT.graph, TIGHT.cluster)["error"]
    crowded = Plan.from_json({**value, "placement": dict.fromkeys(value["placement"], 0)}, TIGHT.graph, TIGHT.cluster)
    worth = simulate(TIGHT.graph, TIGHT.cluster, crowded.placement, crowded.priority)
    assert worth.peak_memory_bytes[0] > TIGHT.cluster.devices[0].memory_bytes
    assert quality.judged(crowded, TIGHT.graph, TIGHT.cluster)["status"] == "invalid"


def test_the_summary_by_hand() -> None:
    def cell(us: float | None, status: str = "feasible") -> dict:
        return {"status": status} if us is None else {"status": status, "makespan_us": us, "placement_seconds": us / 10}

    cases = {
        "x": {"ops": 1, "devices": 2, "lower_bound_us": 10.0, "cells": {"annealing": cell(20), "a": cell(10), "b": cell(40)}},
        "y": {"ops": 1, "devices": 2, "lower_bound_us": 10.0, "cells": {"annealing": cell(20), "a": cell(40), "b": cell(20)}},
        "z": {"ops": 1, "devices": 2, "lower_bound_us": 10.0, "cells": {"annealing": cell(30), "a": cell(None, "timeout"), "b": cell(30)}},
    }
    annealing, a, b = summaries(cases)
    assert (annealing["method"], annealing["over_annealing"]) == ("annealing", pytest.approx(1.0))
    assert (a["plans"], a["without"], a["wins"]) == (2, {"timeout": 1}, 1)
    assert (a["over_bound"], a["over_annealing"], a["over_best"]) == (pytest.approx(2.0), pytest.approx(1.0), pytest.approx(2**0.5))
    assert (a["worst"], a["worst_case"], a["median_seconds"]) == (2.0, "y", 2.5)
    assert (b["plans"], b["wins"], b["worst"], b["worst_case"]) == (3, 2, 4.0, "x")
    assert b["over_best"] == pytest.approx(4 ** (1 / 3))
    text = report(cases)
    assert "| x    | 1   | 2       | 10       | a      | 2.000     | 1.000   | 4.000 |" in text
    assert "timeout" in text
    assert math.isnan(geometric_mean([]))


def test_no_recorded_plan_is_faster_than_the_bound_of_now() -> None:
    files = [ROOT / "benchmarks" / "results" / f"quality_{part}.json" for part in (1, 2)]
    recorded = {name: row for file in files for name, row in json.loads(file.read_text(encoding="utf-8"))["cases"].items()}
    cases = [case for case in HELD_OUT if case.ops <= 1000 and case.name in recorded]
    assert len(cases) > 10
    for case in cases:
        step_us = recorded[case.name]["cells"]["auto"]["makespan_us"]
        assert lower_bound_us(case.graph, case.cluster) <= step_us * (1 + 1e-9), case.name
