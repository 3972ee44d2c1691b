"""Placing the steps of a user's program: devices that run as long as the program does, and the stages between capture and plan."""

import atexit
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from baechi_ext.capture.tensorflow_graph import CapturedFunction
from baechi_runtime.drivers.placement import Placement, log_device_placement, place
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.tensorflow.backend import costed, open_devices
from baechi_runtime.tensorflow.calls.placed_function import Settings
from baechi_runtime.tensorflow.cluster import find_cluster
from baechi_runtime.tensorflow.servers.devices import Devices
from baechi_runtime.tensorflow.step import TensorFlowStep

_opened = ExitStack()
_devices: dict[tuple[object, ...], tuple[Devices, Devices]] = {}
atexit.register(_opened.close)


def settings_of(request: TrainRequest, *, verify_steps: int = 2, fallback: bool = False, record: bool = False) -> Settings:
    """Settings by which a program's steps are placed for `request`; nothing is started yet."""

    def place(captured: CapturedFunction, inputs: tuple[np.ndarray, ...]) -> Placement:
        return place_step(request, captured, inputs)

    return Settings(request.plan.method, lambda: devices_of(request)[1], place, verify_steps, fallback, record)


def devices_of(request: TrainRequest) -> tuple[Devices, Devices]:
    """Where steps are profiled, and where they run placed. All placed steps of a program share them."""
    sizes = (request.num_devices, request.device_memory, request.cluster_hosts, request.timeout_seconds)
    key = (request.workers, request.cuda, request.split_gpu, *sizes)
    if key not in _devices:
        _devices[key] = open_devices(request, _opened)
    return _devices[key]


def opened() -> list[Devices]:
    """All devices that the program's steps run on by now."""
    return list({id(d): d for pair in _devices.values() for d in pair}.values())


def place_step(request: TrainRequest, captured: CapturedFunction, inputs: tuple[np.ndarray, ...]) -> Placement:
    """The plan of a captured step, with costs read from the request's `cost_path` or measured on the first device; the best one so
    far where its search was interrupted. It is kept in `out`.

    Raises what the stages raise: MismatchError, InfeasibleError, ExecutionError, ClusterError.
    """
    devices, _ = devices_of(request)
    variables = tuple(v.variable for v in captured.variables)
    step = TensorFlowStep(captured.graph.name, lambda *_: None, inputs, variables, None)
    placement = place(request, costed(request, captured, step, devices), find_cluster(request, devices))
    devices.planned_bytes = placement.result.timeline.peak_memory_bytes
    if request.out is not None:
        placement.save(Path(request.out), request.made_by)
    if request.log_device_placement:
        log_device_placement(placement)
    return placement
