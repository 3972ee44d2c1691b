"""The table of processor times by kind of graph."""

import json
from pathlib import Path

import numpy as np
import pytest

from baechi_ext.place.registry import place
from benchmarks import kinds
from benchmarks.families import cluster_for
from benchmarks.runner import ROOT
from benchmarks.shapes import FAMILIES


def test_a_checkout_beside_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kinds.json"
    kinds.main(
        [
            "--ops=60",
            "--families=random",
            "--devices=speeds",
            "--ccr=10",
            "--memory=tight",
            "--repeats=1",
            f"--before={ROOT}",
            f"--out={out}",
        ]
    )
    (row,) = json.loads(out.read_text())["rows"]
    graph = FAMILIES["random"](60, np.random.default_rng(3))
    step_us = place("m_etf", graph, cluster_for(graph, 10.0, "speeds", "tight")).predicted_step_us
    assert row["ops"] == 60 and row["now"]["predicted_us"] == row["before"]["predicted_us"] == step_us
    assert all(seconds > 0 for name in ("before", "now") for seconds in row[name]["cpu_seconds"])
    table = capsys.readouterr().out
    assert "| random | speeds  | 10.0 | tight  | 60  |" in table and "geometric mean" in table
