"""SIGTERM, with which Slurm (every process of a job) and Kubernetes (the first one) end a run: as Ctrl-C, with exit code 143, and soon."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from baechi_ext.ir import OpGraph, Plan
from baechi_runtime.files.run_folder import RunFolder
from tests.processes import children_of
from tests.runtime.forked import Forked, start
from tests.runtime.trainings import STEP, baechi, costs_of, losses_of, undisturbed
from tests.runtime.workers import finish, only_error

WITHIN = 20.0
"""Seconds in which everything ends: twice what a watch in each process allows, since the machine may be busy."""
SMALL = ("--model_name=wide_towers", "--image_size=8", "--batch_size=2", "--comm_cost_coeffs=0.001,100")
TINY = (*SMALL, "--image_size=2", "--d_model=8", "--num_layers=1")
"""A step of TensorFlow that is captured and profiled in a quarter of the time."""
STEPS_OF = {"tensorflow": TINY, "sharding": SMALL[:-1]}
"""Steps of other kinds of runs; a sharded one has no links of a plan."""
ENDLESS = ("--placement_method=contiguous", "--num_steps=1000000", "--device_speeds=1")
SEARCH = ("--placement_method=refine", "--time_limit=3600")
SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
for step in range(10**9):
    model(torch.randn(16, 64)).square().mean().backward()
    if step == 40:
        import sys
        print("measuring", file=sys.stderr, flush=True)
"""


def descendants(pid: int) -> list[int]:
    return [found for child in children_of(pid) for found in (child, *descendants(child))]


def begun(kept: Path, process: Forked | subprocess.Popen) -> None:
    """Returns when the first checkpoint is there, behind which steps are trained."""
    while not (kept / "step_00000000" / "checkpoint.json").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    time.sleep(0.3)


def ended(
    process: Forked | subprocess.Popen, said: str, *, everybody: bool = False, stopped: bool = False, kind: signal.Signals = signal.SIGTERM
) -> tuple[int, str]:
    """The exit code, and the one error, of a run that is told to end once it has `said` something. Nothing of it is left, and soon."""
    for line in process.stderr if said else ():
        if line.startswith(said):
            break
    started = descendants(process.pid)
    for pid in started if stopped else ():
        os.kill(pid, signal.SIGSTOP)
    begin = time.monotonic()
    for pid in [*started, process.pid] if everybody else [process.pid]:
        os.kill(pid, kind)
    code, _, err = finish(process, timeout=60)
    assert time.monotonic() - begin < WITHIN
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)
    return code, only_error(err)


def hidden_in(folder: Path) -> list[str]:
    """Names of what is there for a while: locks, files and folders that are being written."""
    return [path.name for path in folder.rglob(".*")]


KINDS = {
    "threads": ("train", *ENDLESS),
    "processes": ("train", *ENDLESS, "--workers=process"),
    "tensorflow": ("train", *ENDLESS, "--framework=tensorflow"),
    "sharding": ("train", "--sharding=pase", "--num_steps=1000000"),
    "compare": ("compare", "--placement_methods=m_etf,contiguous", "--num_steps=1000000"),
}


OTHERS = [pytest.param(kind, True, marks=pytest.mark.slow) for kind in ("tensorflow", "sharding")]
"""Servers that are all told to end are seen in a training below, and groups of worker processes in "processes"."""


@pytest.mark.parametrize(
    ("kind", "everybody"),
    [*((kind, False) for kind in KINDS), ("processes", True), *OTHERS],  # those that are left are one process
)
def test_measured_steps(tmp_path: Path, kind: str, everybody: bool) -> None:
    flags = KINDS[kind]
    process = start(flags[0], *STEPS_OF.get(kind, SMALL), *flags[1:], f"--out={tmp_path}")
    code, said = ended(process, "measuring", everybody=everybody)
    kept = "" if kind == "sharding" else f"; {tmp_path / 'plan.json'} is kept"
    assert (code, said.partition(", and so are")[0]) == (143, f"error: interrupted{kept}")
    assert hidden_in(tmp_path) == []


@pytest.mark.parametrize(
    ("workers", "kind", "exit_code"),
    [("thread", signal.SIGHUP, 129), ("process", signal.SIGTERM, 143), ("process", signal.SIGINT, 130)],
)
def test_scripts(tmp_path: Path, workers: str, kind: signal.Signals, exit_code: int) -> None:
    """Interrupted, worker 0 of several does not wait for the others to say that they leave, which took 12 seconds."""
    (tmp_path / "script.py").write_text(SCRIPT)
    flags = ("--placement_method=random", "--keep_placed", "--comm_cost_coeffs=0.001,100", f"--workers={workers}")
    process = start("train", *flags, f"--out={tmp_path / 'run'}", str(tmp_path / "script.py"))
    code, said = ended(process, "measuring", kind=kind)
    assert (code, said) == (exit_code, "error: interrupted")
    assert hidden_in(tmp_path) == []
    found = RunFolder.load(tmp_path / "run")
    assert found.plan.method == "random"


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_searches_keep_their_best_plan(tmp_path: Path, workers: str) -> None:
    process = start("train", *SMALL, *SEARCH, "--device_speeds=1", f"--workers={workers}", f"--out={tmp_path}")
    assert ended(process, "  best") == (143, f"error: interrupted; the best plan found until then is {tmp_path / 'plan.json'}")
    assert hidden_in(tmp_path) == []
    graph = tmp_path / "graph.json"
    Plan.load(tmp_path / "plan.json", OpGraph.load(graph))
    process = start("place", str(graph), "--num_devices=2", *SEARCH, f"--out={tmp_path / 'placed.json'}")
    assert ended(process, "  best") == (143, "error: interrupted; this is the best plan found until then")
    Plan.load(tmp_path / "placed.json", OpGraph.load(graph))


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> str:
    return costs_of(tmp_path_factory.mktemp("costs"))


@pytest.fixture(scope="module")
def whole(costs: str) -> Callable[[int], list[float]]:
    """The losses of a training that never ended."""
    return undisturbed(partial(losses_of, costs))


@pytest.mark.parametrize(
    ("workers", "how"),
    [
        ("thread", {}),
        ("process", {}),
        ("process", {"everybody": True}),
        ("process", {"stopped": True}),
        pytest.param("process", {"stopped": True, "kind": signal.SIGINT}, marks=pytest.mark.slow),
    ],
)
def test_trainings_keep_a_checkpoint_of_the_step(
    tmp_path: Path, costs: str, whole: Callable[[int], list[float]], workers: str, how: dict
) -> None:
    """And go on from it to the losses of one that never ended."""
    kept = tmp_path / "kept"
    flags = (*STEP, costs, f"--checkpoint={kept}", "--checkpoint_every=1000000", f"--workers={workers}")
    process = start(*flags, "--train_steps=1000000")
    begun(kept, process)
    code, said = ended(process, "", **how)
    assert code == (130 if "kind" in how else 143)
    found = re.fullmatch(r"error: interrupted; this was step \d+: --resume goes on from the checkpoint of step ([1-9]\d*)", said)
    assert found, said
    step = int(found[1])
    assert hidden_in(kept) == []
    assert losses_of(costs, f"--train_steps={step + 2}", f"--checkpoint={kept}", "--resume") == whole(step + 2)


def test_a_training_that_a_shell_started_in_the_background_keeps_its_checkpoint(tmp_path: Path, costs: str) -> None:
    """Ctrl-C is ignored there, and goes on to be: as by a container's entry point that ends its training by SIGTERM."""
    flags = (*STEP, costs, f"--checkpoint={tmp_path}", "--checkpoint_every=1000000", "--train_steps=1000000")
    process = baechi(*flags, wrapper=("sh", "-c", 'trap "" INT; exec "$@"', "sh"))
    begun(tmp_path, process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    code, said = ended(process, "")
    assert code == 143
    assert re.fullmatch(r"error: interrupted; this was step \d+: --resume goes on from the checkpoint of step [1-9]\d*", said), said
    assert hidden_in(tmp_path) == []


@pytest.mark.parametrize("everybody", [pytest.param(False, marks=pytest.mark.slow), True])
def test_trainings_of_tensorflow_keep_a_checkpoint_of_the_step(tmp_path: Path, everybody: bool) -> None:
    flags = (*TINY, "--placement_method=contiguous", "--train_steps=1000000", f"--checkpoint={tmp_path}", "--checkpoint_every=1000000")
    process = start("train", "--framework=tensorflow", *flags)
    begun(tmp_path, process)
    code, said = ended(process, "", everybody=everybody)
    assert code == 143
    assert re.fullmatch(r"error: interrupted; this was step \d+: --resume goes on from the checkpoint of step [1-9]\d*", said), said
    assert hidden_in(tmp_path) == []


def test_stopped_servers_of_tensorflow(tmp_path: Path) -> None:
    process = start("train", "--framework=tensorflow", *TINY, "--placement_method=contiguous", "--num_steps=1000000")
    assert ended(process, "measuring", stopped=True, kind=signal.SIGINT)[0] == 130
