"""A pipeline of torch's own takes turns with the plans that `baechi compare` measures, and computes the same."""

import json
from pathlib import Path

import pytest

from baechi_ext.errors import OptionError
from baechi_runtime.models.registry import MODELS
from benchmarks.pipelining import NAME, NO_STAGES, main
from tests.runtime import forked


def test_a_pipeline_beside_a_plan(tmp_path: Path) -> None:
    """The losses are those of two steps, so the second tells that both stages were trained; the model has neither BatchNorm nor dropout."""
    file, flags = tmp_path / "found.json", ["--model_name=alexnet", "--batch_size=4", "--image_size=63", "--dropout=0"]
    flags += ["--num_steps=2", "--comm_cost_coeffs=0.0001,10", "--device_speeds=1"]
    done = forked.python("-m", "benchmarks.pipelining", f"--out={file}", "--", *flags, "--placement_methods=contiguous")
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["losses"][NAME] == pytest.approx(found["losses"]["eager"], rel=1e-5)
    assert found["losses"]["eager"][0] != pytest.approx(found["losses"]["eager"][1], rel=1e-4)
    rows = {row["method"]: row for row in found["methods"]}
    assert list(rows) == ["single", "contiguous", NAME]
    assert all(len(row["measured_step_us"]["samples"]) == 2 and row["ratio"]["median"] > 0 for row in rows.values())


def test_why_a_model_is_no_pipeline() -> None:
    assert set(NO_STAGES) <= set(MODELS)
    with pytest.raises(OptionError, match="share one embedding"):
        main(["--", "--model_name=gpt2"])
    with pytest.raises(OptionError, match="into 2 stages; drop --num_devices=3"):
        main(["--", "--model_name=alexnet", "--num_devices=3"])
