"""Fragments of placed calls, whose forward and backward passes run as programs of their own: what all of them have, and those on the
devices of this process."""

import contextlib
import copy
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from baechi_ext.capture.torch_autocast import without_autocast
from baechi_ext.capture.torch_fragments import CapturedCall
from baechi_ext.capture.torch_private import dense_parts, no_view
from baechi_ext.simulate import Timeline
from baechi_runtime.measure.recording import NotedTimes
from baechi_runtime.measure.timing import StepTimes
from baechi_runtime.torch.calls.capturing import CallStep
from baechi_runtime.torch.lowering.devices import TorchDevice
from baechi_runtime.torch.lowering.ops import Exchange, LoweredProgram, Lowering, Slots, StepContext
from baechi_runtime.torch.lowering.program import in_phases
from baechi_runtime.torch.lowering.random_state import drawing_from, set_state, state_of
from baechi_runtime.torch.threads.executor import RunTogether, ThreadExecutor
from baechi_runtime.torch.threads.step_recorder import DeviceLog

_NONE = frozenset[int]()


class Watch:
    """Takes the times of phases, and what the logs note that are made for each of the devices; without a `make` there are none."""

    def __init__(self, make: Callable[[TorchDevice], DeviceLog] | None = None, devices: Sequence[TorchDevice] = ()) -> None:
        self._logs = None if make is None else [[make(device) for device in devices] for _ in range(2)]

    @property
    def is_off(self) -> bool:
        """True if nothing is noted."""
        return self._logs is None

    def exchange(self, exchange: Exchange, phase: int, device: int = 0) -> Exchange:
        """The exchange through which a device's program of a phase sends and receives."""
        return exchange if self._logs is None else self._logs[phase][device].exchange(exchange)

    def program(self, program: LoweredProgram, phase: int, device: int = 0) -> LoweredProgram:
        """The program to run on a device, given the lowered one."""
        return program if self._logs is None else self._logs[phase][device].noting(program)

    def begin(self, phase: int, call: Callable[[int, Callable[[], None]], Any]) -> None:
        """Before a phase; `call` runs a function on a device."""
        for device, log in enumerate(() if self._logs is None else self._logs[phase]):
            call(device, log.begin)

    def times(self, phase: int, begin_ns: int, busy_us: tuple[float, ...]) -> StepTimes:
        """The times of a phase that has just ended."""
        wall_us = (time.monotonic_ns() - begin_ns) / 1000
        if self._logs is None:
            return StepTimes(wall_us, busy_us)
        return NotedTimes(wall_us, busy_us, begin_ns, tuple(log.notes() for log in self._logs[phase]))


class Phases(ABC):
    """One fragment of a call by a plan, loaded. Not more than one phase runs at a time.

    Arguments are put where the programs read them: parameters and buffers into slots, other tensors into the step.
    """

    def __init__(self, timeline: Timeline, call: CapturedCall, fragment: int, step: CallStep) -> None:
        self._timeline, self._call, self._fragment = timeline, call, fragment
        self._step = replace(step, inputs={})
        self._lock = threading.RLock()
        self._watch = Watch()
        part = self._part = call.fragments[fragment]
        argument: dict[str | int, int] = {name: i for i, name in reversed(list(part.state.items()))}
        self._read = {node: argument[name] for node, name in call.binding.state_nodes.items() if name in argument}
        self._plain = tuple((i, part.first_input + i) for i in range(part.num_args) if i not in part.state)
        self._argument_of: dict[str | int, int] = {**argument, **{number: i for i, number in self._plain}}
        """A gradient's key in the step -> the argument."""
        self._unreached: dict[frozenset[int], frozenset[int]] = {}
        """Outputs that gradients came for -> the ops of the backward pass that none of these comes to."""
        self._programs: list[tuple[TorchDevice, list[LoweredProgram], list[tuple[int, int]]]] = []
        """The devices of this process: each with its programs of both phases, and the (slot, argument) of what these read."""

    @property
    def note(self) -> str:
        """On how the passes are run; empty where there is nothing to say."""
        return ""

    def watched_by(self, watch: Watch) -> Self:
        """The same fragment with programs of its own, which share the slots' layout with these. Only one of the two runs at a time."""
        other = copy.copy(self)
        other._step, other._watch = replace(self._step), watch
        other._load()
        return other

    def forward(self, args: Sequence[Tensor]) -> tuple[list[Tensor], list[Slots], StepTimes]:
        """The graph's outputs, what the devices keep for the backward phase, and the phase's times.

        Raises ExecutionError where an op fails or a device does not answer in time.
        """
        with self._lock, without_autocast():
            self._step.inputs = {number: args[i] for i, number in self._plain}
            try:
                kept = [self._filled(*own, args) for own in self._programs]
                begin_ns = self._begin(0)
                busy_us = self._run(0, kept, args, _NONE)
                outputs = self._outputs()
                return outputs, kept, self._watch.times(0, begin_ns, busy_us)
            finally:
                self._step.inputs = {}
                self._step.forget()

    def backward(self, tangents: Sequence[Tensor | None], kept: list[Slots]) -> tuple[dict[int, Tensor], StepTimes]:
        """The gradients by argument, from those of the differentiable outputs; uses up `kept`. Where some outputs have none, ops that are
        only behind these do not run: their derivatives may be infinite, and zeros times that no zeros. Raises as `forward` does."""
        with self._lock, without_autocast():
            self._step.tangents = tangents
            try:
                begin_ns = self._begin(1)
                busy_us = self._run(1, kept, (), self._not_reached_from(tangents))
                gradients = {self._argument_of[name]: value for name, value in self._gradients().items()}
                return gradients, self._watch.times(1, begin_ns, busy_us)
            finally:
                for slots in kept:
                    slots.clear()
                self._step.forget()

    @abstractmethod
    def _load(self) -> None:
        """Lower the programs."""

    @abstractmethod
    def _begin(self, phase: int) -> int:
        """Begin a phase; returns the time in nanoseconds."""

    def _not_reached_from(self, tangents: Sequence[Tensor | None]) -> frozenset[int]:
        """The ops of the backward pass that none of the gradients comes to."""
        if all(t is not None for t in tangents):
            return _NONE
        part = self._part
        outputs = (i for i, is_differentiable in enumerate(part.differentiable) if is_differentiable)
        used = frozenset(i for i, t in zip(outputs, tangents, strict=True) if t is not None)
        if used not in self._unreached:
            self._unreached[used] = frozenset(v for v, outputs in part.gradients_of.items() if outputs and outputs.isdisjoint(used))
        return self._unreached[used]

    @abstractmethod
    def _run(self, phase: int, kept: list[Slots], args: Sequence[Tensor], skipped: frozenset[int]) -> tuple[float, ...]:
        """Run the programs of a phase without these ops, and bring buffers up to date; for how long each device was busy."""

    @abstractmethod
    def _outputs(self) -> list[Tensor]:
        """The outputs, as the caller's own tensors."""

    @abstractmethod
    def _gradients(self) -> dict[str | int, Tensor]:
        """The gradients by their keys in the step, as the caller's own tensors."""

    def _lower(
        self,
        context: StepContext,
        exchanges: Sequence[Exchange],
        devices: Sequence[tuple[int, TorchDevice]],
        marked: Callable[[LoweredProgram], LoweredProgram] = lambda program: program,
    ) -> None:
        """Lower the programs of both phases, whose tensors go through `exchanges`, for these devices by their numbers in the plan."""
        phases = in_phases(self._timeline, self._call.phases)[2 * self._fragment : 2 * self._fragment + 2]
        self._programs = []
        for log, (number, device) in enumerate(devices):
            lowering = Lowering(context, device, number)
            programs = []
            for phase, exchange in enumerate(exchanges):
                lowering.context = replace(context, mailboxes=self._watch.exchange(exchange, phase, log))
                programs.append(self._watch.program(marked(lowering.lower(phases[phase][number])), phase, log))
            self._programs.append((device, programs, self._slots_of(lowering)))

    def _slots_of(self, lowering: Lowering) -> list[tuple[int, int]]:
        """(slot, argument) of the parameters and buffers that programs of the fragment read."""
        ops = self._call.binding.ops
        nodes = (node for v in self._part.forward_ops for node in (ops[v].node, *ops[v].outputs, *ops[v].views) if node is not None)
        graphs = {id(n.graph) for n in nodes}  # that the fragment's ops are nodes of; there is only one
        return [(lowering.slot_of[n], i) for n, i in self._read.items() if n in lowering.slot_of and id(n.graph) in graphs]

    def _filled(
        self, device: TorchDevice, programs: Sequence[LoweredProgram], places: Sequence[tuple[int, int]], args: Sequence[Tensor]
    ) -> Slots:
        slots, on_host = programs[0].empty(programs[1].num_slots), device.torch_device.type == "cpu"
        for slot, argument in places:
            slots[slot] = args[argument] if on_host else args[argument].detach().to(device.torch_device)
        return slots


class PhasedFragment(Phases):
    """A fragment on the devices of this process."""

    def __init__(self, executor: ThreadExecutor, timeline: Timeline, call: CapturedCall, fragment: int, step: CallStep) -> None:
        super().__init__(timeline, call, fragment, step)
        self._executor = executor
        self._load()

    def _load(self) -> None:
        devices = self._executor.devices[: len(self._timeline.cluster)]
        exchange = self._executor.exchange(self._timeline)
        context = StepContext(self._timeline.graph, self._call.binding, self._step, exchange, {}, state_in_slots=True)  # type: ignore[arg-type]
        self._lower(context, [exchange, exchange], list(enumerate(devices)))
        self._exchange, self._skipping = exchange, dict[frozenset[int], RunTogether]()
        self._together = [self._run_together(phase) for phase in range(2)]

    def _run_together(self, phase: int, skipped: frozenset[int] = _NONE) -> RunTogether:
        programs = [programs[phase].skipping(skipped) if skipped else programs[phase] for _, programs, _ in self._programs]
        return self._executor.together(self._timeline, self._exchange, programs)

    def _together_without(self, phase: int, skipped: frozenset[int]) -> RunTogether:
        """The function that runs a phase's programs; of the backward pass, without these ops."""
        if not skipped:
            return self._together[phase]
        if skipped not in self._skipping:
            self._skipping[skipped] = self._run_together(phase, skipped)
        return self._skipping[skipped]

    def _begin(self, phase: int) -> int:
        """Wait for the caller's earlier work on CUDA devices, too."""
        self._watch.begin(phase, self._executor.call)
        for stream in self._callers_streams():
            stream.synchronize()
        return time.monotonic_ns()

    def _callers_streams(self) -> list[torch.cuda.Stream]:
        """The caller's streams on the CUDA devices of the plan, and on those that its tensors come from."""
        devices = self._part.homes.union(own.torch_device for own, _, _ in self._programs)
        return [torch.cuda.current_stream(device) for device in devices if device.type == "cuda"]

    def _run(self, phase: int, kept: list[Slots], args: Sequence[Tensor], skipped: frozenset[int]) -> tuple[float, ...]:
        try:
            with self._drawing_as_written():
                busy = self._together_without(phase, skipped)(kept)
        except BaseException:
            self._load()  # the boxes of an aborted step are useless
            raise
        if phase == 0:
            for own, slots in zip(self._programs, kept, strict=True):
                self._write_buffers(*own, slots, args)
        return tuple(busy)

    def _write_buffers(
        self,
        device: TorchDevice,
        programs: Sequence[LoweredProgram],
        places: Sequence[tuple[int, int]],
        slots: Slots,
        args: Sequence[Tensor],
    ) -> None:
        for write in programs[0].writes:
            write(slots)
        if device.torch_device.type != "cpu":
            self._bring_back(args, slots, places)

    @contextlib.contextmanager
    def _drawing_as_written(self) -> Iterator[None]:
        """Within, the CUDA device that draws random numbers draws those of the device where the user's code does, whose generator goes on
        by as much."""
        seeded, here = self._call.binding.seeded_ops, self._part.draws_on
        there = self._executor.devices[self._timeline.placement[seeded[0]] if seeded else 0].torch_device
        if here in (None, there) or there.type == "cpu":
            yield
            return
        with drawing_from(state_of(here), there):
            try:
                yield
            finally:
                set_state(here, state_of(there))

    def _bring_back(self, args: Sequence[Tensor], slots: Slots, places: Sequence[tuple[int, int]]) -> None:
        """Copy buffers that were changed on another device back to their own."""
        for slot, argument in places:
            if argument in self._part.written and slots[slot].device != args[argument].device:
                args[argument].data.copy_(slots[slot])

    def _outputs(self) -> list[Tensor]:
        return [_own(value) for value in self._step.outputs]

    def _gradients(self) -> dict[str | int, Tensor]:
        return {name: _own(value) for name, value in self._step.gradients.items()}


def _own(tensor: Tensor) -> Tensor:
    """The tensor as the caller's own: no view, to autograd, of what the devices keep; in use by the caller's stream."""
    value = no_view(tensor)
    if value.is_cuda:
        for part in dense_parts(value):
            part.record_stream(torch.cuda.current_stream(value.device))
    return value
