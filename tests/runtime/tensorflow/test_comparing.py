"""`baechi compare --framework=tensorflow`, of a built-in model and of scripts: measured, checked, kept, and the script left as it was."""

import json
import warnings
from pathlib import Path
from typing import Any

import keras
import pytest

from baechi_runtime.cli.main import main
from baechi_runtime.files.run_folder import RunFolder

SCRIPTS = Path(__file__).parent / "scripts"
COMPARE = ["compare", "--framework=tensorflow", "--comm_cost_coeffs=0.001,50", "--num_steps=2", "--json"]
TRAINS = """
import os, sys
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(1)
os.chdir(os.path.dirname(sys.argv[1]))
model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(60, "relu"), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.1)
optimizer.build(model.trainable_variables)

@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) NOISE) ** 2)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return {"loss": loss, "none": None}

x = tf.ones((8, 20))
step(x)
before = [w.copy() for w in model.get_weights()]
try:
    step(x)
except Exception:
    print("taken for its own")
finally:
    print("as before", all((a == b).all() for a, b in zip(before, model.get_weights())), int(optimizer.iterations.numpy()))
print("goes on")
"""


@pytest.fixture(autouse=True)
def _as_outside_of_pytest():
    keras.backend.clear_session()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def compared(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[str, dict[str, Any]]:
    """The text printed before the comparison, and the comparison."""
    code = main([*COMPARE, *map(str, argv)])
    out, err = capsys.readouterr()
    assert code == 0, err
    begin = out.index('{\n "kind"')
    return out[:begin], json.loads(out[begin:])


def test_a_model_on_servers_and_what_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--model_name=wide_towers", "--batch_size=2", "--image_size=2", "--d_model=8", "--num_layers=1"]
    said, found = compared(capsys, *small, "--placement_methods=round_robin,placeto", "--device_memory=2KB", f"--out={tmp_path}")
    rows = {row["method"]: row for row in found["methods"]}
    assert (said, found["recommended"], list(rows)) == ("", None, ["single", "round_robin", "placeto"])  # it fits nowhere
    assert not (tmp_path / "plan.json").exists()
    _, found = compared(capsys, *small, "--placement_methods=round_robin", f"--out={tmp_path}")
    assert (found["executor"], found["recommended"]) == ("TensorFlow, servers", "single")
    assert all(len(row["measured_step_us"]["samples"]) == 2 and row["parity"]["passed"] for row in found["methods"])
    run = RunFolder.load(tmp_path)
    assert (run.plan.method, run.measured.executor, len(run.measured.ops)) == ("single", "servers", len(run.graph))


@pytest.mark.parametrize("name", ["digits.py", "reviews.py"])
def test_the_first_fit_is_compared(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    said, found = compared(capsys, "--workers=thread", "--placement_methods=m_topo", SCRIPTS / name)
    rows = {row["method"]: row for row in found["methods"]}
    assert found["model"].endswith(f".train_step of {name}")
    assert "there the script was ended" in found["notes"][0]
    assert list(rows) == ["single", "m_topo"]
    for row in rows.values():
        assert (len(row["measured_step_us"]["samples"]), row["parity"]["passed"]) == (2, True)
        assert row["parity"]["compared"] > 8
        assert row["parity"]["max_rel_diff"] <= 1e-5
    assert "loss" not in said


@pytest.mark.parametrize(("noise", "checked"), [("", True), ("+ tf.random.normal((8, 1))", False)])
def test_the_first_step_that_is_called_again_is_compared_and_ends_the_script(
    noise: str, checked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script, elsewhere = tmp_path / "train.py", tmp_path / "elsewhere"
    elsewhere.mkdir()
    script.write_text(TRAINS.replace("NOISE", noise))
    monkeypatch.chdir(tmp_path)
    said, found = compared(capsys, "--placement_methods=m_topo", "--out=c", "train.py", "--", elsewhere / "x")
    assert said == "as before True 1\n"
    assert found["model"] == "step of train.py"
    for row in found["methods"]:
        assert len(row["measured_step_us"]["samples"]) == 2
        assert (row["parity"] is not None) is checked
    assert any("no results were compared" in note for note in found["notes"]) is not checked
    assert not list(elsewhere.iterdir())
    assert RunFolder.load(tmp_path / "c").measured.clock == "run_metadata"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print('done')", "ended (exit code 0) before a training step could be compared: it had fitted no Keras model"),
        ("raise ValueError('mine')", "ended (exit code 1) before a training step"),
        (TRAINS.replace("NOISE", "").replace("    return {", "    tf.print(loss)\n    return {"), "take tf.print and other text out of"),
    ],
)
def test_what_cannot_be_compared(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the script goes, and where this process would stay
    script = tmp_path / "train.py"
    script.write_text(text)
    assert main([*COMPARE, "--workers=thread", str(script), "--", str(tmp_path / "x")]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
