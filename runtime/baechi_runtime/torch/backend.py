"""PyTorch as a backend: threads of this process, CUDA devices, or one worker process per device."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from baechi_ext.capture.parts import NORMALISED, Parts, shared_sizes
from baechi_ext.capture.torch_counts import with_counts
from baechi_ext.capture.torch_joint import Binding, CaptureOptions, capture_joint
from baechi_ext.capture.torch_parts import capture_parts, require_parts_may_differ
from baechi_ext.cost import Profile
from baechi_ext.errors import CaptureError, ExecutionError
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.ir.measured import MeasuredStep
from baechi_ext.simulate import Timeline
from baechi_runtime.drivers import backend, costing
from baechi_runtime.drivers.backend import Trained, TrainingBackend
from baechi_runtime.drivers.train_request import DevicesRequest, TrainRequest
from baechi_runtime.files.checkpoint_folder import Shard
from baechi_runtime.measure.link_probe import LinkProbe
from baechi_runtime.measure.parity_result import Parity
from baechi_runtime.measure.rehearsal import Rehearsal
from baechi_runtime.measure.samples import Measurement
from baechi_runtime.measure.turns import disturb_timed
from baechi_runtime.models.registry import make_step
from baechi_runtime.models.training_step import TrainingStep, optimizer_spec
from baechi_runtime.report.progress import progress
from baechi_runtime.torch.cluster import find_cluster, notes_on, topology, with_measured_speeds
from baechi_runtime.torch.compiled import CompiledStep, compiled_step
from baechi_runtime.torch.lowering.devices import TorchDevice, cpu_devices, cpu_workers, cuda_devices, cuda_workers
from baechi_runtime.torch.lowering.random_state import as_it_was, state_as_text, take_up_state
from baechi_runtime.torch.lowering.split_gpu import split_gpu
from baechi_runtime.torch.measure import how_measured, load_of_others, measure, measured_peak_bytes
from baechi_runtime.torch.parity import check_parity
from baechi_runtime.torch.processes.environment import worker_place
from baechi_runtime.torch.processes.executor import Executor, Further, LoadedStep, ProcessExecutor, RankCapture, follow
from baechi_runtime.torch.processes.worker_group import WorkerGroup
from baechi_runtime.torch.profiler import FULL, ProfileOptions, profile_step
from baechi_runtime.torch.streams.executor import StreamStep, executor_of
from baechi_runtime.torch.streams.step_graph import CudaRecorder
from baechi_runtime.torch.threads.executor import ThreadExecutor

T = TypeVar("T")


@dataclass(frozen=True)
class Captured(backend.Captured):
    """See backend.Captured."""

    step: TrainingStep
    binding: Binding

    @property
    def batch(self) -> int | None:
        return self.step.batch

    @property
    def microbatches(self) -> tuple[int, ...] | None:
        return None if self.binding.parts is None else self.binding.parts.sizes

    @property
    def notes(self) -> tuple[str, ...]:
        return (NORMALISED,) if self.binding.parts is not None and self.binding.parts.batch_norm_per_part else ()

    @property
    def seeded_ops(self) -> int:
        return len(self.binding.seeded_ops)


FurtherOf = Callable[[TrainRequest, Sequence[TorchDevice], int, TrainingStep], Further]
"""The further commands that a worker of this rank obeys with its step."""


def on_devices(request: TrainRequest, drive: Callable[["TorchBackend"], T], further: FurtherOf | None = None) -> T | None:
    """The value of `drive` for the devices of the request. In a worker group rank 0 drives; the others do as they are told and
    return None. Raises MissingBackendError where there are too few CUDA devices, ExecutionError where another number of workers runs."""

    def obey(group: WorkerGroup, devices: Sequence[TorchDevice]) -> None:
        step, graph, binding = capture(request)
        captured = RankCapture(graph, binding, partial(build_step, request), cache(partial(capture_sizes, request, step, binding)))
        follow(group, devices[group.rank], captured, {} if further is None else further(request, devices, group.rank, step))

    return with_executor(request, lambda executor: drive(TorchBackend(request, executor)), obey, share_memory=not request.limits_memory)


def with_executor(
    request: DevicesRequest,
    drive: Callable[[Executor], T],
    obey: Callable[[WorkerGroup, Sequence[TorchDevice]], object],
    *,
    share_memory: bool = True,
) -> T | None:
    """The value of `drive` for an executor of the request's devices: threads, or all worker processes, of which those but rank 0 `obey`."""
    if request.workers == "thread":
        recorder = CudaRecorder if isinstance(request, TrainRequest) and request.as_graphs else None
        with executor_of(devices_of(request), request.timeout_seconds, recorder) as executor:
            return drive(executor)
    with worker_group(request, share_memory=share_memory) as (group, devices):
        if group.rank == 0:
            with ProcessExecutor(group, devices) as processes:
                return drive(processes)
        obey(group, devices)
    return None


@contextlib.contextmanager
def worker_group(request: DevicesRequest, *, share_memory: bool = True) -> Iterator[tuple[WorkerGroup, Sequence[TorchDevice]]]:
    """This process's group of workers, and the devices of all. Raises ExecutionError where another number of workers runs than a training
    request has devices."""
    rank, size = worker_place()
    if isinstance(request, TrainRequest) and size != request.num_devices:
        raise ExecutionError(f"{size} workers were started for --num_devices={request.num_devices}; start one worker per device")
    devices = (cuda_workers if request.cuda else cpu_workers)(size)
    with WorkerGroup.join(request.timeout_seconds, devices[rank].torch_device, share_memory=share_memory) as group:
        # Now that torch.distributed has started its threads: they may run on any core, and only have to share this one where all are busy.
        devices[rank].enter()
        yield group, devices


def devices_of(request: DevicesRequest) -> Sequence[TorchDevice]:
    """The devices that one process runs. Raises MissingBackendError where there are too few."""
    make = split_gpu if request.split_gpu else cuda_devices if request.cuda else cpu_devices
    return make(request.num_devices)


def build_step(request: TrainRequest) -> TrainingStep:
    """The model's step with fresh weights: the same ones for the same request."""
    return make_step(request.model, request.model_options, optimizer_spec(request.optimizer, request.learning_rate))


def capture(request: TrainRequest) -> tuple[TrainingStep, OpGraph, Binding]:
    """The model's step, its graph without costs, and the binding that runs it."""
    with progress(f"building {request.model}"):
        step = build_step(request)
    with progress(f"capturing the training step of {request.model}"):
        graph, binding = capture_joint(step.module, step.inputs, _capture_options(request, step), request.model)
    return step, graph, binding


def capture_sizes(request: TrainRequest, step: TrainingStep, binding: Binding, sizes: Sequence[int]) -> tuple[OpGraph, Binding]:
    """The graph and binding of a captured step over parts of its batch of these sizes; see `capture_parts`."""
    parts = parts_of(request, step, sizes)
    with progress(f"capturing the training step of {request.model} over {len(sizes)} parts of its batch"):
        return capture_parts(step.module, binding, _capture_options(request, step), parts, request.model)


def parts_of(request: TrainRequest, step: TrainingStep, sizes: Sequence[int]) -> Parts:
    """The parts of a step's batch as the request allows them. Raises what Parts.of does."""
    return Parts.of(step.inputs, sizes, step.batch_dim, batch_norm_per_part=request.batch_norm_per_part)


def normalises(captured: Captured, parts: Parts) -> bool:
    """True if a layer normalises over the batch that is split. Raises CaptureError where the user has not allowed parts."""
    return require_parts_may_differ([bound.node for bound in captured.binding.ops if bound.node is not None], parts)


def sizes_of_parts(step: TrainingStep, parts: int | Sequence[int]) -> tuple[int, ...]:
    """The sizes of so many parts of a step's batch, or these sizes. Raises CaptureError where the batch has not so many examples."""
    if step.batch is None:
        raise CaptureError(f"the number of examples in a batch of {step.name} is not known, so it can't be split; give --microbatches=1")
    if isinstance(parts, int):
        if parts > step.batch:
            raise CaptureError(f"--microbatches={parts} is more than the batch's {step.batch} examples; give at most {step.batch}")
        return shared_sizes(step.batch, [1] * parts)
    if sum(parts) != step.batch:
        said = ",".join(map(str, parts))
        raise CaptureError(f"--microbatches={said} has {sum(parts)} examples, the batch {step.batch}; give sizes that add up to that")
    return tuple(parts)


def _capture_options(request: TrainRequest, step: TrainingStep) -> CaptureOptions:
    spec = step.optimizer
    return CaptureOptions(
        spec.name, spec.slots, request.colocate_grads_with_ops, request.relaxed_random, device="cuda" if request.cuda else "cpu"
    )


def costed(
    request: TrainRequest, executor: Executor, graph: OpGraph, binding: Binding, step: Any, options: ProfileOptions = FULL
) -> backend.Captured:
    """See drivers.costing.costed; costs are measured on device 0 by running `step`, a TrainingStep or a CallStep. Raises ExecutionError."""
    names, clock = [d.name for d in executor.devices], executor.devices[0].clock_name

    def measured() -> Profile:
        # Another module may train in a thread of its own, and waits in a step.
        with executor.turn if isinstance(executor, ThreadExecutor) else contextlib.nullcontext():
            disturb_timed()
            profile = profile_step(executor, graph, binding, step, options)
            disturb_timed()
        return profile

    return costing.costed(request, with_counts(graph, binding), names, clock, measured)


def kind_of_executor(request: TrainRequest) -> str:
    """The name that reports give to what runs the devices."""
    if not request.cuda:
        return request.workers
    if request.workers == "process":
        return "cuda processes"
    return ("one gpu split" if request.split_gpu else "cuda streams") + " with graphs" * request.as_graphs


@dataclass
class TrainedStep:
    """See Trained."""

    _placed: LoadedStep

    @property
    def random_state(self) -> str:
        return state_as_text(self._placed.random_device.torch_device)

    @random_state.setter
    def random_state(self, text: str) -> None:
        take_up_state(self._placed.random_device.torch_device, text)

    def begin(self) -> None:
        torch.manual_seed(self._placed.step.seed)

    def run(self) -> tuple[float, float]:
        loss, times = self._placed.run()
        return loss.item(), times.wall_us

    def save(self, folder: Path) -> list[Shard]:
        return self._placed.save(folder)

    def restore(self, checkpoint: Path, shards: Sequence[Shard]) -> None:
        self._placed.restore(checkpoint, shards)


class TorchBackend(TrainingBackend[Captured, LoadedStep]):
    """The devices of an executor."""

    unplaced = "eager, one device"

    def __init__(self, request: TrainRequest, executor: Executor) -> None:
        self.request = request
        self.executor = executor
        self.kind = kind_of_executor(request)
        self.peaks_measured_by = how_measured(executor)
        self._on_speeds: tuple[str, ...] = ()

    def capture(self) -> Captured:
        request = self.request
        topology(self.executor.devices)
        step, graph, binding = capture(request)
        found = costed(request, self.executor, graph, binding, step)
        return Captured(found.graph, found.alone, found.profile, step, binding)

    def in_parts(self, captured: Captured, parts: int | Sequence[int]) -> Captured:
        sizes = sizes_of_parts(captured.step, parts)
        normalises(captured, parts_of(self.request, captured.step, sizes))  # before they are captured, which takes a while
        graph, binding = capture_sizes(self.request, captured.step, captured.binding, sizes)
        found = costed(self.request, self.executor, graph, binding, captured.step)
        return replace(captured, graph=found.graph, alone=found.alone, profile=found.profile, binding=binding)

    def cluster(self) -> tuple[Cluster, LinkProbe | None]:
        """The speeds are measured unless they are given."""
        cluster, probe = find_cluster(self.request, self.executor)
        if self.request.cluster is None and self.request.device_speeds is None:
            cluster, self._on_speeds = with_measured_speeds(cluster, self.executor)
        return cluster, probe

    def load(self, captured: Captured, timeline: Timeline, *, alone: bool = False) -> LoadedStep:
        return self.executor.load(timeline, captured.binding, captured.step)

    def check(self, captured: Captured, timeline: Timeline, *, alone: bool = False) -> Parity:
        return check_parity(self.executor, timeline, captured.binding, captured.step)

    def peak_bytes(self, captured: Captured, timeline: Timeline, *, alone: bool = False) -> tuple[int, ...]:
        return measured_peak_bytes(self.executor, timeline, captured.binding, captured.step)

    def rehearsed_us(self, captured: Captured, timeline: Timeline) -> float:
        with as_it_was(captured.step):
            loaded = self.load(captured, timeline)
            return Rehearsal(as_profiled=True).placed_us(lambda: loaded.run()[1], partial(load_of_others, self.executor))

    def compiled(self, captured: Captured) -> tuple[CompiledStep, Parity | None, str]:
        return compiled_step(self.executor, captured.step, draws=captured.seeded_ops > 0)

    def measure(self, captured: Captured, loaded: Mapping[str, LoadedStep], num_steps: int, on_step: Callable[[int], None]) -> Measurement:
        return measure(self.executor, captured.step, loaded, num_steps=num_steps, on_step=on_step)

    def record(self, captured: Captured, loaded: LoadedStep) -> MeasuredStep:
        if isinstance(loaded, StreamStep) and loaded.is_graph:
            raise CaptureError("in CUDA graphs the ops can't be told apart; run with --no_cuda_graphs to see them")
        return loaded.record().measured(captured.graph, self.kind)

    def trained(self, loaded: LoadedStep) -> Trained:
        return TrainedStep(loaded)

    def notes(self, loaded: LoadedStep) -> Sequence[str]:
        return [*self._on_speeds, *notes_on(self.executor.devices, loaded)]

    def arithmetic(self) -> str:
        return self.executor.devices[0].torch_device.type
