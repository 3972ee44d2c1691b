"""Reading GPUs: a recorded driver with four of them, pairs on NVLink and the pairs on two processors, takes the place of NVML."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from baechi_ext.cost import fit_link
from baechi_ext.errors import MissingBackendError
from baechi_ext.ir import Link
from baechi_runtime.measure.link_probe import LinkProbe
from baechi_runtime.torch import cluster as gpu_cluster
from baechi_runtime.torch.cluster import free_bytes, measured_cluster, topology
from baechi_runtime.torch.lowering.devices import CudaDevice, memory_bytes, uuids_of_gpus
from baechi_runtime.torch.lowering.gpus import Gpus, Tie, read_gpus
from baechi_runtime.torch.lowering.memory_limit import CONTEXT_BYTES, CUDA_SLACK_BYTES, plannable_bytes

GIB = 2**30


class NVMLError(Exception):
    pass


class Driver:
    """Two links tie 0 to 1 and 2 to 3, a third one is down; 0 and 1 are on one PCIe switch. `switched`: all have four links to a switch."""

    NVML_NVLINK_MAX_LINKS = 6
    NVMLError = NVMLError
    peers = {0: 1, 1: 0, 2: 3, 3: 2}

    def __init__(self, switched: bool = False, running: bool = True) -> None:
        self.switched, self.running, self.open = switched, running, 0

    def nvmlInit(self) -> None:
        if not self.running:
            raise NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if not uuid.startswith("GPU-") or int(uuid[4:]) > 3:
            raise NVMLError("Not Found")
        return int(uuid[4:])

    def nvmlDeviceGetCount(self) -> int:
        return 4

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, gpu: int) -> str | bytes:
        return b"NVIDIA T" if gpu == 3 else "NVIDIA T"

    def nvmlDeviceGetPciInfo(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"00000000:{gpu + 10:02X}:00.0")

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(total=16 * GIB, free=(16 - gpu) * GIB)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, gpu: int) -> int:
        if gpu == 3:
            raise NVMLError("Not Supported")
        return 4

    def nvmlDeviceGetMaxPcieLinkWidth(self, gpu: int) -> int:
        return 16

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=35 if gpu == 1 else 0)

    def nvmlDeviceGetP2PStatus(self, a: int, b: int, index: int) -> int:
        assert index == 2
        return 0 if self.switched or self.peers[a] == b else 5

    def nvmlDeviceGetNvLinkState(self, gpu: int, link: int) -> int:
        if link >= 5:
            raise NVMLError("Invalid Argument")
        return int(link < (4 if self.switched else 2))

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: int, link: int) -> int:
        return 2 if self.switched else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: int, link: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"00000000:{self.peers[gpu] + 10:02x}:00.0".encode())

    def nvmlDeviceGetTopologyCommonAncestor(self, a: int, b: int) -> int:
        return 10 if {a, b} == {0, 1} else 30 if {a, b} == {2, 3} else 50


def read(*numbers: int, **options: bool) -> Gpus:
    return read_gpus([f"GPU-{n}" for n in numbers], Driver(**options))


def test_without_names_all_are_read() -> None:
    assert read_gpus(None, Driver()) == read(0, 1, 2, 3)


def test_names_memory_and_use() -> None:
    found = read(3, 1)
    assert [(g.name, g.bus_id, g.memory_bytes, g.free_bytes, g.utilisation, g.pcie) for g in found.gpus] == [
        ("NVIDIA T", "00000000:0D:00.0", 16 * GIB, 13 * GIB, 0.0, "PCIe"),
        ("NVIDIA T", "00000000:0B:00.0", 16 * GIB, 15 * GIB, 0.35, "PCIe 4 x16"),
    ]
    assert found.busy() == ["cuda:1 (NVIDIA T) was 35% busy before this run began"]


def test_ties_are_of_the_pairs_in_the_order_asked_for() -> None:
    found = read(2, 0, 3)
    near, far = Tie(2, "one PCIe host bridge"), Tie(0, "the link between processors")
    assert found.ties == {(0, 1): far, (0, 2): near, (1, 0): far, (1, 2): far, (2, 0): near, (2, 1): far}
    assert found.alike() == {far: [(0, 1), (1, 0), (1, 2), (2, 1)], near: [(0, 2), (2, 0)]}
    assert [str(tie) for tie in (near, far, Tie(1, "one board"))] == ["2 NVLinks", "PCIe through the link between processors", "1 NVLink"]


def test_it_is_said_in_words() -> None:
    assert read(0, 1, 2).lines() == [
        "GPUs: 3 x NVIDIA T (PCIe 4 x16)",
        "2 NVLinks: 0-1; PCIe through the link between processors: 0-2, 1-2",
    ]
    assert read(2, 3).lines()[0] == "GPUs: 1 x NVIDIA T (PCIe 4 x16), 1 x NVIDIA T (PCIe)"
    assert read(0).lines() == ["GPUs: 1 x NVIDIA T (PCIe 4 x16)"]


class Executor:
    """Links take 2 us on NVLinks, 5 us elsewhere."""

    def __init__(self, *numbers: int) -> None:
        self.devices = tuple(map(CudaDevice, numbers))
        self.probed: list[tuple[int, int]] = []

    def memory_bytes(self) -> list[int]:
        return [memory_bytes(device, 1) for device in self.devices]

    def probe_link(self, source: int, target: int) -> LinkProbe:
        self.probed.append((source, target))
        ends = self.devices[source].torch_device.index, self.devices[target].torch_device.index
        us = 2.0 if Driver.peers[ends[0]] == ends[1] else 5.0
        samples = [(4, us), (4096, 2 * us)]
        return LinkProbe({size: (taken,) for size, taken in samples}, fit_link(samples))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch sees the driver's four GPUs."""
    gpu_cluster._topology.cache_clear()
    monkeypatch.setattr(gpu_cluster, "uuids_of_gpus", lambda indices: [f"GPU-{i}" for i in indices])
    monkeypatch.setattr(gpu_cluster, "read_gpus", lambda uuids: read_gpus(uuids, Driver()))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: index)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=15 * GIB))
    yield
    gpu_cluster._topology.cache_clear()


def test_a_link_of_each_kind_is_probed(machine: None) -> None:
    executor = Executor(0, 1, 2, 3)
    cluster, probe = measured_cluster(executor, topology(executor.devices), None, threads=True)
    assert executor.probed == [(0, 1), (0, 2), (2, 3)]
    assert [[round(link.latency_us, 2) for j, link in enumerate(row) if j != i] for i, row in enumerate(cluster.link_table())] == [
        [2.0, 5.0, 5.0], [2.0, 5.0, 5.0], [5.0, 5.0, 2.0], [5.0, 5.0, 2.0],
    ]  # fmt: skip
    assert [(d.name, d.memory_bytes) for d in cluster.devices] == [(f"cuda:{i}", plannable_bytes(15 * GIB)) for i in range(4)]
    assert not cluster.parallel_transfers
    assert round(probe.fit.latency_us, 2) == 2.0


def test_links_alike_are_one(machine: None) -> None:
    executor = Executor(0, 1)
    cluster, _ = measured_cluster(executor, topology(executor.devices), None, threads=True)
    assert (executor.probed, cluster.pairs) == ([(0, 1)], {})


def test_a_given_link_is_taken(machine: None) -> None:
    executor = Executor(0, 1, 2)
    cluster, probe = measured_cluster(executor, topology(executor.devices), Link(1.0, 7.0), threads=True)
    assert (executor.probed, probe, cluster.default, cluster.pairs) == ([], None, Link(1.0, 7.0), {})


def test_without_the_driver_all_links_count_as_the_first(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(uuids: list[str]) -> Gpus:
        raise MissingBackendError("no driver")

    monkeypatch.setattr(gpu_cluster, "read_gpus", refuse)
    executor = Executor(0, 1, 2)
    found = topology(executor.devices)
    cluster, _ = measured_cluster(executor, found, None, threads=True)
    assert (executor.probed, cluster.pairs) == ([(0, 1)], {})
    assert found.notes == ["all links are taken to be alike: no driver"]


def test_what_is_free_counts_what_this_process_holds(machine: None) -> None:
    assert free_bytes(Executor(2, 1).devices) == [plannable_bytes(14 * GIB + 2), plannable_bytes(15 * GIB + 1)]


def test_what_is_free_on_another_machine_is_not_known_here() -> None:
    devices = [CudaDevice(0), CudaDevice(0)]
    devices[1].node = 1
    with pytest.raises(MissingBackendError, match="--use_free_memory is for the GPUs of one machine"):
        free_bytes(devices)


def test_links_to_a_switch_lead_to_all() -> None:
    assert {tie.nvlinks for tie in read(0, 1, 2, 3, switched=True).ties.values()} == {4}


def test_the_session_is_ended_whatever_happens() -> None:
    driver = Driver()
    read_gpus(["GPU-0"], driver)
    with pytest.raises(MissingBackendError, match=r"does not tell what was asked \(Not Found\)"):
        read_gpus(["GPU-9"], driver)
    assert driver.open == 0


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingBackendError, match=r"does not answer \(Driver Not Loaded\); check whether nvidia-smi runs"):
        read(0, running=False)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(MissingBackendError, match=r"needs nvidia-ml-py .*; pip install 'baechi-ext\[nvidia\]'"):
        read_gpus(["GPU-0"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_driver_and_torch_speak_of_the_same_gpus() -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    found = read_gpus(uuids_of_gpus(range(torch.cuda.device_count())))
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    assert [gpu.name for gpu in found.gpus] == [p.name for p in properties]
    assert all(abs(gpu.memory_bytes / p.total_memory - 1) < 0.1 for gpu, p in zip(found.gpus, properties, strict=True))


def test_a_gpu_has_room_for_less_than_it_has() -> None:
    """The driver's context, the libraries' workspaces and the allocator's segments take some."""
    room = plannable_bytes(80 * GIB)
    assert 60 * GIB < room < 64 * GIB
    assert room * 1.25 + CUDA_SLACK_BYTES + CONTEXT_BYTES == pytest.approx(80 * GIB)
    assert plannable_bytes(GIB / 2) == 0
    page = (Path(__file__).parents[2] / "docs" / "run.md").read_text(encoding="utf-8")
    assert f"beyond {(CONTEXT_BYTES + CUDA_SLACK_BYTES) / 2**20:.0f} MiB" in page
