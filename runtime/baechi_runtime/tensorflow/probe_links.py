"""`baechi probe-links --framework=tensorflow`: the communication benchmark, between TensorFlow's devices."""

from functools import partial
from itertools import permutations

from baechi_ext.errors import OptionError
from baechi_runtime.measure.link_probe import sound
from baechi_runtime.report.link_report import LinkReport, ProbeRequest, reported, sizes_bytes
from baechi_runtime.report.progress import progress
from baechi_runtime.tensorflow.backend import devices_of
from baechi_runtime.tensorflow.cluster import placer_devices
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
    with devices_of(request) as devices:
        names = devices.short_names
        sizes = sizes_bytes(min(request.max_exponent, _LARGEST_EXPONENT), len(names))
        probes = {}
        for source, target in permutations(range(len(names)), 2):
            with progress(f"probing {names[source]} -> {names[target]}"):
                once = partial(probe_link, devices, source, target, sizes)
                probes[source, target] = sound(once, copies=not devices.shared_memory)
        return reported(request, placer_devices(devices), probes, parallel=devices.shared_memory)
