"""`baechi probe-links`: the communication benchmark, between PyTorch's devices."""

from functools import partial

from baechi_ext.errors import OptionError
from baechi_ext.ir import Device
from baechi_runtime.measure.link_probe import sound
from baechi_runtime.report.link_report import LinkReport, ProbeRequest, reported, sizes_bytes
from baechi_runtime.report.progress import progress
from baechi_runtime.torch.backend import with_executor
from baechi_runtime.torch.cluster import by_reference, free_bytes, topology
from baechi_runtime.torch.processes.executor import Executor, follow


def probe_links(request: ProbeRequest) -> LinkReport | None:
    """Probes every directed pair of devices and writes what the request names. None in a worker that does not report.

    Raises OptionError for a single device, ExecutionError where a worker fails, MissingBackendError for too few CUDA devices.
    """
    if request.num_devices < 2:
        raise OptionError("a link has two ends; give --num_devices=2 or more")
    return with_executor(request, partial(_probe_all, request), lambda group, devices: follow(group, devices[group.rank]))


def _probe_all(request: ProbeRequest, executor: Executor) -> LinkReport:
    notes = tuple(topology(executor.devices).notes)
    sizes = sizes_bytes(request.max_exponent, len(executor.devices))
    probes = {}
    ranks = range(len(executor.devices))
    parallel = request.workers == "thread" and by_reference(executor.devices)
    for source, target in ((s, t) for s in ranks for t in ranks if s != t):
        with progress(f"probing {executor.devices[source].name} -> {executor.devices[target].name}"):
            probes[source, target] = sound(partial(executor.probe_link, source, target, sizes), copies=not parallel)
    memory = free_bytes(executor.devices) if request.use_free_memory else executor.memory_bytes()
    devices = tuple(Device(d.name, size) for d, size in zip(executor.devices, memory, strict=True))
    return reported(request, devices, probes, parallel=parallel, notes=notes)
