"""Worker processes of CUDA devices. What needs no such device is checked everywhere; the rest, on two of them over NCCL, where they are."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from baechi_ext.errors import ExecutionError, MissingBackendError
from baechi_runtime.torch.lowering.devices import cpu_devices, cuda_workers
from baechi_runtime.torch.lowering.memory_limit import CUDA_SLACK_BYTES, CudaMemoryLimit
from baechi_runtime.torch.processes import worker_group
from baechi_runtime.torch.processes.crash_log import CrashLog
from baechi_runtime.torch.processes.executor import ProcessExecutor
from baechi_runtime.torch.processes.launch import run_workers
from baechi_runtime.torch.processes.rank_part import RankPart
from baechi_runtime.torch.processes.worker_group import WorkerGroup
from tests.runtime.models_on_processes import STEPS
from tests.runtime.workers import ROOT, finish, only_error, start, torchrun, wait_for_line, workers_of
from tests.torch_steps import capture, make_step, scattered

needs_two_devices = pytest.mark.skipif(
    torch.cuda.device_count() < 2 or not dist.is_nccl_available(), reason="needs two CUDA devices, and torch with NCCL"
)
MODEL = ["--model_name=rnnlm", "--batch_size=4", "--vocab_size=60", "--max_seq_length=4", "--rnn_units=64"]
STEP = ["train", *MODEL, "--workers=process", "--num_gpus=2", "--placement_method=m_etf", "--comm_cost_coeffs=1e-5,10"]
ENDLESS = [*STEP, "--num_steps=1000000", "--timeout=10"]


def test_a_worker_that_says_why_it_fails_is_believed_however_it_ends() -> None:
    with pytest.raises(ExecutionError, match="^the cause$"):
        run_workers([], 2, module="tests.runtime.last_words")


def test_workers_of_several_machines_need_only_their_own_devices() -> None:
    found = torch.cuda.device_count()
    with pytest.raises(MissingBackendError, match=f"asks for 200 CUDA devices, 100 of them here, and this machine has {found};"):
        cuda_workers(200, {"LOCAL_WORLD_SIZE": "100"})
    with pytest.raises(MissingBackendError, match=f"asks for 100 CUDA devices and this machine has {found};"):
        cuda_workers(100, {})


@pytest.mark.gpu
@needs_two_devices
def test_workers_take_the_devices_in_turn() -> None:
    workers = cuda_workers(4, {"LOCAL_WORLD_SIZE": "2"})
    assert [(w.name, w.torch_device.index) for w in workers] == [("cuda:0", 0), ("cuda:1", 1), ("cuda:2", 0), ("cuda:3", 1)]


@pytest.mark.gpu
@needs_two_devices
def test_parity_and_twenty_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A placer's plan and scattered ones. Kernels are told to be deterministic; the optimizer's of the unplaced step are other ones."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    command = [sys.executable, "-m", "tests.runtime.models_on_processes", "2", "--cuda", "wide_towers", "gnmt_v2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in ("wide_towers", "gnmt_v2"):
        parity, losses = found[name]["parity"], found[name]["losses"]
        assert len(parity) == 4
        assert all(p["passed"] for p in parity.values()), parity
        assert all(devices == [0, 1] for method, devices in found[name]["devices"].items() if method != "m_etf")
        assert len(losses["eager"]) == STEPS
        assert losses["placed"] == pytest.approx(losses["eager"], rel=1e-4)


@pytest.mark.gpu
@needs_two_devices
@pytest.mark.parametrize("launcher", [start, torchrun])
def test_train(launcher: Callable[..., subprocess.Popen]) -> None:
    code, out, err = finish(launcher(*STEP, "--num_steps=3", "--placement_method=contiguous", "--json"))
    assert code == 0, err
    report = json.loads(out)
    assert (report["executor"], report["num_devices"], report["parity"]["passed"]) == ("cuda processes", 2, True)
    assert report["transfers"] > 0
    step_us = report["measured_step_us"]["placed"]["median"]
    assert all(0 < busy < step_us for busy in report["busy_us"]["measured"])
    assert all(peak > 0 for peak in report["peak_memory_bytes"]["measured"])


@pytest.mark.gpu
@needs_two_devices
def test_links_are_probed(tmp_path: Path) -> None:
    flags = ["probe-links", "--workers=process", "--num_gpus=2", "--max_exponent=20", f"--out={tmp_path / 'cluster.json'}"]
    code, out, err = finish(start(*flags))
    assert code == 0, err
    assert len(re.findall(r"^Communication cost function: \S+ x \+ \S+$", out, re.MULTILINE)) == 2
    assert out.count("of which the sender is busy") == 2
    assert (tmp_path / "cluster.json").exists()


@pytest.mark.gpu
@needs_two_devices
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_ends_all_with_its_name(rank: int) -> None:
    process = start(*ENDLESS)
    wait_for_line(process, "measuring")
    workers = workers_of(process.pid)
    os.kill(workers[rank], signal.SIGKILL)
    code, out, err = finish(process, timeout=30)
    assert (code, out) == (1, "")
    assert f"the worker of device {rank} was killed by SIGKILL" in only_error(err)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers.values())


@pytest.mark.gpu
@needs_two_devices
def test_a_worker_that_stands_still_is_named_after_the_time_out() -> None:
    process = start(*ENDLESS)
    wait_for_line(process, "measuring")
    workers = workers_of(process.pid)
    os.kill(workers[1], signal.SIGSTOP)
    begin = time.monotonic()
    code, _, err = finish(process, timeout=90)
    assert code == 1
    assert "device 1" in only_error(err)
    assert time.monotonic() - begin < 60
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_exceeds_the_limit_is_refused_and_what_fits_is_not() -> None:
    device, more = torch.device("cuda", 0), 64 * 2**20
    with CudaMemoryLimit(more, device):
        assert torch.ones(more // 2, dtype=torch.uint8, device=device)[-1] == 1
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(2 * (more + CUDA_SLACK_BYTES), dtype=torch.uint8, device=device)
    assert torch.ones(2 * (more + CUDA_SLACK_BYTES), dtype=torch.uint8, device=device)[-1] == 1


# What is done where memory ends or a peer stands still; the parts of it that need no CUDA device


def group_of_cuda_workers(timeout_seconds: float = 0.2) -> WorkerGroup:
    return WorkerGroup(0, 2, dist.HashStore(), timeout_seconds, CrashLog.make(2), tagged=False)


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Notes what leaving the group does; its alarm is not set."""
    done: list[object] = []
    monkeypatch.setattr(worker_group.signal, "alarm", done.append)
    monkeypatch.setattr(worker_group, "abort_process_group", lambda: done.append("aborted"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("left"))
    return done


def test_a_group_is_left_in_peace_where_all_leave(ending: list[object]) -> None:
    with group_of_cuda_workers():
        pass
    assert ending == ["left"]


def test_a_peer_that_stands_still_while_all_leave_is_waited_for_until_the_time_out(
    ending: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = threading.Event()
    monkeypatch.setattr(dist, "destroy_process_group", peer.wait)
    with group_of_cuda_workers():
        begin = time.monotonic()
    assert ending == [worker_group._ENDING_SECONDS, "aborted"]
    assert time.monotonic() - begin < 20
    peer.set()


def test_after_an_error_nobody_is_waited_for(ending: list[object]) -> None:
    with pytest.raises(ExecutionError, match="the cause"), group_of_cuda_workers():
        raise ExecutionError("the cause")
    assert ending == [worker_group._ENDING_SECONDS, "aborted"]


def test_a_plan_for_which_rank_0_has_no_memory_ends_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: RankPart) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    monkeypatch.setattr(RankPart, "load", load)
    monkeypatch.setattr(WorkerGroup, "command", lambda self, value: None)
    step = make_step("tied")
    graph, binding = capture(step)
    executor = ProcessExecutor(WorkerGroup(0, 2, dist.HashStore(), 0.2, CrashLog.make(2)), cpu_devices(2))
    with pytest.raises(ExecutionError, match=r"device cpu:0 was loaded: CUDA out of memory. Tried to allocate 2 GiB.; use"):
        executor.load(scattered(graph, 2, 0), binding, step)
    executor.__exit__(None, None, None)
