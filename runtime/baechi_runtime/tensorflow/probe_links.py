"""`baechi probe-links --framework=tensorflow`: the communication benchmark, between TensorFlow's devices."""

from dataclasses import replace
from functools import partial

from baechi_runtime.drivers.link_report import LinkReport, ProbeRequest, probe_all
from baechi_runtime.tensorflow.backend import devices_of
from baechi_runtime.tensorflow.cluster import placer_devices
from baechi_runtime.tensorflow.servers.links import probe_link

_LARGEST_EXPONENT = 26
"""256 MiB: several tensors are in flight at a time, and a message holds 2 GiB at most."""


def probe_links(request: ProbeRequest) -> LinkReport:
    """Probes every directed pair of devices and writes what the request names.

    Raises ExecutionError where a server fails, MissingBackendError for too few GPUs.
    """
    request = replace(request, max_exponent=min(request.max_exponent, _LARGEST_EXPONENT))
    with devices_of(request) as devices:
        return probe_all(request, placer_devices(devices), partial(probe_link, devices), parallel=devices.shared_memory)
