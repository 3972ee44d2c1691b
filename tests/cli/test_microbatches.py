"""`baechi train --microbatches`: what a user sees of parts of a batch, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]
GPT2 = ("--model_name=gpt2", "--batch_size=4", "--vocab_size=60", "--max_seq_length=6", "--num_layers=2", "--d_model=32", "--num_heads=4")
QUICK = ("--num_steps=2", "--time_limit=1")
TOWERS = ("--model_name=wide_towers", "--image_size=16", "--batch_size=4")


def test_auto_says_what_the_other_way_is_predicted_to_take(run: Run, tmp_path: Path) -> None:
    code, out, err = run("train", *GPT2, *QUICK, "--json", f"--out={tmp_path}")
    assert code == 0, err
    said = ("the batch goes in 2 parts (2, 2 examples); whole it is", "the batch stays whole; in 2 parts (2, 2 examples) it is")
    assert [note for note in json.loads(out)["notes"] if note.startswith(said)]


def test_batch_norm_decides_what_auto_may_do(run: Run) -> None:
    code, out, err = run("train", *TOWERS, *QUICK, "--placement_method=auto", "--microbatches=2")
    assert (code, out) == (1, "")
    assert "20 BatchNorm layers normalise over the whole batch" in err
    code, out, err = run("train", *TOWERS, *QUICK, "--microbatches=2", "--batch_norm=per_part", "--json")
    assert code == 0, err
    assert json.loads(out)["parity"]["max_abs_diff"] == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--microbatches=5",), "--microbatches=5 is more than the batch's 4 examples; give at most 4"),
        (("--microbatches=3,2",), "--microbatches=3,2 has 5 examples, the batch 4; give sizes that add up to that"),
        (("--microbatches=auto", "--cost_path=c.json"), "--microbatches=auto and --cost_path cannot be used together"),
        (("--microbatches=2", "--cost_path=c.json"), "--cost_path has the costs of a step with its whole batch"),
        (("--microbatches=2", "--sharding=ddp"), "--microbatches is for a built-in model or a script of PyTorch that is placed"),
        (("--microbatches=2", "--framework=tensorflow"), "--microbatches is for a built-in model or a script of PyTorch that is placed"),
        (("--microbatches=0",), "argument --microbatches"),
    ],
)
def test_what_cannot_be_split_is_said(run: Run, flags: tuple[str, ...], message: str) -> None:
    code, _, err = run("train", *GPT2, *QUICK, *flags)
    assert code in (1, 2)
    assert message in err


def test_a_training_that_goes_on_keeps_its_parts(run: Run, tmp_path: Path) -> None:
    flags = (*GPT2, "--time_limit=1", f"--checkpoint={tmp_path}", "--json")
    code, out, err = run("train", *flags, "--train_steps=2", "--microbatches=3,1")
    assert code == 0, err
    code, again, err = run("train", *flags, "--train_steps=4", "--resume", "--num_devices=3")
    assert code == 0, err
    code, whole, err = run("train", *GPT2, "--time_limit=1", "--json", "--train_steps=4", "--microbatches=3,1")
    assert code == 0, err
    first, second, never = (json.loads(text)["losses"] for text in (out, again, whole))
    assert first == never[:2]
    assert second == never

