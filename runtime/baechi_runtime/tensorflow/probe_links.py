"""`baechi probe-links --framework=tensorflow`: the communication benchmark, between TensorFlow's devices."""

from contextlib import ExitStack

from baechi_ext.errors import OptionError
from baechi_ext.ir import Device
from baechi_runtime.host.host_memory import usable_bytes
from baechi_runtime.report.link_report import LinkReport, ProbeRequest, reported, sizes_bytes
from baechi_runtime.report.progress import progress
from baechi_runtime.tensorflow.servers.devices import Devices, Logical, Servers
from baechi_runtime.tensorflow.servers.gpus import Gpus
from baechi_runtime.tensorflow.servers.links import probe_link

_LARGEST_EXPONENT = 26
"""256 MiB: several tensors are in flight at a time, and a message holds 2 GiB at most."""


def probe_links(request: ProbeRequest) -> LinkReport:
    """Probes every directed pair of devices and writes what the request names.

    Raises OptionError for a single device, ExecutionError where a server fails, MissingBackendError for too few GPUs.
    """
    if request.num_devices < 2:
        raise OptionError("a link has two ends; give --num_devices=2 or more")
    if request.split_gpu or request.use_free_memory:
        raise OptionError("--split_gpu and --use_free_memory are for --framework=torch here; drop them")
    with ExitStack() as stack:
        opened = _devices(request)
        stack.enter_context(opened)
        devices: Devices = opened
        kind = "gpu" if request.cuda else "cpu"
        count = range(len(devices.names))
        sizes = sizes_bytes(min(request.max_exponent, _LARGEST_EXPONENT), len(devices.names))
        probes = {}
        for source, target in ((s, t) for s in count for t in count if s != t):
            with progress(f"probing {kind}:{source} -> {kind}:{target}"):
                probes[source, target] = probe_link(devices, source, target, sizes)
        held = None if request.cuda else usable_bytes() // len(devices.names)
        named = tuple(Device(f"{kind}:{i}", held) for i in count)
        return reported(request, named, probes, parallel=isinstance(devices, Logical))


def _devices(request: ProbeRequest) -> Gpus | Logical | Servers:
    if request.cuda:
        return Gpus(request.num_devices, timeout_seconds=request.timeout_seconds)
    make = Logical if request.workers == "thread" else Servers
    return make(request.num_devices, timeout_seconds=request.timeout_seconds)
