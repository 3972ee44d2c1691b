"""A small training by command line, for tests that interrupt it: its flags, its losses, its checkpoints."""

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from baechi_runtime.cli.main import main
from tests.runtime.forked_workers import ForkedWorkers
from tests.runtime.workers import ROOT

STEP = [
    *("train", "--model_name=wide_towers", "--image_size=8", "--batch_size=2", "--optimizer=adam", "--learning_rate=0.001"),
    *("--placement_method=contiguous", "--comm_cost_coeffs=0.001,100", "--device_speeds=1"),
]
"""No search, no link to probe, and no speeds to compare."""
GPT2 = ("--model_name=gpt2", "--batch_size=4", "--vocab_size=60", "--max_seq_length=6", "--num_layers=1", "--d_model=32", "--num_heads=4")
TIMEOUT_SECONDS = 240


def costs_of(folder: Path) -> str:
    """The flag that spares runs the profile."""
    path = folder / "cost.json"
    here("--costgen", f"--cost_path={path}")
    return f"--cost_path={path}"


def here(*flags: str, step: Sequence[str] = STEP) -> str:
    """The output of the training in this process, with threads as devices."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([*step, *flags]) == 0
    return out.getvalue()


def baechi(*flags: str, module: str = "baechi_ext", wrapper: tuple[str, ...] = (), **environment: str) -> subprocess.Popen:
    """`baechi` in a process of its own."""
    return subprocess.Popen(
        [*wrapper, sys.executable, "-m", module, *flags],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def losses_of(*flags: str, workers: ForkedWorkers | None = None) -> list[float]:
    """The losses of a training that is to end well, on threads of this process or on two worker processes."""
    out = here(*flags, "--json") if workers is None else workers.run("baechi_on_processes", 2, *STEP, *flags, "--workers=process", "--json")
    return json.loads(out)["losses"]


def undisturbed(losses_of: Callable[[str], list[float]]) -> Callable[[int], list[float]]:
    """The losses of this many steps of a training that nothing happens to: the first of a longer one's, where there was one."""
    known: list[float] = []

    def losses(steps: int) -> list[float]:
        if len(known) < steps:
            known[:] = losses_of(f"--train_steps={steps + 50}")
        return known[:steps]

    return losses


def steps_in(checkpoints: Path) -> list[int]:
    """The complete checkpoints in a folder; there is nothing else in it."""
    return sorted(int(path.name.removeprefix("step_")) for path in checkpoints.iterdir())
