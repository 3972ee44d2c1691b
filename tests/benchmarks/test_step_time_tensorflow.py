"""The table of TensorFlow's step times, of a small model."""

import json
from functools import partial
from pathlib import Path

import pytest

from baechi_runtime.tensorflow import cluster
from benchmarks.step_time import main


def test_plans_are_timed_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The link is probed by messages of two sizes: all of them take most of the test."""
    monkeypatch.setattr(cluster, "probe_link", partial(cluster.probe_link, sizes=(4, 65536)))
    sizes = [flag for size in ("batch_size=2", "image_size=2", "d_model=8", "num_layers=1") for flag in ("--set", size)]
    file = tmp_path / "times.json"
    main(["--framework=tensorflow", "--model_name=wide_towers", *sizes, "--num_steps=2", "--methods=expert,m_etf", f"--out={file}"])
    found = json.loads(file.read_text())
    assert [row["variant"] for row in found["rows"]] == ["eager", "single", "expert", "m_etf", "tf.device"]
    assert all(found["parity"][method]["passed"] for method in ("expert", "m_etf", "tf.device"))
    for row in found["rows"][1:]:
        assert len(row["measured_us"]["samples"]) == 2
        assert row["predicted_us"] is None if row["variant"] == "tf.device" else row["predicted_us"] > 0
        assert (len(row["cpu_seconds"]), len(row["peak_memory_bytes"]["measured"])) == (2, 2)
        assert row["cpu_seconds"][0] > 0
    assert found["rows"][2]["transfers"] > 0
    assert "x eager" in capsys.readouterr().out
