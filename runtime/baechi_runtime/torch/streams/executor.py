"""The executor of the CUDA devices of one process: a host thread that gives them their work in the order of the plan, and waits for none
of them before the step's end. With a recorder, steps become one CUDA graph each."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeVar, cast

import torch

from baechi_ext.capture.torch_joint import Binding
from baechi_ext.errors import ExecutionError, first_line
from baechi_ext.simulate import Timeline
from baechi_runtime.files.checkpoint_folder import Shard
from baechi_runtime.measure.device_speeds import Pace
from baechi_runtime.measure.link_probe import PROBE_BYTES, LinkProbe
from baechi_runtime.models.training_step import TrainingStep
from baechi_runtime.torch.lowering.checkpoint import homes, owned
from baechi_runtime.torch.lowering.devices import CudaDevice, TorchDevice, settle
from baechi_runtime.torch.lowering.link_player import fitted, play_pace
from baechi_runtime.torch.lowering.memory_limit import CudaMemoryLimit, loading
from baechi_runtime.torch.lowering.op_error import OpError
from baechi_runtime.torch.lowering.ops import Exchange, LoweredProgram, Slots, StepContext
from baechi_runtime.torch.lowering.updates import optimizers_by_device
from baechi_runtime.torch.streams.step_graph import CudaRecorder, too_large, why_not_captured
from baechi_runtime.torch.streams.walk import WARM_UP_STEPS, Handovers, Walk
from baechi_runtime.torch.threads.executor import PlacedStep, ThreadExecutor, Worker

T = TypeVar("T")
_PROBE_WARMUP, _PROBE_REPEATS, _TRIPS = 3, 15, 4
MakeRecorder = Callable[[Sequence[CudaDevice], CudaDevice], CudaRecorder]
"""The recorder of devices, of which one may draw random numbers."""


class StreamStep(PlacedStep):
    """One plan on the CUDA devices of this process."""

    executor: "StreamExecutor"

    def __init__(self, executor: "StreamExecutor", programs: Sequence[LoweredProgram], context: StepContext, timeline: Timeline) -> None:
        super().__init__(executor, programs, context, timeline)
        self._devices = executor.devices[: len(programs)]
        self.walk = Walk(timeline, cast(Handovers, context.mailboxes), programs, self._devices)
        self._replay: Callable[[], None] | None = None
        self._slots: list[Slots] = []
        """Those of the captured step: the tensors that it leaves are where each replay puts them."""
        self.limits: Sequence[CudaMemoryLimit] = ()
        self.why_not = "" if executor.recorder is None else why_not_captured(timeline, context.binding, context.optimizers)
        """Why the step is no graph, where one was wanted."""
        self.cannot_be_graph = self.why_not != ""
        """It was wanted, and memory is not the reason."""

    @property
    def is_graph(self) -> bool:
        return self._replay is not None

    @property
    def note(self) -> str:
        """The outcome of capturing, in words."""
        what = f"{len(self.timeline.graph)} ops on {len(self.programs)} device{'s' * (len(self.programs) > 1)}"
        if self.why_not:
            return f"no CUDA graph of {what}: {self.why_not}"
        return f"one CUDA graph of {what}" if self.is_graph else f"no CUDA graph yet: it is made after {WARM_UP_STEPS} steps"

    def _run(self) -> Sequence[float]:
        self.executor.call(0, self._step)
        return self.walk.busy_us

    def _step(self) -> None:
        make, walk = self.executor.recorder, self.walk
        if make is not None and not self.why_not and not self.is_graph and walk.runs >= WARM_UP_STEPS:
            self.why_not = too_large(self.timeline, self._devices)
            if not self.why_not:
                self._capture(make)
                self.cannot_be_graph = not self.is_graph
        if self._replay is None:
            self._loss = self._loss_in(self._by_op(self.empty()))
        else:
            self._replay()
            walk.synchronize()
            self._loss = self._loss_in(self._slots)

    def empty(self) -> list[Slots]:
        return [program.empty() for program in self.programs]

    def _by_op(self, slots: list[Slots]) -> list[Slots]:
        """A step op by op; the slots, with what it leaves in them."""
        with contextlib.ExitStack() as stack:
            # Later steps take the same memory again; to set a limit takes the host 0.1 ms.
            for limit in self.limits if self.walk.runs < WARM_UP_STEPS else ():
                stack.enter_context(limit)
            self.walk.run(slots)
        return slots

    def _loss_in(self, slots: Sequence[Slots]) -> torch.Tensor | None:
        """A copy: the next replay would overwrite it where it stands."""
        at = next(((d, p.loss_slot) for d, p in enumerate(self.programs) if p.loss_slot is not None), None)
        if at is None:
            return None
        device = self._devices[at[0]]
        device.take_turn()
        loss: torch.Tensor = slots[at[0]][at[1]].clone()
        device.synchronize()
        return loss

    def _capture(self, make: MakeRecorder) -> None:
        """Captures the step. Where that fails steps go on op by op, and `why_not` says why."""
        slots = self.empty()
        seeded = self.context.binding.seeded_ops
        origin = self._devices[self.timeline.placement[seeded[0]] if seeded else 0]
        try:
            self._replay = make(self._devices, origin).capture(partial(self.walk.give, slots))
        except (RuntimeError, OpError) as e:
            cause = e.cause if isinstance(e, OpError) else e
            where = f"op {self.timeline.graph.ops[e.op].id!r}: " if isinstance(e, OpError) and e.op is not None else ""
            self.why_not = where + first_line(cause, type(cause).__name__)
        else:
            self._slots = slots

    def by_op(self) -> None:
        """Runs a step op by op, whatever it is else."""
        self.walk.give(self.empty())
        self.walk.synchronize()

    def rehearse(self) -> None:
        """Where steps become a graph, runs them until one has. The state is put back, and the optimizers' as well."""
        if self.executor.recorder is None:
            return
        saved = self.step.snapshot()
        for _ in range(WARM_UP_STEPS + 1):
            self._run()
        self.step.restore(saved)
        states = [state for optimizer in self.optimizers.values() for state in optimizer.state.values()]
        for value in (value for state in states for value in state.values()):
            if isinstance(value, torch.Tensor):
                value.zero_()  # as they all begin
        settle(self._devices)

    def graph_us(self, repeats: int) -> tuple[float, ...]:
        """The wall times of steps that are one CUDA graph, in microseconds; empty where they are none."""
        begun = [time.perf_counter_ns()]
        for _ in range(repeats if self.is_graph else 0):
            self._run()
            begun.append(time.perf_counter_ns())
        return tuple((b - a) / 1000 for a, b in pairwise(begun))

    def restore(self, checkpoint: Path, shards: Sequence[Shard]) -> None:
        super().restore(checkpoint, shards)
        # A graph would go on with the optimizers' earlier tensors: another one is made.
        self._replay, self._slots, self.walk.runs = None, [], 0
        settle(self._devices)

    def peak_bytes(self) -> tuple[int, ...]:
        """See PlacedStep: as the devices' own allocators say; counted where several share one."""
        if any(d.share > 1 or d.peak_bytes() is None for d in self._devices):
            return super().peak_bytes()
        for _ in range(0 if self.executor.recorder is None else WARM_UP_STEPS):
            self.run()
        # The next step is captured, where it is: what stays in its pool is allocated then.
        for device in self._devices:
            device.reset_peak()
        self.run()
        return tuple(int(d.peak_bytes() or 0) for d in self._devices)

    def _with(self, programs: Sequence[LoweredProgram]) -> "StreamStep":
        """The same step by programs that are watched: neither timed nor captured."""
        other = StreamStep(self.executor, programs, self.context, self.timeline)
        other.walk.runs, other.why_not = WARM_UP_STEPS, "it is watched"
        return other


@dataclass(frozen=True)
class WalkTogether:
    """See RunTogether."""

    executor: "StreamExecutor"
    walk: Walk

    def __call__(self, slots: Sequence[Slots]) -> Sequence[float]:
        return self.executor.call(0, partial(self.walk.run, slots))

    def captured(self, work: Callable[[], None], origin: CudaDevice) -> Callable[[], None]:
        """See CudaRecorder.capture. Raises ExecutionError where the executor makes no graphs."""
        make = self.executor.recorder
        if make is None:
            raise ExecutionError("these devices' steps are no CUDA graphs; drop --no_cuda_graphs")
        return self.executor.call(0, lambda: make(self.executor.devices, origin).capture(work))


class StreamExecutor(ThreadExecutor):
    """CUDA devices of this process, and the thread that gives them their work. With a recorder, placed steps become graphs."""

    devices: tuple[CudaDevice, ...]

    def __init__(self, devices: Sequence[CudaDevice], timeout_seconds: float = 300.0, recorder: MakeRecorder | None = None) -> None:
        self.recorder = recorder
        super().__init__(devices, timeout_seconds)

    def _started(self) -> list[Worker]:
        return [Worker(*self.devices)] * len(self.devices)

    def exchange(self, timeline: Timeline) -> Handovers:
        """See ThreadExecutor."""
        return Handovers(timeline, self.devices, phases=True)

    def together(self, timeline: Timeline, exchange: Exchange, programs: Sequence[LoweredProgram]) -> "WalkTogether":
        """See ThreadExecutor."""
        return WalkTogether(self, Walk(timeline, cast(Handovers, exchange), programs, self.devices[: len(programs)]))

    def _submitted(self, device: int, task: Callable[[], T]) -> Callable[[], T]:
        def on_its_stream() -> T:
            self.devices[device].enter()
            return task()

        return on_its_stream

    def load(self, timeline: Timeline, binding: Binding, step: TrainingStep, *, keep_gradients: bool = False) -> StreamStep:
        """See ThreadExecutor.load. The step is a replica, each tensor where its readers run; its inputs, too, are there from the start."""
        self._require_enough(timeline)
        with loading("a plan"):
            replica = self._scattered(timeline, binding, step)
            graphed = self.recorder is not None and all(d.torch_device.type == "cuda" for d in self.devices)
            capturable = {"capturable": True} if graphed and binding.loss is not None and step.optimizer.capturable else {}
            optimizers = optimizers_by_device(timeline, binding, replica, range(len(timeline.cluster)), **capturable)
            handovers = Handovers(timeline, self.devices)
            gradients: dict[str, torch.Tensor] | None = {} if keep_gradients else None
            context = StepContext(timeline.graph, binding, replica, handovers, optimizers, gradients, handovers.pre_hooks)
            placed = StreamStep(self, self._lowered(timeline, context), context, timeline)
        settle(self.devices)
        placed.limits = self._limits(timeline, binding, replica)
        return placed

    @contextlib.contextmanager
    def keep_busy(self, companions: int, timeline: Timeline, binding: Binding, step: TrainingStep) -> Iterator[None]:
        """See ThreadExecutor. Each step is a graph, launched by a thread of its own."""
        enough = threading.Event()
        with contextlib.ExitStack() as stack:
            executors = [StreamExecutor([device], self.timeout_seconds, self.recorder) for device in self.devices[1 : companions + 1]]
            others = [stack.enter_context(executor) for executor in executors]
            loaded = [other.load(timeline, binding, step.replica("cpu")) for other in others]
            for placed in loaded:
                placed.rehearse()
            stack.enter_context(launching := ThreadPoolExecutor(companions))
            pending = [launching.submit(_again_and_again, placed, enough) for placed in loaded]
            try:
                yield
            finally:
                enough.set()
            for over in pending:
                over.result()

    def _limits(self, timeline: Timeline, binding: Binding, step: TrainingStep) -> list[CudaMemoryLimit]:
        """Memory limits of the devices for which the cluster has one; none for parts of a split GPU, which share an allocator."""
        state, limits = step.state(), []
        names = owned(binding, timeline.placement, len(timeline.cluster))
        for device, limited, own in zip(self.devices, timeline.cluster.devices, names, strict=False):
            if device.torch_device.type == "cuda" and device.share == 1 and limited.memory_bytes is not None:
                resident = sum(state[name].nbytes for name in own)
                limits.append(CudaMemoryLimit(int(limited.memory_bytes) - resident, device.torch_device))
        return limits

    def _scattered(self, timeline: Timeline, binding: Binding, step: TrainingStep) -> TrainingStep:
        replica: Any = step.replica("cpu")
        state = replica.state()
        for name, home in homes(binding, timeline.placement).items():
            state[name].data = state[name].data.to(self.devices[home].torch_device)
        if binding.loss is None:  # a call reads its inputs in every step
            replica.inputs = tuple(value.to(self.devices[0].torch_device) for value in replica.inputs)
        return cast(TrainingStep, replica)

    def paces(self, windows: int, window_seconds: float) -> list[Pace]:
        """See ThreadExecutor: one device after the other, since they share nothing."""
        return [self.call(i, partial(play_pace, device, windows, window_seconds)) for i, device in enumerate(self.devices)]

    def probe_link(self, source: int = 0, target: int = 1, sizes: Sequence[int] = PROBE_BYTES) -> LinkProbe:
        """The link between two devices, from copies there and back that the devices do by themselves, with the host ahead."""
        here, there = self.devices[source], self.devices[target]
        probe = fitted({size: self.call(source, partial(_round_trips_us, here, there, size)) for size in sizes})
        return replace(probe, issue_us=self.call(source, partial(_issue_us, here, there)))


def _again_and_again(placed: StreamStep, enough: threading.Event) -> None:
    while not enough.is_set():
        placed.graph_us(1)


def _issue_us(here: CudaDevice, there: CudaDevice) -> float:
    """Microseconds that a transfer takes the host between different ops, as in a step: right behind another it takes less."""
    values = {device: torch.zeros(16, 16, device=device.torch_device) for device in (here, there)}
    settle([here, there])
    found = []
    for repeat in range(_PROBE_WARMUP + _PROBE_REPEATS):
        here.begin()
        there.begin()
        for source, target in ((here, there), (there, here)) * _TRIPS:
            source.take_turn()
            value = values[source]
            torch.cat([torch.mm(value, value).relu(), value.sigmoid() * 2]).softmax(1).sum(0)
            begun = time.perf_counter_ns()
            _, done = target.take_in(value, source)
            for device in (target, source):
                device.compute.wait_event(done)
            target.let_go(None)
            if repeat >= _PROBE_WARMUP:
                found.append((time.perf_counter_ns() - begun) / 1000)
        here.take_turn()
        for device in (here, there):
            device.synchronize()
    return median(found)


def _round_trips_us(here: CudaDevice, there: CudaDevice, size: int) -> list[float]:
    """Microseconds of a round trip of a tensor, the mean of some; as often as it takes to see a typical one."""
    out, found = torch.zeros(size // 4, device=here.torch_device), []
    settle([here])
    issued_us = 1000.0
    for repeat in range(_PROBE_WARMUP + _PROBE_REPEATS):
        here.begin()
        there.begin()
        here.hold(2 * issued_us)
        begun, start, value = time.perf_counter_ns(), here.mark(), out
        kept = []
        for _ in range(_TRIPS):
            for source, target in ((here, there), (there, here)):
                copy, done = target.take_in(value, source)
                target.compute.wait_event(done)
                kept.append(copy)
                value = copy
        end, issued_us = here.mark(), (time.perf_counter_ns() - begun) / 1000
        for device in (here, there):
            device.synchronize()
        if repeat >= _PROBE_WARMUP:
            found.append(max(here.elapsed_us(start, end) / _TRIPS, _LEAST_US))
    return found


_LEAST_US = 0.1


def executor_of(devices: Sequence[TorchDevice], timeout_seconds: float, recorder: MakeRecorder | None = None) -> ThreadExecutor:
    """The executor of devices of this process, CUDA devices, whose steps a `recorder` makes graphs of, or others."""
    cuda = [device for device in devices if isinstance(device, CudaDevice)]
    return StreamExecutor(cuda, timeout_seconds, recorder) if cuda else ThreadExecutor(devices, timeout_seconds)
