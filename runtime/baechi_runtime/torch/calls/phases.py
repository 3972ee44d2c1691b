"""Fragments of placed calls, whose forward and backward passes run as programs of their own: what all of them have, and those on device
threads."""

import copy
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

from baechi_ext.capture.torch_fragments import CapturedCall
from baechi_ext.capture.torch_private import no_view
from baechi_ext.simulate import Timeline
from baechi_runtime.measure.timing import StepTimes
from baechi_runtime.torch.calls.watching import Watch
from baechi_runtime.torch.lowering.mailbox import Mailboxes
from baechi_runtime.torch.lowering.ops import LoweredProgram, Lowering, Slots, StepContext
from baechi_runtime.torch.lowering.program import in_phases
from baechi_runtime.torch.threads.executor import ThreadExecutor, busy_us


@dataclass
class CallStep:
    """The tensors that ops read and hand over while a call or a fragment of it runs: a TrainingStep without a loss or an optimizer."""

    name: str
    live: Mapping[str, Tensor]
    """Parameters and buffers of the call that was captured, by their first name."""
    written: tuple[str, ...]
    """Buffers that the step changes."""
    inputs: Sequence[Tensor] | Mapping[int, Tensor]
    """By their numbers among the arguments of all fragments."""
    tangents: Sequence[Tensor | None] | None = None
    """The gradients that come in; None: ones, as when the step is profiled."""
    outputs: list[Tensor] = field(default_factory=list)
    gradients: dict[str | int, Tensor] = field(default_factory=dict)
    """Parameter's name or input's number -> gradient."""

    def state(self) -> Mapping[str, Tensor]:
        return self.live

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """No optimizers: the optimizer is in the caller's code."""
        return {}

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of what the step changes, on the host."""
        return {name: self.live[name].detach().to("cpu", copy=True) for name in self.written}

    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """Put a snapshot back, and let go of what the step handed over."""
        for name, value in snapshot.items():
            self.live[name].data.copy_(value)
        self.forget()

    def forget(self) -> None:
        """Let go of all tensors of a call but its inputs."""
        self.tangents, self.outputs, self.gradients = None, [], {}

    def replica(self, device: torch.device | str) -> "CallStep":
        """The same step with tensors of its own on `device`."""
        live = {name: value.detach().to(device, copy=True) for name, value in self.live.items()}
        given = [self.inputs[number] for number in range(len(self.inputs))]
        return CallStep(self.name, live, self.written, tuple(i.detach().to(device, copy=True) for i in given))


class Phases(ABC):
    """One fragment of a call by a plan, loaded. Not more than one phase runs at a time.

    Arguments are put where the programs read them: parameters and buffers into slots, other tensors into the step.
    """

    def __init__(self, timeline: Timeline, call: CapturedCall, fragment: int, step: CallStep) -> None:
        self._timeline, self._call, self._fragment = timeline, call, fragment
        self._step = replace(step, inputs={})
        self._lock = threading.Lock()
        self._watch = Watch()
        part = self._part = call.fragments[fragment]
        argument: dict[str | int, int] = {name: i for i, name in reversed(list(part.state.items()))}
        self._read = {node: argument[name] for node, name in call.binding.state_nodes.items() if name in argument}
        self._plain = tuple((i, part.first_input + i) for i in range(part.num_args) if i not in part.state)
        self._argument_of: dict[str | int, int] = {**argument, **{number: i for i, number in self._plain}}
        """A gradient's key in the step -> the argument."""

    def watched_by(self, watch: Watch) -> Self:
        """The same fragment with programs of its own, which share the slots' layout with these. Only one of the two runs at a time."""
        other = copy.copy(self)
        other._step, other._watch = replace(self._step), watch
        other._load()
        return other

    @abstractmethod
    def _load(self) -> None:
        """Lower the programs."""

    @abstractmethod
    def forward(self, args: Sequence[Tensor]) -> tuple[list[Tensor], list[Slots], StepTimes]:
        """The graph's outputs, what the devices keep for the backward phase, and the phase's times.

        Raises ExecutionError where an op fails or a device does not answer in time.
        """

    @abstractmethod
    def backward(self, tangents: Sequence[Tensor | None], kept: list[Slots]) -> tuple[dict[int, Tensor], StepTimes]:
        """The gradients by argument, from those of the differentiable outputs; uses up `kept`."""

    def _slots_of(self, lowering: Lowering) -> list[tuple[int, int]]:
        """(slot, argument) of the parameters and buffers that programs of the fragment read."""
        ops = self._call.binding.ops
        nodes = (node for v in self._part.forward_ops for node in (ops[v].node, *ops[v].outputs, *ops[v].views) if node is not None)
        graphs = {id(n.graph) for n in nodes}  # that the fragment's ops are nodes of; there is only one
        return [(lowering.slot_of[n], i) for n, i in self._read.items() if n in lowering.slot_of and id(n.graph) in graphs]

    def _inputs(self, args: Sequence[Tensor]) -> dict[int, Tensor]:
        return {number: args[i] for i, number in self._plain}


class PhasedFragment(Phases):
    """A fragment on device threads."""

    def __init__(
        self, executor: ThreadExecutor, timeline: Timeline, call: CapturedCall, fragment: int, step: CallStep
    ) -> None:
        super().__init__(timeline, call, fragment, step)
        self._executor = executor
        self._devices = executor.devices[: len(timeline.cluster)]
        self._on_host = all(d.torch_device.type == "cpu" for d in self._devices)
        self._load()

    def _load(self) -> None:
        mailboxes = Mailboxes(self._executor.timeout_seconds)
        binding = self._call.binding
        context = StepContext(self._timeline.graph, binding, self._step, mailboxes, {}, state_in_slots=True)  # type: ignore[arg-type]
        self._abort = mailboxes.abort
        self._programs: list[list[LoweredProgram]] = []
        self._state_slots: list[list[tuple[int, int]]] = []
        phases = in_phases(self._timeline, self._call.phases)[2 * self._fragment : 2 * self._fragment + 2]
        for device in range(len(self._devices)):
            lowering = Lowering(context, self._devices[device], device)
            programs = []
            for phase in range(2):
                lowering.context = replace(context, mailboxes=self._watch.exchange(mailboxes, phase, device))
                programs.append(self._watch.program(lowering.lower(phases[phase][device]), phase, device))
            self._programs.append(programs)
            self._state_slots.append(self._slots_of(lowering))

    def forward(self, args: Sequence[Tensor]) -> tuple[list[Tensor], list[Slots], StepTimes]:
        """See Phases."""
        with self._lock:
            self._step.inputs = self._inputs(args)
            try:
                kept = [self._filled(device, args) for device in range(len(self._devices))]
                times = self._run(0, kept)
                for programs, slots in zip(self._programs, kept, strict=True):
                    for write in programs[0].writes:
                        write(slots)
                if not self._on_host:
                    self._bring_back(args, kept)
                return self._handed_over(self._step.outputs), kept, times
            finally:
                self._step.inputs = {}
                self._step.forget()

    def _filled(self, device: int, args: Sequence[Tensor]) -> Slots:
        slots = self._watch.slots(max(p.num_slots for p in self._programs[device]))
        if self._on_host:
            for slot, argument in self._state_slots[device]:
                slots[slot] = args[argument]
        else:
            place = self._devices[device].torch_device
            for slot, argument in self._state_slots[device]:
                slots[slot] = args[argument].detach().to(place)
        return slots

    def _bring_back(self, args: Sequence[Tensor], kept: Sequence[Slots]) -> None:
        """Copy buffers that were changed on another device back to their own."""
        for slots, places in zip(kept, self._state_slots, strict=True):
            for slot, argument in places:
                if argument in self._part.written and slots[slot].device != args[argument].device:
                    args[argument].data.copy_(slots[slot])

    def backward(self, tangents: Sequence[Tensor | None], kept: list[Slots]) -> tuple[dict[int, Tensor], StepTimes]:
        """See Phases."""
        with self._lock:
            self._step.tangents = tangents
            try:
                times = self._run(1, kept)
                gradients = self._step.gradients
                arguments = [self._argument_of[name] for name in gradients]
                return dict(zip(arguments, self._handed_over(list(gradients.values())), strict=True)), times
            finally:
                for slots in kept:
                    slots.clear()
                self._step.forget()

    def _run(self, phase: int, kept: list[Slots]) -> StepTimes:
        begin_ns = self._begin(phase)
        devices, graph = zip(self._programs, self._devices, kept, strict=True), self._timeline.graph
        tasks = [partial(busy_us, device, graph, partial(programs[phase].run, slots)) for programs, device, slots in devices]
        try:
            busy = self._executor.run_all(tasks, on_failure=self._abort)
        except BaseException:
            self._load()  # the boxes of an aborted step are useless
            raise
        return self._watch.times(phase, begin_ns, tuple(busy))

    def _begin(self, phase: int) -> int:
        """Wait for all earlier work on CUDA devices; returns the time, in nanoseconds, at which the phase begins."""
        self._watch.begin(phase, self._executor.call)
        for device in self._devices:
            if device.torch_device.type == "cuda":
                torch.cuda.current_stream(device.torch_device).synchronize()
        return time.monotonic_ns()

    def _handed_over(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors as the caller's own: no views, to autograd, of what the devices keep; in use by the caller's stream."""
        own = [no_view(t) for t in tensors]
        for value in own:
            if value.is_cuda:
                value.record_stream(torch.cuda.current_stream(value.device))
        return own
