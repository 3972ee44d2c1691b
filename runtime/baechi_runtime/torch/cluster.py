"""The cluster that a run's devices are: names, memory, measured speeds and links; for GPUs a link of each kind that NVML tells apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from baechi_ext.errors import MissingBackendError
from baechi_ext.ir import Cluster, Device, Link
from baechi_runtime.drivers.costing import cluster_of, taking_up
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.host.variables import number_of
from baechi_runtime.measure.device_speeds import note_on, speeds_of
from baechi_runtime.measure.link_probe import LinkProbe, sound
from baechi_runtime.report.progress import progress
from baechi_runtime.report.tables import as_time
from baechi_runtime.torch.lowering.devices import TorchDevice, uuids_of_gpus
from baechi_runtime.torch.lowering.gpus import Gpus, read_gpus
from baechi_runtime.torch.lowering.memory_limit import plannable_bytes
from baechi_runtime.torch.lowering.split_gpu import GpuPart
from baechi_runtime.torch.processes.executor import Executor, LoadedStep
from baechi_runtime.torch.streams.executor import StreamStep

_GLANCE, _LOOK = (8, 0.025), (15, 0.1)
"""Windows, and the seconds of each, in which devices are compared at first; and again, where one looks slower: what takes a core from a
device for a moment is over by then, and a program that the system moves about is seen on several."""

_AS_ONE = "drop --no_cuda_graphs to give it out in one go"
_WORKSPACES = "measured peaks include cuBLAS's workspaces, some 33 MiB for each stream; the limits leave room for them"


@dataclass(frozen=True)
class Topology:
    """The GPUs of a run as NVML shows them, where it does, and lines on them for the report."""

    gpus: Gpus | None = None
    notes: Sequence[str] = ()


def topology(devices: Sequence[TorchDevice]) -> Topology:
    """Asks NVML about CUDA devices, if each is a GPU of its own in this machine; about others it asks nothing. It does so only once, so
    a run calls it before it makes them busy itself."""
    indices = [d.torch_device.index for d in devices if d.torch_device.type == "cuda" and d.share == 1]
    if len(set(indices)) < len(devices) or number_of("LOCAL_WORLD_SIZE", len(devices)) < len(devices):
        return Topology()
    return _topology(tuple(indices))


@cache
def _topology(indices: tuple[int, ...]) -> Topology:
    try:
        gpus = read_gpus(uuids_of_gpus(indices))
    except MissingBackendError as e:
        return Topology(None, [f"all links are taken to be alike: {e}"])
    return Topology(gpus, [*gpus.lines(), *gpus.busy()])


def by_reference(devices: Sequence[TorchDevice]) -> bool:
    """True if a thread executor hands tensors over without copies, so that no copy channel slows them down."""
    return all(d.torch_device.type == "cpu" or d.share > 1 for d in devices)


def measured_cluster(executor: Executor, found: Topology, given: Link | None, *, threads: bool) -> tuple[Cluster, LinkProbe | None]:
    """A cluster of the devices with all their memory, and the first link probe, if any. Without a `given` link, one pair of devices of each
    kind of tie is probed."""
    devices = executor.devices
    names = [d.name for d in devices]
    default, probe = given or Link(), None
    pairs: dict[tuple[str, str], Link] = {}
    if given is None and len(devices) > 1:
        kinds = pairs_to_probe(devices) if found.gpus is None else list(found.gpus.alike().values())
        for alike in kinds:
            with progress(f"probing the link {names[alike[0][0]]} -> {names[alike[0][1]]}"):
                measured = sound(partial(executor.probe_link, *alike[0]), copies=not (threads and by_reference(devices)))
            if probe is None:
                probe, default = measured, measured.to_link()
            elif len(kinds) > 1:
                pairs |= {(names[i], names[j]): measured.to_link() for i, j in alike}
    held = tuple(Device(name, size) for name, size in zip(names, executor.memory_bytes(), strict=True))
    return Cluster(held, default, pairs, parallel_transfers=threads and by_reference(devices)), probe


def find_cluster(request: TrainRequest, executor: Executor) -> tuple[Cluster, LinkProbe | None]:
    """See Backend.cluster. Raises ClusterError where a given cluster has another number of devices than the executor."""
    devices = executor.devices
    measured = partial(measured_cluster, executor, topology(devices), request.link, threads=request.workers == "thread")
    cluster, probe = cluster_of(request, len(devices), measured)
    if request.use_free_memory:
        free = zip(cluster.devices, free_bytes(devices), strict=True)
        cluster = cluster.each_with("memory_bytes", [min(d.memory_bytes or size, size) for d, size in free])
    return taking_up(cluster, request), probe


def with_measured_speeds(cluster: Cluster, executor: Executor) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster with the speeds that its devices show side by side, where one is certainly slower than another, and a note on them.

    Devices that share a core or a GPU wait for each other, which is no speed of theirs: they stay as they are.
    """
    devices = executor.devices
    places = {(d.node, d.torch_device.index, getattr(d, "core", None)) for d in devices}
    if len(devices) == 1 or len(places) < len(devices):
        return cluster, ()
    with progress("comparing the speeds of the devices"):
        for look in (_GLANCE, _LOOK):
            speeds = speeds_of(executor.paces(*look))
            if len(set(speeds)) == 1:
                return cluster, ()
    return cluster.each_with("speed", speeds), (note_on([d.name for d in devices], speeds),)


def pairs_to_probe(devices: Sequence[TorchDevice]) -> list[list[tuple[int, int]]]:
    """The pairs of devices on different machines, and those on one; for a single machine one pair stands for all."""
    pairs = [(i, j) for i in range(len(devices)) for j in range(len(devices)) if i != j]
    across = [(i, j) for i, j in pairs if devices[i].node != devices[j].node]
    within = [(i, j) for i, j in pairs if devices[i].node == devices[j].node]
    return [kind for kind in (across, within) if kind] if across else [pairs[:1]]


def free_bytes(devices: Sequence[TorchDevice]) -> list[int]:
    """Bytes of tensors that each device has room for in this process: in what nobody holds, and what it holds itself.

    Raises MissingBackendError where NVML cannot be asked, or not for all of them.
    """
    if len({d.node for d in devices}) > 1:
        raise MissingBackendError("--use_free_memory is for the GPUs of one machine; drop it, or give --device_memory")
    indices = sorted({d.torch_device.index for d in devices})
    gpus = read_gpus(uuids_of_gpus(indices)).gpus
    free = {index: gpu.free_bytes + torch.cuda.memory_reserved(index) for index, gpu in zip(indices, gpus, strict=True)}
    return [plannable_bytes(free[d.torch_device.index]) // d.share for d in devices]


def notes_on(devices: Sequence[TorchDevice], placed: LoadedStep) -> list[str]:
    """The report's notes on CUDA devices: which they are, how they were split, and whether their steps are CUDA graphs."""
    notes = list(topology(devices).notes)
    notes += dict.fromkeys(d.note for d in devices if isinstance(d, GpuPart))
    if isinstance(placed, StreamStep):
        host_us = placed.timeline.host_us
        if placed.executor.recorder is not None:
            notes.append(placed.note)
        elif host_us >= placed.timeline.makespan_us:
            notes.append(f"the host takes {as_time(host_us)} to give out a step's work, longer than the devices compute; {_AS_ONE}")
        if not any(d.share > 1 for d in devices):
            notes.append(_WORKSPACES)
    return notes
