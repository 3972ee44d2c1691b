"""What places the steps of a user's program: devices that run as long as the program does, and the stages between capture and plan."""

import atexit
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from baechi_ext.capture.tensorflow_graph import CapturedFunction
from baechi_ext.cost import Profile, attach_costs, scale_links
from baechi_ext.errors import MismatchError
from runtime import pipeline
from runtime.program import one_device_timeline
from runtime.tensorflow.placed_function import Settings
from runtime.tensorflow.placing import Placement
from runtime.tensorflow.profiler import CLOCK, profile
from runtime.tensorflow.servers import Devices
from runtime.tensorflow.step import TensorFlowStep
from runtime.tensorflow.training import Captured, find_cluster, open_devices, planned, short_names, with_gradients_beside
from runtime.train_request import TrainRequest

_opened = ExitStack()
_devices: dict[tuple, tuple[Devices, Devices]] = {}
atexit.register(_opened.close)


def settings_of(request: TrainRequest, *, verify_steps: int = 2, fallback: bool = False, record: bool = False) -> Settings:
    """How the steps of a program are placed that asks for `request`; nothing is started yet."""

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
    far where its search was interrupted.

    Raises what the stages raise: MismatchError, InfeasibleError, ExecutionError, ClusterError.
    """
    devices, _ = devices_of(request)
    variables = tuple(v.variable for v in captured.variables)
    costed = costed_step(request, captured, TensorFlowStep(captured.graph.name, lambda *_: None, inputs, variables, None), devices)
    cluster, probe = find_cluster(request, devices)
    result = planned(request, costed, scale_links(cluster, request.comm_cost_factor))
    single = one_device_timeline(costed.alone)
    return Placement(costed.graph if result.splits else single.graph, costed.profile, result, single, captured.notes, probe)


def costed_step(request: TrainRequest, captured: CapturedFunction, step: TensorFlowStep, devices: Devices) -> Captured:
    """A captured step with its costs; of its variables' first values there are none. Raises MismatchError, ExecutionError."""
    if request.colocate_grads_with_ops:
        captured = replace(captured, graph=with_gradients_beside(captured.graph))
    pipeline.prepared(captured.graph, request.plan, short_names(devices))  # what hints and pins need, told early
    if request.cost_path is not None:
        costs = Profile.load(request.cost_path, captured.graph)
        if costs.clock != CLOCK:
            raise MismatchError(f"{request.cost_path}: the costs are of the clock {costs.clock!r}; TensorFlow's are of {CLOCK!r}")
    else:
        costs = profile(captured, step, devices)
    graph = attach_costs(captured.graph, costs, contended=len(devices.names) > 1)
    return Captured(step, captured, graph, attach_costs(captured.graph, costs), costs, {})
