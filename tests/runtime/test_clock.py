"""The clock of the day is set back and forth by a day while a step is profiled, placed and trained: nothing that is waited for or timed
goes by it."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.runtime.trainings import STEP, baechi, losses_of
from tests.runtime.workers import finish

SOURCE = Path(__file__).with_name("jumping_clock.c")
DAY_SECONDS = 86400
TENSORFLOW = [
    *("train", "--framework=tensorflow", "--model_name=gnmt_v2", "--rnn_units=8", "--vocab_size=50", "--max_seq_length=4"),
    *("--batch_size=2", "--optimizer=adam", "--learning_rate=0.001", "--placement_method=contiguous"),
]
STEPS = "--train_steps=40"


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that lets the clock jump; seen to do so."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc)")
    library = tmp_path_factory.mktemp("clock") / "jumping_clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE], check=True)
    look = "import time; seen = [(time.time(), time.sleep(0.25)) for _ in range(8)]; print(max(seen)[0] - min(seen)[0])"
    seen = subprocess.run([sys.executable, "-c", look], env={"LD_PRELOAD": str(library)}, capture_output=True, text=True, check=True)
    if float(seen.stdout) < DAY_SECONDS:
        pytest.skip("this system preloads no library")
    return library


def trained(clock: Path | None, *flags: str) -> tuple[list[float], list[float]]:
    """The losses on processes, and the times of the steps in microseconds."""
    environment = {} if clock is None else {"LD_PRELOAD": str(clock)}
    code, out, err = finish(baechi(*flags, STEPS, "--workers=process", "--timeout=30", "--json", **environment))
    assert code == 0, err
    found = json.loads(out)
    return found["losses"], found["measured_step_us"]["samples"]


def require_times(times_us: list[float]) -> None:
    assert all(0 < time_us < DAY_SECONDS * 1e6 / 2 for time_us in times_us)


def test_a_clock_that_jumps_changes_no_training(clock: Path) -> None:
    losses, times_us = trained(clock, *STEP)
    assert losses == losses_of(STEPS)
    require_times(times_us)


@pytest.mark.slow
def test_a_clock_that_jumps_changes_no_training_on_servers(clock: Path) -> None:
    if find_spec("tensorflow") is None:
        pytest.skip("tensorflow is not installed")
    losses, times_us = trained(clock, *TENSORFLOW)
    assert losses == trained(None, *TENSORFLOW)[0]
    require_times(times_us)
