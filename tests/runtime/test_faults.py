"""Trainings on real worker processes that come to harm: all processes end in time, what is said names the device and the op, nothing is
left, and a run that goes on from the last checkpoint has the losses of one that was never interrupted, bit for bit."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import ended
from tests.runtime import faulty_worker
from tests.runtime.forked import Forked, start, torchrun
from tests.runtime.forked_workers import ForkedWorkers
from tests.runtime.namespaces import on_a_small_disk, require_namespaces
from tests.runtime.trainings import STEP, TIMEOUT_SECONDS, costs_of, losses_of, steps_in
from tests.runtime.workers import finish, only_error, workers_of

STEPS = 7
ENDS_WITHIN = 20.0
"""Seconds beyond --timeout in which all processes have ended; generous, since the machine may be busy."""


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> str:
    return costs_of(tmp_path_factory.mktemp("costs"))


@pytest.fixture(scope="module")
def whole(costs: str) -> list[float]:
    """The losses of a training that nothing happens to."""
    losses = losses_of(costs, f"--train_steps={STEPS}")
    assert len(set(losses)) == STEPS
    return losses


def training(costs: str, checkpoints: Path, *flags: str) -> tuple[str, ...]:
    return (*STEP, costs, "--workers=process", f"--train_steps={STEPS}", f"--checkpoint={checkpoints}", "--checkpoint_every=2", *flags)


def harmed(fault: str, *flags: str) -> tuple[str, list[int]]:
    """The error of a run with that fault, and the ids of its workers, all of which have ended."""
    process = start(*flags, module=faulty_worker.MODULE, FAULT=fault)
    workers: dict[int, int] = {}
    while len(workers) < 2 and process.poll() is None:
        workers |= workers_of(process.pid)
        time.sleep(0.05)
    code, out, err = finish(process, timeout=TIMEOUT_SECONDS)
    assert (code, out) == (1, ""), err
    assert len(workers) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers.values())
    return only_error(err), list(workers.values())


@pytest.mark.parametrize(
    ("rank", "phase", "on_processes"),
    [
        pytest.param(1, "forward", False, marks=pytest.mark.slow),
        (1, "backward", True),
        pytest.param(1, "update", False, marks=pytest.mark.slow),
        (0, "update", False),
    ],
)
def test_a_worker_is_killed(
    costs: str, whole: list[float], workers: ForkedWorkers, tmp_path: Path, rank: int, phase: str, on_processes: bool
) -> None:
    """In its fifth step; the last checkpoint is of the fourth."""
    said, _ = harmed(f"{rank}:{phase}:5:SIGKILL", *training(costs, tmp_path / "run"))
    killed = rf"the worker of device {rank} was killed by SIGKILL in {phase} op '[\w.]+' \(its part of the plan takes \d+ bytes\); check"
    assert re.search(killed, said), said
    assert steps_in(tmp_path / "run") == [2, 4]
    flags = (f"--train_steps={STEPS}", f"--checkpoint={tmp_path / 'run'}", "--resume")
    assert losses_of(costs, *flags, workers=workers if on_processes else None) == whole
    assert steps_in(tmp_path / "run") == [4, STEPS]


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_worker_stands_still(costs: str, whole: list[float], tmp_path: Path, rank: int) -> None:
    begin = time.monotonic()
    said, _ = harmed(f"{rank}:backward:3:SIGSTOP", *training(costs, tmp_path / "run", "--timeout=3"))
    assert time.monotonic() - begin < TIMEOUT_SECONDS
    if rank == 1:
        assert re.search(r"the output of op '[\w.]+' from device 1 .*\(it was last seen in backward op '[\w.]+'\)", said), said
        assert "this was step 3: --resume goes on from the checkpoint of step 2" in said
    else:
        assert re.search(r"device 0 gave no sign of life for 3 s|output of op '[\w.]+' from device 0", said), said
    assert losses_of(costs, f"--train_steps={STEPS}", f"--checkpoint={tmp_path / 'run'}", "--resume") == whole


def test_a_worker_is_killed_while_it_saves(costs: str, whole: list[float], tmp_path: Path) -> None:
    """Its third checkpoint, of step 4, is half written."""
    said, _ = harmed("1:save:3:SIGKILL", *training(costs, tmp_path / "run"))
    assert "the worker of device 1 was killed by SIGKILL" in said
    assert losses_of(costs, f"--train_steps={STEPS}", f"--checkpoint={tmp_path / 'run'}", "--resume") == whole
    assert steps_in(tmp_path / "run") == [2, STEPS]


def endless(costs: str, checkpoints: Path) -> tuple[str, ...]:
    flags = (f"--checkpoint={checkpoints}", "--checkpoint_every=1", "--timeout=10")
    return (*STEP, costs, "--workers=process", "--train_steps=1000000", *flags)


def wait_for_checkpoints(folder: Path, process: Forked | subprocess.Popen) -> None:
    while not folder.is_dir() or not any(path.name >= "step_00000002" for path in folder.glob("step_*")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


@pytest.mark.parametrize("launcher", ["baechi", "torchrun"])
def test_the_master_is_killed(costs: str, tmp_path: Path, launcher: str) -> None:
    """Who started the workers, and holds the store through which they meet, goes without a word."""
    run = tmp_path / "run"
    process = (start if launcher == "baechi" else torchrun)(*endless(costs, run))
    try:
        wait_for_checkpoints(run, process)
        workers = list(workers_of(process.pid).values())
        assert len(workers) == 2
    finally:
        process.kill()
    assert ended(workers, 10 + ENDS_WITHIN)
    process.communicate()
    steps = max(complete(run)) + 3  # one may be unfinished
    assert losses_of(costs, f"--train_steps={steps}", f"--checkpoint={run}", "--resume") == losses_of(costs, f"--train_steps={steps}")


def complete(checkpoints: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in checkpoints.glob("step_*")]


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group for memory, where one can be made."""
    folder = Path("/sys/fs/cgroup/memory") / f"baechi_test_{os.getpid()}"
    if not (folder.parent / "memory.limit_in_bytes").exists():
        folder = Path("/sys/fs/cgroup") / folder.name
    try:
        folder.mkdir()
    except OSError as e:
        pytest.skip(f"no control group for memory can be made: {e.strerror}")
    yield folder
    folder.rmdir()


def test_the_kernel_ends_a_worker_that_runs_out_of_memory(costs: str, tmp_path: Path, memory_group: Path) -> None:
    run = tmp_path / "run"
    process = start(*endless(costs, run))
    wait_for_checkpoints(run, process)
    worker = workers_of(process.pid)[1]
    limit = next(f for name in ("memory.limit_in_bytes", "memory.max") if (f := memory_group / name).exists())
    limit.write_text("65536")
    (memory_group / "cgroup.procs").write_text(str(worker))  # what it takes from now on counts
    code, out, err = finish(process, timeout=TIMEOUT_SECONDS)
    assert (code, out) == (1, ""), err
    said = only_error(err)
    killed = r"device 1 was killed by SIGKILL.* \(its part of the plan takes \d+ bytes\); check whether the machine ran out of memory"
    assert re.search(killed, said), said


def test_the_disk_is_full(costs: str, whole: list[float], tmp_path: Path) -> None:
    """There is room for two checkpoints and a half, and a third does not fit beside them. The first of all, of step 0, is small: Adam has
    no state yet."""
    require_namespaces()
    size = sum(f.stat().st_size for f in sample(costs, tmp_path).iterdir())
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    kept.mkdir()
    command = ["-m", "baechi_ext", *training(costs, disk)]
    process = on_a_small_disk(command, disk, str(int(2.5 * size)), after=f"cp -a {disk}/. {kept}")
    code, out, err = finish(process, timeout=TIMEOUT_SECONDS)
    assert (code, out) == (1, ""), err
    said = only_error(err)
    assert re.search(rf"cannot write '{disk}/.*device_\d.safetensors': .*No space left on device", said), said
    assert "--resume goes on from the checkpoint of step 4" in said
    assert steps_in(kept) == [2, 4]
    assert losses_of(costs, f"--train_steps={STEPS}", f"--checkpoint={kept}", "--resume") == whole


def sample(costs: str, folder: Path) -> Path:
    """A checkpoint of the training."""
    losses_of(costs, "--train_steps=1", f"--checkpoint={folder / 'sample'}")
    return folder / "sample" / "step_00000001"


def test_shared_memory_is_exhausted(costs: str, whole: list[float]) -> None:
    """Workers hand tensors over through sockets and keep nothing there: a /dev/shm without a byte to spare does no harm."""
    require_namespaces()
    fill = 'head -c 9999 /dev/zero >/dev/shm/full 2>/dev/null; [ "$(df --output=avail /dev/shm | tail -1)" -eq 0 ]'
    command = ["-m", "baechi_ext", *STEP, costs, "--workers=process", f"--train_steps={STEPS}", "--json"]
    process = on_a_small_disk(command, Path("/dev/shm"), "4k", before=fill)
    code, out, err = finish(process, timeout=TIMEOUT_SECONDS)
    assert code == 0, err

    assert json.loads(out)["losses"] == whole


def test_ctrl_c_says_how_to_go_on(costs: str, tmp_path: Path) -> None:
    process = start(*endless(costs, tmp_path / "run"))
    wait_for_checkpoints(tmp_path / "run", process)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process, timeout=60)
    assert code == 130, err
    assert re.search(r"interrupted; this was step \d+: --resume goes on from the checkpoint of step \d+", only_error(err))


