"""The project's whole CUDA path on four pretended devices: placed steps compute what the unplaced one computes, whatever the order in which
the devices get to their work; nothing asks for what a device does not have; memory and calls are those that were planned."""

import json
import re
import signal
import statistics
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import pytest
import torch

from baechi_ext.cost import Profile
from baechi_ext.errors import ExecutionError
from baechi_ext.simulate.one_device import one_device_timeline
from baechi_runtime.cli.main import main
from baechi_runtime.drivers.pipeline import PlanRequest
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.torch.backend import TorchBackend, on_devices
from baechi_runtime.torch.parity import check_parity
from baechi_runtime.torch.profiler import ProfileOptions, profile_step
from tests.cuda_stub import kernels
from tests.runtime.workers import finish, only_error, start, wait_for_line
from tests.torch_steps import capture, make_step, scattered

T = TypeVar("T")
STEPS = 6
ROUNDING = 512
"""Bytes of which torch's allocator gives multiples."""
RNNLM = "--model_name=rnnlm --batch_size=4 --vocab_size=60 --max_seq_length=4 --rnn_units=64 --num_steps=3"
TRANSFORMER = "--model_name=transformer --batch_size=4 --vocab_size=60 --max_seq_length=6 --num_layers=1 --d_model=32 --d_ff=64 "
devices = pytest.mark.parametrize("split", [False, True], ids=["four GPUs", "four parts of one"])
graphs = pytest.mark.parametrize("graphs", [False, True], ids=["ops", "graphs"])


def on_cuda(drive: Callable[[TorchBackend], T], num_devices: int = 4, *, split: bool = False, graphs: bool = False) -> T:
    request = TrainRequest(
        "", PlanRequest(), num_devices=num_devices, cuda=True, split_gpu=split, cuda_graphs=graphs, timeout_seconds=60
    )
    found = on_devices(request, drive)
    assert found is not None
    return found


def parity_passes(seed: int, backend: TorchBackend) -> bool:
    step = make_step("tied", "momentum")
    graph, binding = capture(step)
    kernels.order(seed)
    return check_parity(backend.executor, scattered(graph, 4, seed), binding, step).passed


@graphs
@devices
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_parity_in_any_order(seed: int, *, split: bool, graphs: bool) -> None:
    assert on_cuda(partial(parity_passes, seed), split=split, graphs=graphs)


def lost_wait(self: torch.cuda.Stream, *_: object) -> None:
    """An order that the host forgot."""


@devices
def test_a_forgotten_wait_would_be_found(*, split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", lost_wait)
    try:
        passed = on_cuda(partial(parity_passes, 1), split=split)
    except ExecutionError:  # of a kernel, whose operand is nonsense
        passed = False
    assert not passed


def losses(seed: int | None, backend: TorchBackend) -> list[float]:
    step = make_step("tied", "momentum")
    graph, binding = capture(step)
    kernels.order(seed)
    placed = backend.executor.load(scattered(graph, 4, 2), binding, step)
    return [placed.run()[0].item() for _ in range(STEPS)]


@graphs
@devices
def test_steps_are_the_same_in_any_order(*, split: bool, graphs: bool) -> None:
    expected = on_cuda(partial(losses, None), split=split)
    assert expected[-1] < expected[0]
    for seed in (1, 2, 3):
        assert on_cuda(partial(losses, seed), split=split, graphs=graphs) == pytest.approx(expected, rel=1e-5)


def calls_of_a_step(num_devices: int, backend: TorchBackend) -> tuple[Counter[str], int]:
    """Calls of the runtime in one of many steps, which are all alike, and how many tensors move in it."""
    step = make_step("tied", "momentum")
    graph, binding = capture(step)
    timeline = one_device_timeline(graph) if num_devices == 1 else scattered(graph, num_devices, 1)
    placed = backend.executor.load(timeline, binding, step)
    found: list[Counter[str]] = []
    for _ in range(STEPS):
        before = Counter(kernels.calls())
        placed.run()
        found.append(Counter(kernels.calls()) - before)
        del found[-1]["cudaSetDevice"]  # a thread does so only where another device was its last
    print(dict(found[-1]), len(timeline.transfers), "transfers")
    assert found[-1] == found[-2]
    return found[-1], len(timeline.transfers)


@pytest.mark.parametrize("num_devices", [1, 4])
def test_a_step_calls_the_runtime_as_often_as_its_ops_and_transfers_need(num_devices: int) -> None:
    calls, transfers = on_cuda(partial(calls_of_a_step, num_devices), num_devices)
    assert calls["cudaMalloc"] == calls["cudaFree"] == calls["cudaDeviceSynchronize"] == 0
    # Marks of each device's step; for a tensor that moves one behind it, two of torch's copy, and those that free its memory.
    assert calls["cudaEventRecordWithFlags"] <= 2 * num_devices + 6 * transfers
    assert calls["cudaStreamWaitEvent"] <= 6 * transfers
    assert calls["cudaStreamSynchronize"] <= 6 * num_devices


def test_a_step_of_graphs_launches_graphs_and_hardly_else() -> None:
    calls, _ = on_cuda(partial(calls_of_a_step, 1), 1, graphs=True)
    assert calls["cudaGraphLaunch"] == 1
    assert calls["cudaMemcpyAsync"] <= 5  # two inputs to the device and to their fixed places, and the loss
    assert calls["cuda_stub_launch"] <= 1


def train(flags: str, capsys: pytest.CaptureFixture[str], model: str = RNNLM) -> dict[str, object]:
    assert main(["train", *f"{model} {flags} --json".split()]) == 0
    return json.loads(capsys.readouterr().out)


@graphs
@pytest.mark.parametrize("devices", ["--num_gpus=1", "--num_gpus=4", "--split_gpu=4"])
def test_train(devices: str, *, graphs: bool, capsys: pytest.CaptureFixture[str]) -> None:
    report = train(f"--placement_method=contiguous {devices} {'--no_cuda_graphs' * (not graphs)}", capsys)
    assert report["parity"]["passed"]
    assert any("CUDA graph" in note for note in report["notes"]) == graphs


@graphs
@pytest.mark.parametrize("devices", ["--num_gpus=1", "--num_gpus=4"])
def test_no_op_of_the_host_is_asked_of_a_device(devices: str, *, graphs: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Attention has a kernel of its own for each kind of device."""
    flags = f"--placement_method=random {devices} {'--no_cuda_graphs' * (not graphs)}"
    report = train(flags, capsys, f"{TRANSFORMER} --num_heads=4 --num_steps=3")
    assert report["parity"]["passed"]


@graphs
@pytest.mark.parametrize("devices", ["--num_gpus=1", "--num_gpus=4"])
def test_the_allocator_gives_about_what_was_planned(devices: str, *, graphs: bool, capsys: pytest.CaptureFixture[str]) -> None:
    peaks = train(f"--placement_method=contiguous {devices} {'--no_cuda_graphs' * (not graphs)}", capsys)["peak_memory_bytes"]
    for predicted, measured in zip(peaks["predicted"], peaks["measured"], strict=True):
        # Tensors that other devices send come when these are ready, and small gradients may wait to be taken in together.
        assert 0 <= measured <= 1.5 * predicted + 64 * ROUNDING
    assert sum(peaks["measured"]) > sum(peaks["predicted"]) / 2


def profiled(split: bool, backend: TorchBackend) -> Profile:
    step = make_step("tied", "momentum")
    graph, binding = capture(step)
    before = step.snapshot()
    profile = profile_step(backend.executor, graph, binding, step, ProfileOptions(warmup=0, repeats=3))
    assert all(torch.equal(value, before[name]) for name, value in step.state().items())
    assert not split or leftovers() == []
    return profile


def leftovers() -> list[str]:
    """Threads that launch steps."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]


@devices
def test_costs_are_scaled_to_graphs_and_parts_are_timed_side_by_side(*, split: bool) -> None:
    profile = on_cuda(partial(profiled, split), split=split, graphs=True)
    assert len(profile.pass_us) == 3
    assert sum(profile.compute_us().values()) == pytest.approx(statistics.median(profile.pass_us))
    if not split:
        assert profile.contention is None
    else:
        assert profile.contention is not None
        assert (profile.contention.devices, len(profile.contention.pass_us)) == (4, 3)
    alone = on_cuda(partial(profiled, split), split=split)
    assert (alone.pass_us, alone.contention) == ((), None)


def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *f"{RNNLM} --num_gpus=4 --placement_methods=contiguous,m_etf --json".split()]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["parity"]["passed"] for row in report["methods"]] == [True, True, True]  # and that of one device


def test_a_process_leaves_without_a_word() -> None:
    code, out, err = finish(start("train", *RNNLM.split(), "--num_gpus=4"))
    assert code == 0
    assert "parity" in out
    assert not re.search(r"Traceback|Error|cuda stub", err)


def test_ctrl_c_ends_it_in_a_line() -> None:
    process = start("train", *RNNLM.split(), "--num_gpus=4", "--num_steps=1000000")
    wait_for_line(process, "measuring")
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process, timeout=60)
    assert code == 130
    assert only_error(err).startswith("error: interrupted")
