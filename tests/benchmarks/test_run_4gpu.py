"""The unattended runs: which commands they give, that they go on after a failure, and where they left off. A script stands for Python: it
notes its arguments and writes the files that it is asked for."""

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from baechi_runtime.cli.flags.compare import compare_request
from baechi_runtime.cli.main import parsed
from benchmarks.sizes import SIZES

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PYTHON = """#!/bin/sh
[ "$1" = -c ] && { echo "$GPUS"; exit; }
echo "$@" >> "$COMMANDS"
case "$*" in
    *"$BROKEN"*) echo loading; echo "error: $BROKEN is broken" >&2; exit 1 ;;
    *--tight=1.1*) echo 12345 ;;
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


def run(python: Path, script: str = "run_4gpu.sh", **environment: str) -> tuple[int, str, str, list[str]]:
    """Exit code, stdout, stderr, and the commands given."""
    commands = python.parent / "commands"
    commands.write_text("")
    files = {"PYTHON": str(python), "COMMANDS": str(commands)}
    chosen = {"GPUS": "4", "BROKEN": "--nothing", "MODELS": "a b", "METHODS": "m", **files, **environment}
    command = [shutil.which("bash"), str(BENCHMARKS / script), str(python.parent / "results")]
    done = subprocess.run(command, env={**os.environ, **chosen}, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr, commands.read_text().splitlines()


@pytest.mark.parametrize(
    ("devices", "kinds"),
    [
        ("gpu", ["--num_gpus=4", "--num_gpus=4 --no_cuda_graphs", "--num_gpus=4 --workers=process"]),
        ("split", ["--split_gpu=4", "--split_gpu=4 --no_cuda_graphs"]),
        ("cpu", ["--num_devices=4", "--num_devices=4 --workers=process"]),
    ],
)
def test_every_model_runs_on_every_kind_of_devices(python: Path, devices: str, kinds: list[str]) -> None:
    code, out, err, commands = run(python, DEVICES=devices, STEPS="3", SIZES="--batch_size=2 --image_size=16")
    assert (code, err) == (0, "")
    steps = [c for c in commands if "baechi_ext compare " in c]
    sizes, rest = "--batch_size=2 --image_size=16", "--batch_norm=per_part --placement_methods=m --time_limit=60 --num_steps=3"
    assert [c.split(" --out")[0] for c in steps] == [
        f"-m baechi_ext compare --model_name={model} {kind} {sizes} {rest}" for kind in kinds for model in "ab"
    ]
    assert len({c.split("--out=")[1] for c in steps}) == len(steps)
    assert [c.split(" --max")[0] for c in commands if "probe-links" in c] == [
        f"-m baechi_ext probe-links {kind}" for kind in kinds if "graphs" not in kind
    ]


def test_models_have_the_sizes_of_other_benchmarks(python: Path) -> None:
    code, out, err, commands = run(python, DEVICES="split", MODELS="", METHODS="m_etf")
    trains = [compare_request(parsed(c.split()[2:])).train for c in commands if "compare" in c]
    found = {train.model: replace(train.model_options, num_devices=1) for train in trains}
    assert found == {model: replace(size, num_devices=1) for model, size in SIZES.items()}


def test_a_failure_stops_nothing_and_is_all_that_runs_again(python: Path) -> None:
    code, out, err, commands = run(python, DEVICES="split", BROKEN="--model_name=a")
    failed = ["compare_a_split_gpu_4", "compare_a_split_gpu_4_no_cuda_graphs"]
    assert code == 1
    assert err.startswith(f"error: 2 runs failed: {' '.join(failed)}; their logs are in ")
    assert [f"{name}: failed: error: --model_name=a is broken" in out for name in failed] == [True, True]
    assert sum("--model_name=b" in c for c in commands) == 2

    code, out, err, commands = run(python, DEVICES="split")
    assert (code, err) == (0, "")
    assert [c.split()[3] for c in commands] == ["--model_name=a"] * 2
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


def half_an_hour(python: Path, **environment: str) -> tuple[int, str, str, list[str]]:
    return run(python, "gpu_half_hour.sh", PATH="/usr/bin:/bin", **environment)


@pytest.mark.parametrize("rehearse", ["", "1"])
def test_half_an_hour_is_the_same_in_the_rehearsal_but_for_sizes(python: Path, rehearse: str) -> None:
    code, out, err, commands = half_an_hour(python, REHEARSE=rehearse)
    assert (code, err) == (0, "")
    told = ("--model_name", "--num_gpus", "--split_gpu", "--cuda", "--no_cuda", "--device_memory")
    trained = [[word for word in c.split() if word.startswith(told)] for c in commands if "baechi_ext train" in c]
    models = ["alexnet", "gnmt_v2", "rnnlm"]
    assert sorted(trained[:4]) == [[f"--model_name={m}", "--split_gpu=2"] for m in ("rnnlm", "rnnlm", "wide_towers", "wide_towers")]
    assert trained[4:] == [
        *([f"--model_name={m}", "--num_gpus=1", *graphs] for m in models for graphs in (["--no_cuda_graphs"], [])),
        ["--model_name=alexnet", "--num_gpus=1", "--no_cuda_graphs", "--device_memory=12345"],
        *([] if rehearse else [[f"--model_name={m}", "--num_gpus=1"] for m in ("gpt2", "wide_towers")]),
    ]
    split = {c.split("--model_name=")[1].split()[0] for c in commands if "baechi_ext compare " in c}
    assert split == ({"wide_towers"} if rehearse else {"wide_towers", "inception_v3"})
    assert all(("--num_steps=2 " in c) == bool(rehearse) for c in commands if "--num_steps" in c)
    assert sum("-m pytest" in c for c in commands) == 1


def test_half_an_hour_goes_on_where_it_failed(python: Path) -> None:
    code, out, err, commands = half_an_hour(python, BROKEN="--model_name=gnmt_v2")
    assert code == 1
    assert err.startswith("error: 2 runs failed: one_gnmt_v2 one_gnmt_v2_graphs; their logs are in ")

    code, out, err, commands = half_an_hour(python)
    assert (code, err) == (0, "")
    assert ["gnmt_v2" in c for c in commands if "gpu_table" not in c] == [True, True]


def test_half_an_hour_needs_a_gpu(python: Path) -> None:
    code, out, err, commands = half_an_hour(python, GPUS="0")
    assert (code, out, commands) == (1, "", [])
    assert err == "error: there is no CUDA device here; make rehearse-gpu rehearses\n"
