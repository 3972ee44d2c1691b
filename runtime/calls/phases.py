"""A module's call on several devices: a forward phase, then, when the gradients of its outputs are known, a backward phase.

Both run the static programs of one plan on the executor's devices. What a forward phase keeps for its backward phase stays in the
devices' slots, which belong to the call: several calls may be under way, as where gradients of two calls are added up.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from baechi_ext.capture.torch_module import CapturedCall
from baechi_ext.capture.torch_private import no_view
from baechi_ext.simulate import Timeline
from runtime.mailbox import Mailboxes
from runtime.program import in_two_phases
from runtime.thread_executor import OpFailure, StepTimes, ThreadExecutor
from runtime.torch_devices import TorchDevice
from runtime.torch_ops import Exchange, LoweredProgram, Lowering, OpError, Slots, StepContext

P = TypeVar("P", bound="PhasedStep")


@dataclass
class ModuleStep:
    """What ops read and hand over while a module's call runs: the face of a TrainingStep without a loss and an optimizer of its own."""

    name: str
    live: dict[str, Tensor]
    """Parameters and buffers by their first name."""
    written: tuple[str, ...]
    """Buffers that the step changes."""
    inputs: tuple[Tensor, ...]
    tangents: Sequence[Tensor | None] | None = None
    """The gradients that come in; None: ones, as when the step is profiled."""
    outputs: list[Tensor] = field(default_factory=list)
    gradients: dict[str | int, Tensor] = field(default_factory=dict)
    """Parameter's name or input's number -> gradient."""

    def state(self) -> dict[str, Tensor]:
        return self.live

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """None: the optimizer is in the caller's code."""
        return {}

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of what the step changes, on the host."""
        return {name: self.live[name].detach().to("cpu", copy=True) for name in self.written}

    def restore(self, snapshot: dict[str, Tensor]) -> None:
        """Puts it back, and lets go of what the step handed over."""
        for name, value in snapshot.items():
            self.live[name].data.copy_(value)
        self.forget()

    def forget(self) -> None:
        """Lets go of all tensors of a call but its inputs."""
        self.tangents, self.outputs, self.gradients = None, [], {}

    def replica(self, device: torch.device | str) -> "ModuleStep":
        """The same step with tensors of its own on `device`."""
        live = {name: value.detach().to(device, copy=True) for name, value in self.live.items()}
        return ModuleStep(self.name, live, self.written, tuple(i.detach().to(device, copy=True) for i in self.inputs))


class PhasedStep:
    """One plan of a module's call, loaded into an executor. Not more than one phase runs at a time."""

    def __init__(
        self, executor: ThreadExecutor, timeline: Timeline, call: CapturedCall, step: ModuleStep, lock: "threading.Lock | None" = None
    ) -> None:
        """`lock` is held while a phase runs."""
        self._executor = executor
        self._timeline = timeline
        self._call = call
        self._step = step
        self._lock = threading.Lock() if lock is None else lock
        self._devices = executor.devices[: len(timeline.cluster)]
        self._on_host = all(d.torch_device.type == "cpu" for d in self._devices)
        if not self._on_host:
            self._spread_state()
        self._load()

    def loaded_as(self, kind: type[P]) -> P:
        """The same call with programs of its own, which share the slots' layout with these. A phase of either runs at a time."""
        return kind(self._executor, self._timeline, self._call, self._step, self._lock)

    def _load(self) -> None:
        mailboxes = Mailboxes(self._executor.timeout_seconds)
        context = StepContext(self._timeline.graph, self._call.binding, self._step, mailboxes, {})  # type: ignore[arg-type]
        self._abort = mailboxes.abort
        self._programs: list[list[LoweredProgram]] = []
        for index, phases in enumerate(in_two_phases(self._timeline, self._call.binding.forward_ops)):
            lowering = Lowering(context, self._devices[index], index)
            self._programs.append([])
            for phase, program in enumerate(phases):
                lowering.context = replace(context, mailboxes=self._exchange(mailboxes, phase, index))
                self._programs[-1].append(self._watched(lowering.lower(program), phase, index))

    def _exchange(self, mailboxes: Exchange, phase: int, device: int) -> Exchange:
        """What a device's program of a phase sends and receives by."""
        return mailboxes

    def _watched(self, program: LoweredProgram, phase: int, device: int) -> LoweredProgram:
        """What is run of a device's program."""
        return program

    def _slots(self, size: int) -> Slots:
        """Of a device, empty."""
        return [None] * size

    def _spread_state(self) -> None:
        """Each parameter and buffer moves to where it is read."""
        for name, reader in self._call.binding.state_reader.items():
            value = self._step.live[name]
            value.data = value.data.to(self._devices[self._timeline.placement[reader]].torch_device)

    def forward(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Slots], StepTimes]:
        """The outputs, what the devices keep for the backward phase, and the phase's times.

        Raises ExecutionError where an op fails or a device does not answer in time.
        """
        with self._lock:
            self._step.inputs = tuple(inputs)
            try:
                kept = [self._slots(max(p.num_slots for p in programs)) for programs in self._programs]
                times = self._run(0, kept)
                return self._handed_over(self._step.outputs), kept, times
            finally:
                self._step.inputs = ()
                self._step.forget()

    def backward(self, tangents: Sequence[Tensor | None], kept: list[Slots]) -> tuple[dict[str | int, Tensor], StepTimes]:
        """The gradients by parameter's name or input's number, from those of the differentiable outputs; uses up `kept`."""
        with self._lock:
            self._step.tangents = tangents
            try:
                times = self._run(1, kept)
                gradients = self._step.gradients
                return dict(zip(gradients, self._handed_over(list(gradients.values())), strict=True)), times
            finally:
                for slots in kept:
                    slots.clear()
                self._step.forget()

    def _run(self, phase: int, kept: list[Slots]) -> StepTimes:
        begin_ns = self._begin(phase)
        devices = zip(self._programs, self._devices, kept, strict=True)
        tasks = [self._task(programs[phase], device, slots) for programs, device, slots in devices]
        try:
            busy = self._executor.run_all(tasks, on_failure=self._abort)
        except BaseException:
            self._load()  # the boxes of an aborted step are useless
            raise
        return self._times(phase, begin_ns, tuple(busy))

    def _times(self, phase: int, begin_ns: int, busy_us: tuple[float, ...]) -> StepTimes:
        """Of a phase that has ended just now."""
        return StepTimes((time.monotonic_ns() - begin_ns) / 1000, busy_us)

    def _begin(self, phase: int) -> int:
        """When the phase began, with all that was given to CUDA devices so far done."""
        for device in self._devices:
            if device.torch_device.type == "cuda":
                torch.cuda.current_stream(device.torch_device).synchronize()
        return time.monotonic_ns()

    def _task(self, program: LoweredProgram, device: TorchDevice, slots: Slots) -> Callable[[], float]:
        def task() -> float:
            start = device.mark()
            try:
                program.run(slots)
            except OpError as e:
                self._abort()
                raise OpFailure(e.explain(device.name, self._timeline.graph)) from e.cause
            except BaseException:
                self._abort()
                raise
            end = device.mark()
            device.synchronize()
            return device.elapsed_us(start, end)

        return task

    def _handed_over(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors as the caller's own: no views, to autograd, of what the devices keep; in use by the caller's stream."""
        own = [no_view(t) for t in tensors]
        for value in own:
            if value.is_cuda:
                value.record_stream(torch.cuda.current_stream(value.device))
        return own

