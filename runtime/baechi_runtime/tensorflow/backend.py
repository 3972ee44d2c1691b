"""TensorFlow as a backend: a server process per device, logical devices of this process, or GPUs."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import tensorflow as tf
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from baechi_ext.capture.groups import Groups
from baechi_ext.capture.tensorflow_graph import CapturedFunction, capture_function
from baechi_ext.errors import CaptureError, CheckpointError, ExecutionError, OptionError
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.ir.measured import MeasuredStep
from baechi_ext.simulate import Timeline
from baechi_runtime.drivers import costing
from baechi_runtime.drivers.backend import Trained, TrainingBackend
from baechi_runtime.drivers.train_request import DevicesRequest, TrainRequest
from baechi_runtime.files.checkpoint_folder import Shard, another, verify_shard, written_shard
from baechi_runtime.host.host_memory import usable_bytes
from baechi_runtime.measure.link_probe import LinkProbe
from baechi_runtime.measure.parity_result import Parity
from baechi_runtime.measure.samples import Measurement
from baechi_runtime.measure.timing import StepTimes, measure_in_turn
from baechi_runtime.report.progress import progress
from baechi_runtime.tensorflow.cluster import find_cluster
from baechi_runtime.tensorflow.lowering.placed_graph import PlacedVariable
from baechi_runtime.tensorflow.measure import load_of_others, oversubscribed, timed_step
from baechi_runtime.tensorflow.parity import check_parity, draws_anew
from baechi_runtime.tensorflow.profiler import profile
from baechi_runtime.tensorflow.servers.devices import Devices, Gpus, Logical, Servers, listens
from baechi_runtime.tensorflow.servers.session import PlacedSession
from baechi_runtime.tensorflow.servers.step_recorder import record_step
from baechi_runtime.tensorflow.servers.traces import CLOCK, accounted_peak_bytes, peak_bytes
from baechi_runtime.tensorflow.step import Captured, TensorFlowStep, build_step

T = TypeVar("T")
SLACK_BYTES = 64 * 1024 * 1024
"""Room for a step beyond its tensors: scratch memory of kernels, and gaps that no tensor fits into."""
_POLL_SECONDS = 1.0
_MISSES = 3
"""Looks in a row in which the first host is not there, until it is taken to be done."""


def on_devices(request: TrainRequest, drive: "Callable[[TensorFlowBackend], T]") -> T | None:
    """The value of `drive` for the devices of the request. Of several hosts the first one drives; the others serve until it is done, and
    return None. Raises MissingBackendError where there are too few GPUs, ExecutionError."""
    if request.task_index > 0:
        serve(request)
        return None
    one_thread()
    with ExitStack() as stack:
        return drive(TensorFlowBackend(request, *open_devices(request, stack)))


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
                    raise ExecutionError(gone[0])
                time.sleep(_POLL_SECONDS)


def memory_limits(request: TrainRequest) -> list[int | None]:
    """Bytes that each server may allocate: the limit asked for and some slack; None without a limit, where a device may hold its share of
    the machine's memory. A plan keeps to that, too."""
    given: list[int | float | None] = [request.device_memory] * request.num_devices
    if request.device_memory is None and request.cluster is not None:
        share = usable_bytes() // (1 if request.cluster_hosts else request.num_devices)
        given = [None if d.memory_bytes is None or d.memory_bytes >= share else d.memory_bytes for d in request.cluster.devices]
    return [None if size is None else int(size) + SLACK_BYTES for size in given]


def open_devices(request: TrainRequest, stack: ExitStack) -> tuple[Devices, Devices]:
    """Where the step is profiled and runs on one device; and where it runs placed: the same, unless memory is limited."""
    seconds, count, limits = request.timeout_seconds, request.num_devices, memory_limits(request)
    if request.cuda and request.split_gpu:
        if request.device_memory is None:
            raise OptionError("--split_gpu needs to know what each part may hold; give --device_memory=SIZE")
        free: Devices = stack.enter_context(Gpus(count, part_bytes=request.device_memory, timeout_seconds=seconds))
        return free, free
    servers = not request.cuda and request.workers == "process"
    with progress(f"starting {count} servers") if servers else contextlib.nullcontext():
        if servers and request.cluster_hosts is not None:
            free = stack.enter_context(Servers(count, limits, hosts=request.cluster_hosts, timeout_seconds=seconds))
            free.await_hosts()
        elif servers and any(limits):
            # With a limit that none reaches: other kernels are chosen where there is one.
            free = stack.enter_context(Servers(count, [usable_bytes()] * count, timeout_seconds=seconds))
            return free, stack.enter_context(Servers(count, limits, timeout_seconds=seconds))
        else:
            free = stack.enter_context(devices_of(request))
    return free, free


def devices_of(request: DevicesRequest) -> Devices:
    """Devices with all their memory, on this machine; not started yet. Raises MissingBackendError where there are too few GPUs."""
    make = Gpus if request.cuda else Logical if request.workers == "thread" else Servers
    return make(request.num_devices, timeout_seconds=request.timeout_seconds)


def capture(request: TrainRequest) -> tuple[TensorFlowStep, CapturedFunction]:
    """The model's step, and its capture, whose graph is without costs."""
    with progress(f"building {request.model}"):
        step = build_step(request.model, request.model_options, request.optimizer, request.learning_rate)
    with progress(f"capturing the training step of {request.model}"):
        kind = "GPU" if request.cuda else "CPU"
        function = capture_function(step.function, step.signature(), expert=step.expert, name=request.model, device_type=kind)
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
    """A captured step with its costs, read from `cost_path` or measured on the first device, and the values that its variables have now.
    Raises MismatchError, ExecutionError; and first what hints and pins raise."""
    if request.colocate_grads_with_ops:
        captured = replace(captured, graph=with_gradients_beside(captured.graph))
    found = costing.costed(request, captured.graph, devices.short_names, CLOCK, lambda: profile(captured, step.inputs, devices))
    return Captured(found.graph, found.alone, found.profile, step, captured, captured.values())


def kind_of_executor(request: TrainRequest) -> str:
    """The name that reports give to what runs the devices."""
    if request.cuda:
        return "one gpu split" if request.split_gpu else "gpus"
    if request.cluster_hosts is not None:
        return "servers of several hosts"
    return "logical devices" if request.workers == "thread" else "servers"


def load(captured: Captured, timeline: Timeline, devices: Devices) -> PlacedSession:
    """The step, placed as the timeline says, with its first values and inputs. Devices keep to its order."""
    session = PlacedSession.of(captured.function, timeline, devices)
    session.initialise(captured.first)
    session.feed(captured.step.inputs)
    return session


def unplaced_step(captured: Captured) -> Callable[[], object]:
    """The user's own step, with all of TensorFlow's rewriting, on inputs that are in memory already."""
    step, inputs = captured.step, [tf.constant(x) for x in captured.step.inputs]
    function = captured.function.unplaced if step.ordinary is None else tf.function(step.ordinary)
    return lambda: [np.asarray(x) for x in tf.nest.flatten(function(*inputs))]


def unplaced_name() -> str:
    """The name that reports give to the unplaced step: with one thread, unless a script chose another number."""
    count = tf.config.threading.get_intra_op_parallelism_threads()
    return f"tf.function, {'one thread' if count == 1 else f'{count} threads' if count else 'a thread a core'}"


class TrainedSession:
    """See baechi_runtime.drivers.backend.Trained. Variables go by their shared names, those of the optimizer included."""

    random_state = ""
    """Seeds are variables, too: those of Keras's layers."""

    def __init__(self, session: PlacedSession) -> None:
        """`session` is initialised and fed, and returns the loss first."""
        self._session = session

    def begin(self) -> None:
        """Nothing is drawn that is not in a variable."""

    def run(self) -> tuple[float, float]:
        begin = time.perf_counter_ns()
        loss = self._session.run()[0]
        return float(loss), (time.perf_counter_ns() - begin) / 1000

    def save(self, folder: Path) -> list[Shard]:
        """This process writes for all devices, one after the other."""
        shards = []
        for device in range(len(self._session.placed.devices)):
            values = self._session.variables([v.name for v in self._session.placed.variables if v.device == device])
            tensors = {name: np.asarray(value, order="C") for name, value in sorted(values.items())}
            shards.append(written_shard(folder, device, partial(save_file, tensors)))
        return shards

    def restore(self, checkpoint: Path, shards: Sequence[Shard]) -> None:
        for shard in shards:
            verify_shard(checkpoint, shard)
        missing = {v.name: v for v in self._session.placed.variables}
        for shard in shards:
            self._session.initialise(_taken(checkpoint / shard.file, missing))
        if missing:
            raise CheckpointError(f"{checkpoint} has no tensor {min(missing)!r}; it is of another model: choose another --checkpoint")


def _taken(path: Path, missing: dict[str, PlacedVariable]) -> dict[str, np.ndarray]:
    """The file's tensors that are missing, and no longer are."""
    try:
        with safe_open(path, framework="np") as file:
            values = {name: file.get_tensor(name) for name in file.keys() if name in missing}  # noqa: SIM118 - no dict
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"{path} can't be read: {e}; {another(path.parent)}") from e
    for name, value in values.items():
        variable = missing.pop(name)
        dtype = tf.dtypes.as_dtype(variable.dtype).as_numpy_dtype
        if value.shape != variable.shape or value.dtype != dtype:
            raise CheckpointError(
                f"{path}: {name!r} is {value.dtype} of shape {value.shape}, this model's is {np.dtype(dtype)} of shape "
                f"{variable.shape}; give the flags that the training was begun with"
            )
    return values


class TensorFlowBackend(TrainingBackend[Captured, PlacedSession]):
    """See TrainingBackend. `bound` are the devices that placed steps run on, `free` those for a step on one device: the same, unless memory
    is limited."""

    def __init__(self, request: TrainRequest, free: Devices, bound: Devices) -> None:
        self.request = request
        self.devices = bound
        self._free = free
        self.kind = kind_of_executor(request)
        self.unplaced = unplaced_name()
        self.peaks_measured_by = "accounting" if bound.shared_memory else "allocator"
        self._kept: PlacedSession | None = None
        """The plan that was checked last: it is loaded already."""

    def capture(self) -> Captured:
        step, function = capture(self.request)
        return costed(self.request, function, step, self._free)

    def cluster(self) -> tuple[Cluster, LinkProbe | None]:
        return find_cluster(self.request, self._free)

    def in_parts(self, captured: Captured, parts: int | Sequence[int]) -> Captured:
        raise CaptureError("TensorFlow's steps run with their whole batch; drop --microbatches, or give --framework=torch")

    def load(self, captured: Captured, timeline: Timeline, *, alone: bool = False) -> PlacedSession:
        devices = self._free if alone else self.devices
        kept, self._kept = self._kept, None
        if kept is not None and kept.timeline is timeline and kept.devices is devices:
            return kept
        if kept is not None:
            kept.close()
        return load(captured, timeline, devices)

    def check(self, captured: Captured, timeline: Timeline, *, alone: bool = False) -> Parity | None:
        self._kept = loaded = self.load(captured, timeline, alone=alone)
        return None if draws_anew(captured.function) else check_parity(captured, loaded)

    def peak_bytes(self, captured: Captured, timeline: Timeline, *, alone: bool = False) -> tuple[int, ...]:
        """See Backend. Other plans that are loaded hold constants, which count."""
        self._kept = loaded = self.load(captured, timeline, alone=alone)
        return accounted_peak_bytes(loaded, timeline) if loaded.devices.shared_memory else peak_bytes(loaded)

    def measure(
        self, captured: Captured, loaded: Mapping[str, PlacedSession], num_steps: int, on_step: Callable[[int], None]
    ) -> Measurement:
        """See Backend. A server's busy time is what its process spends on its core, transfers included."""
        groups, one_machine = list(dict.fromkeys(session.devices for session in loaded.values())), self.request.cluster_hosts is None
        variants: dict[str, Callable[[], StepTimes]] = {"eager": partial(timed_step, unplaced_step(captured))}
        for name, session in loaded.items():
            variants[name] = partial(timed_step, session.run, session.devices.servers if one_machine else ())
        load = partial(load_of_others, lambda: groups, one_machine=one_machine)
        return measure_in_turn(variants, load, num_steps=num_steps, on_step=on_step, oversubscribed=oversubscribed(groups))

    def record(self, captured: Captured, loaded: PlacedSession) -> MeasuredStep:
        return record_step(loaded, loaded.timeline, self.kind)

    def trained(self, loaded: PlacedSession) -> Trained:
        return TrainedSession(loaded)

    def notes(self, loaded: PlacedSession) -> Sequence[str]:
        limited = "memory is limited, so oneDNN is off on the devices: it ends a process that runs out of memory"
        return [limited] if self.devices.limited else []

    def arithmetic(self) -> str:
        return "gpu" if self.request.cuda else "cpu without oneDNN" if self.devices.limited else "cpu"
