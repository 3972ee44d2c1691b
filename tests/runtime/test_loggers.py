"""A run's numbers and page in TensorBoard, Weights & Biases and MLflow, read by their own readers."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import baechi_ext
from baechi_ext.errors import OptionError
from baechi_runtime.cli.main import main
from baechi_runtime.measure.samples import samples_by_name
from tests.runtime.forked import run
from tests.runtime.test_call_report import calls
from tests.test_layers import ROOT

pytest.importorskip("tensorboard", reason="tensorboard is not installed")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402
from torch.utils.tensorboard import SummaryWriter  # noqa: E402

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "runtime")])}
PLACED_US, PLAIN_US = [150.0, 151.0, 149.0], [300.0] * 8
REPORT = calls(samples=samples_by_name(eager=PLAIN_US, placed=PLACED_US))
NUMBERS = {
    "baechi/step_us/placed": 150.0,
    "baechi/step_us/eager": 300.0,
    "baechi/predicted_step_us": 100.0,
    "baechi/predicted_speedup": 2.0,
    "baechi/predicted_peak_memory_bytes/0": 0.0,
    "baechi/predicted_peak_memory_bytes/1": 0.0,
}
DOUBTS = "fewer than 7 placed steps were timed (3)"
SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 10))
{begin}
for step in range(4):
    loss = model(torch.randn(8, 20)).square().mean()
    loss.backward()
{end}
"""


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_gets_every_step_and_what_one_number_says(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        baechi_ext.log(REPORT, writer)
    found = scalars(tmp_path)
    assert found.pop("baechi/steps_us/placed") == list(enumerate(PLACED_US))
    assert found.pop("baechi/steps_us/eager") == list(enumerate(PLAIN_US))
    assert found == {name: [(0, value)] for name, value in NUMBERS.items()}
    texts = EventAccumulator(str(tmp_path)).Reload().Tags()["tensors"]
    assert texts == ["baechi/doubts/text_summary"]


def test_an_interval_is_logged_where_there_is_one(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        baechi_ext.log(calls(), writer)
    found = scalars(tmp_path)
    assert [found[f"baechi/speedup_over_unplaced{end}"][0][1] for end in ("", "/low", "/high")] == [2.0, 2.0, 2.0]
    assert EventAccumulator(str(tmp_path)).Reload().Tags()["tensors"] == []


def test_a_script_and_a_model_write_scalars_where_the_flag_says(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(begin="", end=""))
    wanted = ("--placement_method=round_robin", "--num_devices=2", "--comm_cost_coeffs=0.001,50")
    placed = ("--keep_placed", "--verify_steps=1", f"--tensorboard={tmp_path / 'script'}", str(tmp_path / "train.py"))
    assert main(["train", *wanted, *placed]) == 0
    logged = scalars(tmp_path / "script")
    assert {"baechi/predicted_step_us", "baechi/predicted_speedup", "baechi/step_us/placed"} <= set(logged)
    assert "baechi/step_us/eager" not in logged
    sizes = ("--model_name=wide_towers", "--image_size=8", "--batch_size=2", "--num_steps=2")
    assert main(["train", *wanted, *sizes, f"--tensorboard={tmp_path / 'model'}"]) == 0
    found = scalars(tmp_path / "model")
    assert [len(found[f"baechi/steps_us/{name}"]) for name in ("eager", "single", "placed")] == [2, 2, 2]
    assert {"baechi/speedup_over_one_device/low", "baechi/peak_memory_bytes/1"} <= set(found)


def test_tensorboard_does_without_tensorflow(tmp_path: Path) -> None:
    """Loading it takes seconds, and it writes lines of its own where a training prints."""
    script = "import sys; from baechi_runtime.library.loggers import tensorboard_writer as writer; "
    script += f"writer({str(tmp_path)!r}).add_scalar('a', 1.0, 0); print('tensorflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_logger_that_fails_is_a_line_and_the_training_was_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=SimpleNamespace(summary={}, log_artifact=None)))
    (tmp_path / "train.py").write_text(SCRIPT.format(begin="", end=""))
    assert main(["train", "--placement_method=round_robin", "--num_devices=2", "--keep_placed", str(tmp_path / "train.py")]) == 0
    assert "baechi: Weights & Biases has logged nothing, or not all: AttributeError: " in capsys.readouterr().err


def test_weights_and_biases_gets_a_summary_and_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    (tmp_path / "train.py").write_text(
        SCRIPT.format(
            begin=f"import wandb\nrun = wandb.init(mode='offline', dir={str(tmp_path)!r})",
            end="import atexit\natexit.register(lambda: print('summary', dict(run.summary)))",
        )
    )
    monkeypatch.setenv("WANDB_SILENT", "true")
    done = run("train", "--placement_method=round_robin", "--num_devices=2", "--keep_placed", str(tmp_path / "train.py"))
    assert done.returncode == 0, done.stderr
    assert "logged nothing" not in done.stderr
    (log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"baechi/predicted_step_us" in log.read_bytes()
    assert b"baechi.html" in log.read_bytes()


@pytest.mark.filterwarnings("ignore")  # of what MLflow itself uses
def test_mlflow_gets_metrics_and_the_page_of_the_run_that_was_last(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    mlflow.set_experiment(experiment_id=mlflow.create_experiment("placed", artifact_location=(tmp_path / "artifacts").as_uri()))
    with mlflow.start_run() as begun:
        pass
    baechi_ext.log(REPORT, mlflow)
    client = mlflow.MlflowClient()
    kept = client.get_run(begun.info.run_id)
    assert {name: kept.data.metrics[name] for name in NUMBERS} == NUMBERS
    assert kept.data.tags["baechi/doubts"] == DOUBTS
    assert [metric.value for metric in client.get_metric_history(begun.info.run_id, "baechi/steps_us/placed")] == PLACED_US
    (page,) = (tmp_path / "artifacts").rglob("baechi.html")
    assert DOUBTS in page.read_text()


def test_what_is_no_logger_and_what_is_not_placed(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="str is no logger; give a SummaryWriter"):
        baechi_ext.log(REPORT, "run")
    with pytest.raises(OptionError, match="nothing to log of Net: it is not placed; too small"):
        baechi_ext.log(calls(result=None, single=None, refusal="too small"), SummaryWriter(str(tmp_path)))
