"""`baechi train --microbatches`: what a user sees of parts of a batch, and what is refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from baechi_runtime.files.run_folder import RunFolder
from tests.runtime.trainings import GPT2

Run = Callable[..., tuple[int, str, str]]
LINK = "--comm_cost_coeffs=0.001,50"
QUICK = ("--num_steps=2", "--time_limit=0.2", "--device_speeds=1", LINK)
TOWERS = ("--model_name=wide_towers", "--image_size=8", "--batch_size=4")


def test_auto_says_what_the_other_way_takes(run: Run, tmp_path: Path) -> None:
    """By the prediction or, where both are near each other, by real steps."""
    code, out, err = run("train", *GPT2, *QUICK, "--json", f"--out={tmp_path}")
    assert code == 0, err
    named = r"2 parts \(2, 2 examples\)"
    pattern = rf"the batch (goes in {named}; whole|stays whole; in {named}) (it is predicted to take|a few steps took) "
    assert [note for note in json.loads(out)["notes"] if re.match(pattern, note)]


def test_batch_norm_decides_what_auto_may_do(run: Run) -> None:
    code, out, err = run("train", *TOWERS, *QUICK, "--placement_method=auto", "--microbatches=2")
    assert (code, out) == (1, "")
    assert "20 BatchNorm layers normalise over the whole batch" in err
    code, out, err = run("train", *TOWERS, *QUICK, "--microbatches=2", "--batch_norm=per_part", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["parity"]["max_abs_diff"] == 0
    assert [note for note in found["notes"] if note.startswith("BatchNorm normalises each part of the batch by itself")]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--microbatches=5",), "--microbatches=5 is more than the batch's 4 examples; give at most 4"),
        (("--microbatches=3,2",), "--microbatches=3,2 has 5 examples, the batch 4; give sizes that add up to that"),
        (("--microbatches=auto", "--cost_path=c.json"), "--microbatches=auto and --cost_path cannot be used together"),
        (("--microbatches=2", "--cost_path=c.json"), "--cost_path has the costs of a step with its whole batch"),
        (("--microbatches=2", "--sharding=ddp"), "--microbatches is for a built-in model or a script of PyTorch that is placed"),
        (("--microbatches=2", "--framework=tensorflow"), "--microbatches is for a built-in model or a script of PyTorch that is placed"),
        (("--microbatches=0",), "argument --microbatches: '0' is not auto, a number of parts, such as 4, or the sizes of all"),
        (("--microbatches=3,x",), "'3,x' is not auto, a number of parts, such as 4, or the sizes of all, such as 3,1; see baechi train"),
    ],
)
def test_what_cannot_be_split_is_said(run: Run, flags: tuple[str, ...], message: str) -> None:
    code, _, err = run("train", *GPT2, *(flag for flag in QUICK if flag != LINK and "speeds" not in flag), *flags)
    assert code in (1, 2)
    assert message in err


def test_a_training_that_goes_on_keeps_its_parts(run: Run, tmp_path: Path) -> None:
    alike = ("--device_speeds=1", LINK)
    begun = ("train", *GPT2, *alike, "--json", "--placement_method=m_etf", "--microbatches=3,1")
    code, out, err = run(*begun, "--train_steps=2", f"--checkpoint={tmp_path}")
    assert code == 0, err
    resumed = (f"--checkpoint={tmp_path}", "--resume", "--num_devices=3")
    code, again, err = run("train", *GPT2, *alike, "--json", "--time_limit=0.2", "--train_steps=3", *resumed)
    assert code == 0, err
    code, again, err = run(*begun[:-1], "--train_steps=4", *resumed)  # a method that splits nothing by itself
    assert code == 0, err
    code, _, err = run(*begun[:-1], "--train_steps=5", "--dropout=0.4", *resumed)
    assert (code, "its dropout is 0.1, here it is 0.4" in err) == (1, True), err
    code, whole, err = run(*begun, "--train_steps=4")
    assert code == 0, err
    first, second, never = (json.loads(text)["losses"] for text in (out, again, whole))
    assert first == never[:2]
    assert second == never


def test_given_speeds_are_planned_for(run: Run, tmp_path: Path) -> None:
    """Parts in proportion to them; and nothing is measured, so nothing is said of that."""
    flags = ("--batch_size=6", "--microbatches=auto", "--device_speeds=0.5,1", f"--out={tmp_path}")
    code, out, err = run("train", *GPT2, *QUICK, *flags, "--json")
    assert code == 0, err
    assert [device.speed for device in RunFolder.load(tmp_path).plan.cluster.devices] == [0.5, 1]
    notes = json.loads(out)["notes"]
    assert any("2 parts (2, 4 examples)" in note for note in notes)
    assert not any("--device_speeds" in note for note in notes)
    assert "'one device' is cpu:0, the first; cpu:1 is 2 times as fast" in notes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--device_speeds=1,1,1",), "--device_speeds has 3 speeds and the run 2 devices; give as many, or one for all"),
        (("--device_speeds=0",), "argument --device_speeds"),
        (("--device_speeds=1", "--sharding=ddp"), "drop --device_speeds"),
    ],
)
def test_speeds_that_cannot_be(run: Run, flags: tuple[str, ...], message: str) -> None:
    code, _, err = run("train", *GPT2, *QUICK, *flags)
    assert code in (1, 2)
    assert message in err
