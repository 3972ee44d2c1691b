"""`baechi probe-links`: the communication benchmark, between PyTorch's devices."""

from functools import partial

from baechi_ext.ir import Device
from baechi_runtime.drivers.link_report import LinkReport, ProbeRequest, probe_all
from baechi_runtime.torch.backend import with_executor
from baechi_runtime.torch.cluster import by_reference, free_bytes, topology
from baechi_runtime.torch.processes.executor import Executor, follow


def probe_links(request: ProbeRequest) -> LinkReport | None:
    """Probes every directed pair of devices and writes what the request names. None in a worker that does not report.

    Raises ExecutionError where a worker fails, MissingBackendError for too few CUDA devices.
    """
    return with_executor(request, partial(_probe_all, request), lambda group, devices: follow(group, devices[group.rank]))


def _probe_all(request: ProbeRequest, executor: Executor) -> LinkReport:
    notes = tuple(topology(executor.devices).notes)
    memory = free_bytes(executor.devices) if request.use_free_memory else executor.memory_bytes()
    devices = tuple(Device(d.name, size) for d, size in zip(executor.devices, memory, strict=True))
    parallel = request.workers == "thread" and by_reference(executor.devices)
    return probe_all(request, devices, executor.probe_link, parallel=parallel, notes=notes)
