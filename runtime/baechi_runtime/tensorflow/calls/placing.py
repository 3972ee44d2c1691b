"""Placing the steps of a user's program: devices that run as long as the program does, and the stages between capture and plan."""

import atexit
from contextlib import ExitStack

import numpy as np

from baechi_ext.capture.tensorflow_graph import CapturedFunction
from baechi_runtime.drivers.placement import Placement, log_device_placement, place
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.host.fork_lock import ForkLock
from baechi_runtime.tensorflow.backend import costed, memory_limits, open_devices
from baechi_runtime.tensorflow.cluster import find_cluster
from baechi_runtime.tensorflow.servers.devices import Devices
from baechi_runtime.tensorflow.step import TensorFlowStep

_opened = ExitStack()
_devices: dict[tuple[object, ...], tuple[Devices, Devices]] = {}
_placing = ForkLock()
"""Models that are fitted in several threads are placed one after the other: they share devices, and what is measured there."""
atexit.register(_opened.close)


def shared_devices(request: TrainRequest) -> tuple[Devices, Devices]:
    """Where steps are profiled, and where they run placed. All placed steps of a program share them. Those of which one is gone are closed,
    and others started for the steps that are placed from now on."""
    sizes = (request.num_devices, *memory_limits(request), request.cluster_hosts, request.timeout_seconds)
    key = (request.workers, request.cuda, request.split_gpu, *sizes)
    if any(devices.gone() for devices in _devices.get(key, ())):
        for devices in _devices.pop(key):
            devices.close()
    if key not in _devices:
        _devices[key] = open_devices(request, _opened)
    return _devices[key]


def opened() -> list[Devices]:
    """All devices that the program's steps run on by now."""
    return list(dict.fromkeys(d for pair in _devices.values() for d in pair))


def place_step(request: TrainRequest, captured: CapturedFunction, inputs: tuple[np.ndarray, ...]) -> Placement:
    """The plan of a captured step, with costs read from the request's `cost_path` or measured on the first device; the best one so
    far where its search was interrupted.

    Raises what the stages raise: MismatchError, InfeasibleError, ExecutionError, ClusterError.
    """
    with _placing:
        devices, _ = shared_devices(request)
        step = TensorFlowStep(lambda *_: None, inputs)
        placement = place(request, costed(request, captured, step, devices), find_cluster(request, devices))
    if request.log_device_placement:
        log_device_placement(placement)
    return placement
