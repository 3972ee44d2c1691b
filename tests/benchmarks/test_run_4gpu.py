"""The unattended table: which commands it gives, that it goes on after a failure, and where it left off. A script stands for Python: it
notes its arguments and writes the files that it is asked for."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "run_4gpu.sh"
PYTHON = """#!/bin/sh
[ "$1" = -c ] && { echo "$GPUS"; exit; }
echo "$@" >> "$COMMANDS"
case "$*" in
    *"$BROKEN"*) echo loading; echo "error: $BROKEN is broken" >&2; exit 1 ;;
    *step_time_table*) echo "a table of $(($# - 2))" ;;
esac
for argument; do
    case $argument in --out=*|--samples=*) echo "{}" > "${argument#*=}" ;; esac
done
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    path = tmp_path / "python"
    path.write_text(PYTHON)
    path.chmod(0o755)
    return path


def run(python: Path, **environment: str) -> tuple[int, str, str, list[str]]:
    """Exit code, stdout, stderr, and the commands given."""
    commands = python.parent / "commands"
    commands.write_text("")
    files = {"PYTHON": str(python), "COMMANDS": str(commands)}
    chosen = {"GPUS": "4", "BROKEN": "--nothing", "MODELS": "a b", "METHODS": "m", **files, **environment}
    command = [shutil.which("bash"), str(SCRIPT), str(python.parent / "results")]
    done = subprocess.run(command, env={**os.environ, **chosen}, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr, commands.read_text().splitlines()


@pytest.mark.parametrize(
    ("devices", "kinds"),
    [
        ("gpu", ["--num_gpus=4", "--num_gpus=4 --cuda_graphs", "--num_gpus=4 --workers=process"]),
        ("split", ["--split_gpu=4", "--split_gpu=4 --cuda_graphs"]),
        ("cpu", ["--num_devices=4", "--num_devices=4 --workers=process"]),
    ],
)
def test_every_model_runs_on_every_kind_of_devices(python: Path, devices: str, kinds: list[str]) -> None:
    code, out, err, commands = run(python, DEVICES=devices, STEPS="3", SIZES="batch_size=2 image_size=16")
    assert (code, err) == (0, "")
    steps = [c for c in commands if "benchmarks.step_time " in c]
    sizes = "--set batch_size=2 --set image_size=16"
    assert [c.split(" --out")[0] for c in steps] == [
        f"-m benchmarks.step_time --model_name={model} {kind} --methods=m --num_steps=3 {sizes}" for kind in kinds for model in "ab"
    ]
    assert len({c.split("--out=")[1] for c in steps}) == len(steps)
    assert [c.split(" --max")[0] for c in commands if "probe-links" in c] == [
        f"-m baechi_ext probe-links {kind}" for kind in kinds if "graphs" not in kind
    ]
    assert (python.parent / "results" / "step_time.md").read_text() == f"a table of {len(steps)}\n"


def test_a_failure_stops_nothing_and_is_all_that_runs_again(python: Path) -> None:
    code, out, err, commands = run(python, DEVICES="split", BROKEN="--model_name=a")
    failed = ["step_time_a_split_gpu_4", "step_time_a_split_gpu_4_cuda_graphs"]
    assert code == 1
    assert err.startswith(f"error: 2 runs failed: {' '.join(failed)}; their logs are in ")
    assert [f"{name}: failed: error: --model_name=a is broken" in out for name in failed] == [True, True]
    assert sum("--model_name=b" in c for c in commands) == 2

    code, out, err, commands = run(python, DEVICES="split")
    assert (code, err) == (0, "")
    assert [c.split()[2] for c in commands if "step_time_table" not in c] == ["--model_name=a"] * 2
    assert out.count("there already") == 3


@pytest.mark.parametrize(
    ("devices", "gpus", "code", "message"),
    [
        ("gpu", "3", 1, "DEVICES=gpu needs 4 CUDA devices and this machine has 3; DEVICES=cpu rehearses"),
        ("split", "0", 1, "DEVICES=split needs 1 CUDA devices and this machine has 0"),
        ("tpu", "4", 2, "DEVICES is tpu; give gpu, split or cpu"),
    ],
)
def test_what_is_missing_is_said_before_anything_runs(python: Path, devices: str, gpus: str, code: int, message: str) -> None:
    found, out, err, commands = run(python, DEVICES=devices, GPUS=gpus)
    assert (found, out, commands) == (code, "", [])
    assert err.startswith(f"error: {message}")
