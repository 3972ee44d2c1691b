"""The cluster that a run's devices are: names, memory, and a measured link."""

from functools import partial

from baechi_ext.ir import Cluster, Device, Link
from baechi_runtime.drivers.costing import cluster_of, taking_up
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.host.host_memory import usable_bytes
from baechi_runtime.measure.link_probe import LinkProbe, sound
from baechi_runtime.report.progress import progress
from baechi_runtime.tensorflow.servers.devices import Devices
from baechi_runtime.tensorflow.servers.links import probe_link


def placer_devices(devices: Devices) -> tuple[Device, ...]:
    """The devices as the placer sees them, with all their memory; that of GPUs is not known."""
    held = None if devices.kind == "gpu" else usable_bytes() // len(devices.names)
    return tuple(Device(name, held) for name in devices.short_names)


def find_cluster(request: TrainRequest, devices: Devices) -> tuple[Cluster, LinkProbe | None]:
    """See Backend.cluster. Raises ClusterError where a given cluster has another number of devices."""
    cluster, probe = cluster_of(request, len(devices.names), lambda: measured_cluster(devices, request.link))
    return taking_up(cluster, request), probe


def measured_cluster(devices: Devices, given: Link | None) -> tuple[Cluster, LinkProbe | None]:
    """A cluster of the devices with all their memory, and the link probe where one was needed: without a `given` link."""
    names, probe, link = devices.short_names, None, given or Link()
    if given is None and len(names) > 1:
        with progress(f"probing the link {names[0]} -> {names[1]}"):
            probe = sound(partial(probe_link, devices, 0, 1), copies=not devices.shared_memory)
        link = probe.to_link()
    return Cluster(placer_devices(devices), link, parallel_transfers=devices.shared_memory), probe
