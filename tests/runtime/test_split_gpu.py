"""One GPU as several devices. What a GPU does is tried where there is one; how it is split, counted and limited, everywhere."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from baechi_ext.errors import ExecutionError, MissingBackendError
from baechi_ext.ir import Cluster, Device
from baechi_runtime.torch.cluster import by_reference, topology
from baechi_runtime.torch.lowering import split_gpu
from baechi_runtime.torch.lowering.devices import CudaDevice, cpu_devices, memory_bytes
from baechi_runtime.torch.lowering.memory_limit import plannable_bytes
from baechi_runtime.torch.lowering.split_gpu import GpuPart
from baechi_runtime.torch.measure import measured_peak_bytes, require_room
from baechi_runtime.torch.parity import check_parity
from baechi_runtime.torch.streams.executor import StreamExecutor
from tests.runtime.workers import finish, start
from tests.torch_steps import capture, make_step, scattered

needs_a_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 132 multiprocessors and 80 GB, of which only this is known."""
    monkeypatch.setattr(split_gpu, "cuda_found", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(multi_processor_count=132, total_memory=80 * 10**9))


def test_without_a_gpu_there_is_nothing_to_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_gpu, "cuda_found", lambda: 0)
    with pytest.raises(MissingBackendError, match="--split_gpu=4 needs a CUDA device and this machine has none; use --num_devices=4"):
        split_gpu.split_gpu(4)


def test_where_green_contexts_cannot_be_had_the_parts_are_streams(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    parts = split_gpu.split_gpu(4)
    assert [part.name for part in parts] == ["cuda:0/0", "cuda:0/1", "cuda:0/2", "cuda:0/3"]
    assert {part.note.split(" (")[0] for part in parts} == {"4 streams of one GPU, which share its 132 multiprocessors"}
    assert [memory_bytes(part, len(parts)) for part in parts] == [plannable_bytes(80 * 10**9) // 4] * 4
    assert topology(parts).notes == ()


def test_green_contexts_give_each_part_its_stream(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(split_gpu, "_green_streams", lambda *wanted: asked.append(wanted) or [("first", 32), ("second", 40)])
    first, second = split_gpu.split_gpu(2)
    assert asked == [(2, 66)]
    assert (first.compute, second.compute) == ("first", "second")
    assert first.note == "2 green contexts of one GPU, with 32, 40 of its 132 multiprocessors"


def test_parts_hand_over_by_reference_as_threads_on_the_host_do() -> None:
    parts = [GpuPart(i, 2, "") for i in range(2)]
    assert by_reference(parts)
    assert by_reference(cpu_devices(2))
    assert not by_reference([CudaDevice(0), CudaDevice(1)])


def test_a_part_that_holds_more_than_its_limit_is_an_error() -> None:
    parts = [GpuPart(i, 2, "") for i in range(2)]
    cluster = Cluster(tuple(Device(part.name, 1000) for part in parts))
    require_room(parts, cluster, (1000, 1000))
    with pytest.raises(ExecutionError, match="device cuda:0/1 held 1001 bytes in a step and its limit is 1000;"):
        require_room(parts, cluster, (1000, 1001))
    require_room(cpu_devices(2), cluster, (2000, 2000))


@pytest.mark.gpu
@needs_a_device
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["branches", "tied"])
def test_four_parts_compute_what_one_device_computes(name: str, seed: int) -> None:
    step = make_step(name, "momentum")
    graph, binding = capture(step)
    timeline = scattered(graph, 4, seed)
    with StreamExecutor(split_gpu.split_gpu(4), 60) as executor:
        assert check_parity(executor, timeline, binding, step).passed
        placed = executor.load(timeline, binding, step)
        losses = [placed.run()[0].item() for _ in range(20)]
        assert losses[-1] < losses[0]
        assert all(peak > 0 for peak in measured_peak_bytes(executor, timeline, binding, step))


@pytest.mark.gpu
@needs_a_device
@pytest.mark.parametrize("graphs", [["--no_cuda_graphs"], []])
def test_train_on_a_split_gpu(graphs: list[str]) -> None:
    flags = ["--model_name=wide_towers", "--split_gpu=4", "--placement_method=m_etf", "--num_steps=3", "--json", *graphs]
    code, out, err = finish(start("train", *flags))
    assert code == 0, err
    report = json.loads(out)
    assert (report["num_devices"], report["parity"]["passed"]) == (4, True)
    assert report["executor"] == "one gpu split" + " with graphs" * (not graphs)
    assert any("of one GPU" in note for note in report["notes"])
