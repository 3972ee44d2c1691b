"""TensorFlow as a backend: a server process per device, logical devices of this process, or GPUs."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import tensorflow as tf

from baechi_ext.capture.groups import Groups
from baechi_ext.capture.tensorflow_graph import CapturedFunction, capture_function
from baechi_ext.errors import CaptureError, ExecutionError, OptionError
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.ir.measured import MeasuredStep
from baechi_ext.simulate import Timeline
from baechi_runtime.drivers import costing
from baechi_runtime.drivers.backend import Trained, TrainingBackend
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.host.host_memory import usable_bytes
from baechi_runtime.measure.link_probe import LinkProbe
from baechi_runtime.measure.parity_result import Parity
from baechi_runtime.measure.samples import Measurement
from baechi_runtime.measure.timing import StepTimes, measure_in_turn
from baechi_runtime.report.progress import progress
from baechi_runtime.tensorflow.cluster import find_cluster, short_names
from baechi_runtime.tensorflow.lowering.placed_graph import placed_graph
from baechi_runtime.tensorflow.measure import load_of_others, oversubscribed, peak_bytes, timed_step
from baechi_runtime.tensorflow.parity import check_parity
from baechi_runtime.tensorflow.profiler import CLOCK, profile
from baechi_runtime.tensorflow.servers.accounting import accounted_peak_bytes
from baechi_runtime.tensorflow.servers.devices import Devices, Logical, Servers, listens
from baechi_runtime.tensorflow.servers.gpus import Gpus
from baechi_runtime.tensorflow.servers.session import PlacedSession
from baechi_runtime.tensorflow.servers.step_recorder import SEVERAL_HOSTS, record_step
from baechi_runtime.tensorflow.step import Captured, TensorFlowStep, build_step
from baechi_runtime.tensorflow.trained_step import TrainedSession
from baechi_runtime.tensorflow.verify import draws_anew

T = TypeVar("T")
SLACK_BYTES = 64 * 1024 * 1024
"""Room for a step beyond its tensors: scratch memory of kernels, and gaps that no tensor fits into."""
_POLL_SECONDS = 1.0
_MISSES = 3
"""Looks in a row in which the first host is not there, until it is taken to be done."""


@dataclass(frozen=True)
class Loaded:
    """A placed step in a session, and where it runs."""

    session: PlacedSession
    timeline: Timeline
    devices: Devices


def on_devices(request: TrainRequest, drive: "Callable[[TensorFlowBackend], T]") -> T | None:
    """The value of `drive` for the devices of the request. Of several hosts the first one drives; the others serve until it is done, and
    return None. Raises OptionError for what is torch's alone, MissingBackendError where there are too few GPUs, ExecutionError."""
    require_taken(request)
    if request.task_index > 0:
        serve(request)
        return None
    one_thread()
    with ExitStack() as stack:
        return drive(TensorFlowBackend(request, *open_devices(request, stack)))


def require_taken(request: TrainRequest) -> None:
    """Raises OptionError for what is torch's alone."""
    for name in ("cuda_graphs", "use_free_memory", "relaxed_random"):
        if getattr(request, name):
            raise OptionError(f"--{name} is for --framework=torch; drop it")


def one_thread() -> None:
    """This process computes unplaced steps with one thread, as a device does."""
    with contextlib.suppress(RuntimeError):  # somebody used TensorFlow before; the pools are what they are
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)


def serve(request: TrainRequest) -> None:
    """Serves one of several hosts until the first one, which drives, is gone. Raises ExecutionError where it never comes."""
    hosts = request.cluster_hosts or ()
    limits = memory_limits(request)
    with Servers(len(hosts), limits, hosts=hosts, task=request.task_index, timeout_seconds=request.timeout_seconds) as servers:
        deadline, seen, misses = time.monotonic() + request.timeout_seconds, False, 0
        with progress(f"serving device {request.task_index} at {hosts[request.task_index]} for {hosts[0]}"):
            while misses < _MISSES:
                there = listens(hosts[0])
                seen, misses = seen or there, misses + 1 if seen and not there else 0
                if not seen and time.monotonic() > deadline:
                    waited = f"{hosts[0]}, which drives, did not come within {request.timeout_seconds:g} s"
                    raise ExecutionError(f"{waited}; start it, or raise --timeout")
                if gone := [server.ended() for server in servers.servers if server.ended()]:
                    raise ExecutionError(f"{gone[0]}; check whether the machine ran out of memory")
                time.sleep(_POLL_SECONDS)


def memory_limits(request: TrainRequest) -> list[int | None]:
    """Bytes that each server may allocate: the limit asked for and some slack; None without a limit. A plan keeps to the machine's
    memory, too."""
    given: list[int | float | None] = [request.device_memory] * request.num_devices
    if request.device_memory is None and request.cluster is not None:
        given = [d.memory_bytes for d in request.cluster.devices]
    return [None if size is None else int(size) + SLACK_BYTES for size in given]


def open_devices(request: TrainRequest, stack: ExitStack) -> tuple[Devices, Devices]:
    """Where the step is profiled and runs on one device; and where it runs placed: the same, unless memory is limited."""
    seconds, count = request.timeout_seconds, request.num_devices
    if request.cuda:
        if request.split_gpu and request.device_memory is None:
            raise OptionError("--split_gpu needs to know what each part may hold; give --device_memory=SIZE")
        gpus = stack.enter_context(Gpus(count, part_bytes=request.device_memory if request.split_gpu else None, timeout_seconds=seconds))
        return gpus, gpus
    if request.workers == "thread":
        logical = stack.enter_context(Logical(count, timeout_seconds=seconds))
        return logical, logical
    limits, hosts = memory_limits(request), request.cluster_hosts
    with progress(f"starting {count} servers"):
        if hosts is not None:
            servers = stack.enter_context(Servers(count, limits, hosts=hosts, timeout_seconds=seconds))
            servers.await_hosts()
            return servers, servers
        if not any(limits):
            servers = stack.enter_context(Servers(count, timeout_seconds=seconds))
            return servers, servers
        # With a limit that none reaches: other kernels are chosen where there is one.
        free = stack.enter_context(Servers(count, [usable_bytes()] * count, timeout_seconds=seconds))
        return free, stack.enter_context(Servers(count, limits, timeout_seconds=seconds))


def capture(request: TrainRequest) -> tuple[TensorFlowStep, CapturedFunction]:
    """The model's step, and its capture, whose graph is without costs."""
    with progress(f"building {request.model}"):
        step = build_step(request.model, request.model_options, request.optimizer, request.learning_rate)
    with progress(f"capturing the training step of {request.model}"):
        kind = "GPU" if request.cuda else "CPU"
        function = capture_function(
            step.function, step.signature(), optimizer=step.optimizer, expert=step.expert, name=request.model, device_type=kind
        )
    return step, function


def with_gradients_beside(graph: OpGraph) -> OpGraph:
    """Each backward and update op in the colocation group of its forward op."""
    groups = Groups()
    for v, op in enumerate(graph.ops):
        if op.colocation is not None:
            groups.join(v, op.colocation)
        if op.forward_op is not None:
            groups.join(v, graph.index[op.forward_op])
    return graph.replace_ops(groups.labelled(graph.ops))


def costed(request: TrainRequest, captured: CapturedFunction, step: TensorFlowStep, devices: Devices) -> Captured:
    """A captured step with its costs, read from `cost_path` or measured on the first device; without first values of its variables. Raises
    MismatchError, ExecutionError; and first what hints and pins raise."""
    if request.colocate_grads_with_ops:
        captured = replace(captured, graph=with_gradients_beside(captured.graph))
    found = costing.costed(request, captured.graph, short_names(devices), CLOCK, lambda: profile(captured, step, devices))
    return Captured(found.graph, found.alone, found.profile, step, captured, {})


def kind_of_executor(request: TrainRequest) -> str:
    """The name that reports give to what runs the devices."""
    if request.cuda:
        return "one gpu split" if request.split_gpu else "gpus"
    if request.cluster_hosts is not None:
        return "servers of several hosts"
    return "logical devices" if request.workers == "thread" else "servers"


def load(captured: Captured, timeline: Timeline, devices: Devices) -> PlacedSession:
    """The step, placed as the timeline says, with its first values and inputs. Devices keep to its order."""
    graph = timeline.graph
    where = {op.id: d for op, d in zip(graph.ops, timeline.placement, strict=True)}
    order = [graph.ops[v].id for v in timeline.started]
    session = PlacedSession(placed_graph(captured.function, where, devices.names, order=order), devices)
    session.initialise(captured.first)
    session.feed(captured.step.inputs)
    devices.planned_bytes = timeline.peak_memory_bytes
    return session


def unplaced_step(step: TensorFlowStep) -> Callable[[], object]:
    """The user's own step, with all of TensorFlow's rewriting, on inputs that are in memory already."""
    function, inputs = tf.function(step.function), [tf.constant(x) for x in step.inputs]
    return lambda: [np.asarray(x) for x in tf.nest.flatten(function(*inputs))]


def unplaced_name() -> str:
    """The name that reports give to the unplaced step: with one thread, unless a script chose another number."""
    count = tf.config.threading.get_intra_op_parallelism_threads()
    return f"tf.function, {'one thread' if count == 1 else f'{count} threads' if count else 'a thread a core'}"


class TensorFlowBackend(TrainingBackend[Captured, Loaded]):
    """Devices that placed steps run on; `free` are those for a step on one device: the same, unless memory is limited."""

    def __init__(self, request: TrainRequest, free: Devices, bound: Devices) -> None:
        self.request = request
        self.devices = bound
        self._free = free
        self.kind = kind_of_executor(request)
        self.unplaced = unplaced_name()
        self.peaks_measured_by = "accounting" if bound.shared_memory else "allocator"
        self._kept: Loaded | None = None
        """The plan that was checked last: it is loaded already."""

    def capture(self) -> Captured:
        """See Backend."""
        step, function = capture(self.request)
        found = costed(self.request, function, step, self._free)
        return replace(found, first={v.shared_name: v.variable.numpy() for v in function.variables})

    def cluster(self) -> tuple[Cluster, LinkProbe | None]:
        """See Backend."""
        return find_cluster(self.request, self._free)

    def in_parts(self, captured: Captured, parts: int | Sequence[int]) -> Captured:
        """See Backend."""
        raise CaptureError("TensorFlow's steps run with their whole batch; drop --microbatches, or give --framework=torch")

    def load(self, captured: Captured, timeline: Timeline, *, alone: bool = False) -> Loaded:
        """See Backend."""
        kept, self._kept = self._kept, None
        if kept is not None and kept.timeline is timeline and kept.devices is self._where(alone):
            return kept
        if kept is not None:
            kept.session.close()
        return self._load(captured, timeline, self._where(alone))

    def check(self, captured: Captured, timeline: Timeline, *, alone: bool = False) -> Parity | None:
        """See Backend."""
        self._kept = loaded = self.load(captured, timeline, alone=alone)
        return None if draws_anew(captured.function) else check_parity(captured, loaded.session)

    def peak_bytes(self, captured: Captured, timeline: Timeline, *, alone: bool = False) -> tuple[int, ...]:
        """See Backend. Other plans that are loaded hold constants, which count."""
        self._kept = loaded = self.load(captured, timeline, alone=alone)
        if loaded.devices.shared_memory:
            return accounted_peak_bytes(loaded.session, timeline)
        return peak_bytes(loaded.session, loaded.devices)

    def measure(self, captured: Captured, loaded: Mapping[str, Loaded], num_steps: int, on_step: Callable[[int], None]) -> Measurement:
        """See Backend. A server's busy time is what its process spends on its core, transfers included."""
        groups = list({id(step.devices): step.devices for step in loaded.values()}.values())
        one_machine = all(len(d.servers) == len(d.names) for d in groups if isinstance(d, Servers))
        unplaced = unplaced_step(captured.step)
        variants: dict[str, Callable[[], StepTimes]] = {"eager": lambda: timed_step(unplaced, None)}
        variants |= {name: partial(timed_step, step.session.run, step.devices) for name, step in loaded.items()}
        load = partial(load_of_others, lambda: groups, one_machine=one_machine)
        return measure_in_turn(variants, load, num_steps=num_steps, on_step=on_step, oversubscribed=oversubscribed(groups))

    def record(self, captured: Captured, loaded: Loaded) -> MeasuredStep:
        """See Backend."""
        notes = () if self.request.cluster_hosts is None else (SEVERAL_HOSTS,)
        shared = loaded.devices.shared_memory
        return record_step(loaded.session, loaded.timeline, self.kind, shared_memory=shared, notes=notes)

    def trained(self, loaded: Loaded) -> Trained:
        """See Backend."""
        return TrainedSession(loaded.session)

    def notes(self, loaded: Loaded) -> Sequence[str]:
        """See Backend."""
        limited = "memory is limited, so oneDNN is off on the devices: it ends a process that runs out of memory"
        return [limited] if any(memory_limits(self.request)) else []

    def arithmetic(self) -> str:
        """See Backend."""
        return "gpu" if self.request.cuda else "cpu without oneDNN" if any(memory_limits(self.request)) else "cpu"

    def _where(self, alone: bool) -> Devices:
        return self._free if alone else self.devices

    def _load(self, captured: Captured, timeline: Timeline, devices: Devices) -> Loaded:
        return Loaded(load(captured, timeline, devices), timeline, devices)
