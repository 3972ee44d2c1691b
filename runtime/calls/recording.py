"""Recording placed calls of a script as it runs: some of its ordinary calls are run by programs that look at the clock around each op and
transfer, and one by programs that count what the devices hold. They compute what all others do, and no call is added.

What the script does between a call and its backward pass is its own, and left out: the backward pass begins where the forward pass ended.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from torch import Tensor

from baechi_ext.capture.torch_module import CapturedCall
from baechi_ext.ir import OpGraph
from baechi_ext.ir.measured import MeasuredStep
from baechi_ext.simulate import Timeline
from runtime.accounting import CountedSlots, Held, counting
from runtime.calls.optimizers import resident_bytes
from runtime.calls.phases import ModuleStep, PhasedStep
from runtime.step_recorder import NO_CUDA_TRANSFERS, RUNS, DeviceLog, DeviceNotes, HostClock, Recording, clock_of, middle
from runtime.tables import as_time
from runtime.thread_executor import StepTimes
from runtime.torch_ops import Exchange, LoweredProgram, Slots

WARM_UP = 1
"""So many calls behind the verified ones are not recorded."""
_TRIES = 4 * (RUNS + 1)
"""No more calls are begun to be recorded: some may have no backward pass."""


class Phases(Protocol):
    """What runs a placed call: PhasedStep, or WorkerPhases."""

    def forward(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Slots], StepTimes]:
        """See PhasedStep."""

    def backward(self, tangents: Sequence[Tensor | None], kept: list[Slots]) -> tuple[dict[str | int, Tensor], StepTimes]:
        """See PhasedStep."""


@dataclass(frozen=True, slots=True)
class NotedTimes(StepTimes):
    """Times of a recorded phase, and what this process's devices noted of it."""

    begin_ns: int
    devices: tuple[DeviceNotes, ...]

    @property
    def end_ns(self) -> int:
        return self.begin_ns + round(self.wall_us * 1000)


@dataclass(frozen=True, slots=True)
class CountedTimes(StepTimes):
    """Times of a counted phase, and for each of this process's devices what `live_bytes` says of its ops."""

    counts: tuple[list[tuple[int, int, int]], ...]


Noted = tuple[NotedTimes, NotedTimes]
"""The forward and the backward phase of a call."""


class NotedPhases(PhasedStep):
    """A placed call whose ops and transfers are noted."""

    def _load(self) -> None:
        self._logs = [[DeviceLog(clock_of(device)) for device in self._devices] for _ in range(2)]
        super()._load()

    def _exchange(self, mailboxes: Exchange, phase: int, device: int) -> Exchange:
        return self._logs[phase][device].exchange(mailboxes)

    def _watched(self, program: LoweredProgram, phase: int, device: int) -> LoweredProgram:
        return self._logs[phase][device].noting(program)

    def _begin(self, phase: int) -> int:
        for device, log in enumerate(self._logs[phase]):
            self._executor.call(device, log.begin)
        return super()._begin(phase)

    def _times(self, phase: int, begin_ns: int, busy_us: tuple[float, ...]) -> StepTimes:
        times = super()._times(phase, begin_ns, busy_us)
        return NotedTimes(times.wall_us, busy_us, begin_ns, tuple(log.notes() for log in self._logs[phase]))


class CountedPhases(PhasedStep):
    """A placed call in which what the devices hold is counted."""

    def _load(self) -> None:
        self._counts: list[list[list[tuple[int, int, int]]]] = [[[] for _ in self._devices] for _ in range(2)]
        super()._load()

    def _watched(self, program: LoweredProgram, phase: int, device: int) -> LoweredProgram:
        return counting(program, self._timeline, self._counts[phase][device])

    def _slots(self, size: int) -> Slots:
        return CountedSlots(size, {value.untyped_storage().data_ptr() for value in self._step.live.values()})

    def _begin(self, phase: int) -> int:
        for counts in self._counts[phase]:
            counts.clear()
        return super()._begin(phase)

    def _times(self, phase: int, begin_ns: int, busy_us: tuple[float, ...]) -> StepTimes:
        times = super()._times(phase, begin_ns, busy_us)
        return CountedTimes(times.wall_us, busy_us, tuple(list(counts) for counts in self._counts[phase]))


def recorder_of(phases: PhasedStep, timeline: Timeline, call: CapturedCall, step: ModuleStep) -> "CallRecorder":
    """What records the call that `phases` runs."""

    def resident() -> list[int]:
        sizes, held = resident_bytes(step.live), [0] * len(timeline.cluster)
        for name, reader in call.binding.state_reader.items():
            held[timeline.placement[reader]] += sizes[name]
        return held

    return CallRecorder(partial(phases.loaded_as, NotedPhases), partial(phases.loaded_as, CountedPhases), resident)


class CallRecorder:
    """Says which calls are recorded, and takes what was noted: behind a warm-up RUNS calls op by op, then one in which memory is counted.

    A call counts when its backward pass has run. `resident_bytes` says what each device holds for the whole of a step.
    """

    def __init__(self, noted: Callable[[], Phases], counted: Callable[[], Phases], resident_bytes: Callable[[], Sequence[int]]) -> None:
        self._load = {True: noted, False: counted}
        self._resident_bytes = resident_bytes
        self._loaded: dict[bool, Phases] = {}
        self._begun = 0
        self.noted: list[Noted] = []
        self.held: list[Held] | None = None

    def phases(self) -> Phases | None:
        """What runs the call that begins now, where it is recorded; None: the programs that are timed."""
        self._begun += 1
        if self.held is not None or not WARM_UP < self._begun <= WARM_UP + _TRIES:
            self._loaded.clear()
            return None
        noting = len(self.noted) < RUNS
        if noting not in self._loaded:
            self._loaded = {noting: self._load[noting]()}
        return self._loaded[noting]

    def take(self, forward: StepTimes, backward: StepTimes) -> None:
        """The phases of a call that was recorded."""
        if isinstance(forward, NotedTimes) and isinstance(backward, NotedTimes):
            self.noted.append((forward, backward))
        elif isinstance(forward, CountedTimes) and isinstance(backward, CountedTimes):
            counts = zip(self._resident_bytes(), forward.counts, backward.counts, strict=True)
            self.held = [Held(resident, [*first, *later]) for resident, first, later in counts]

    def measured(self, graph: OpGraph, executor: str, clock: str) -> MeasuredStep | None:
        """The recorded call of the median time; None where no call was."""
        if not self.noted:
            return None
        runs = [(forward.wall_us + backward.wall_us, forward.begin_ns, number) for number, (forward, backward) in enumerate(self.noted)]
        held = self.everywhere_held()
        recording = joined(self.parts(middle(runs)[2]), clock)
        return replace(recording, held=held, notes=(*recording.notes, *self.notes())).measured(graph, executor)

    def notes(self) -> list[str]:
        """What is to be said of a measured step."""
        return [] if self.held else ["what the devices hold was not counted: that is done in a later call, which did not come"]

    def parts(self, number: int) -> list[Noted]:
        """What all processes noted of a recorded call, in the order of their devices."""
        return [self.noted[number]]

    def everywhere_held(self) -> Sequence[Held] | None:
        """What all processes counted."""
        return self.held


def joined(parts: Sequence[Noted], clock: str) -> Recording:
    """The phases of a call as one step, which lasts as long as they do for this process, the first of `parts`. The backward phase is moved
    to the forward phase's end, on all devices by the same time: by less where another process was in it before.
    """
    forward, backward = parts[0]
    pairs = [(first, later) for a, b in parts for first, later in zip(a.devices, b.devices, strict=True)]
    between_ns = backward.begin_ns - forward.end_ns
    room_ns = [later.span_ns[0] - first.span_ns[1] for first, later in pairs if first.span_ns and later.span_ns]
    left_out_ns = min([between_ns, *room_ns])
    devices = [first.then(later.shifted(-left_out_ns)) for first, later in pairs]
    last_ns = max([backward.end_ns - left_out_ns, *(notes.span_ns[1] for notes in devices if notes.span_ns)])
    took = as_time(max(0, between_ns) / 1000)
    notes = [f"what the script does between a call and its backward pass, in this call for {took}, is left out"]
    if clock != HostClock.name:
        notes.append(NO_CUDA_TRANSFERS)
    return Recording(forward.begin_ns, (last_ns - forward.begin_ns) / 1000, devices, None, clock, tuple(notes))
