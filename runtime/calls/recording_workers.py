"""Recording placed calls on worker processes: every worker notes its own share of the same calls, and worker 0 puts them together when the
script has ended. Until then what the others noted is in the group's store, so that recording adds no message to a call.
"""

import itertools
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

from baechi_ext.capture.torch_module import CapturedCall
from baechi_ext.ir import OpGraph
from baechi_ext.ir.measured import MeasuredStep
from baechi_ext.simulate import Timeline
from runtime.accounting import CountedSlots, Held, counting
from runtime.calls.optimizers import resident_bytes
from runtime.calls.phases import ModuleStep
from runtime.calls.recording import CallRecorder, CountedTimes, Noted, NotedTimes, recorder_of
from runtime.calls.workers import WorkerPhases, Workers
from runtime.processes.channels import Channels
from runtime.processes.noting_channels import NotingChannels, clock_ahead, clocks_ahead, tell_clock
from runtime.step_recorder import DeviceLog, DeviceNotes, HostClock
from runtime.thread_executor import StepTimes, ThreadExecutor
from runtime.torch_ops import LoweredProgram, Slots

ALL_HELD = "every worker holds all parameters, and what optimizers keep for them; the plan counts those that its ops read"
_WAITING = timedelta(seconds=10)
"""For what another worker noted in a call that is over."""
_numbers = itertools.count()
"""Of the recorders of a process, which all workers make in the same order."""


class NotedWorkerPhases(WorkerPhases):
    """A worker's share of a placed call, whose ops and transfers are noted."""

    def __init__(self, workers: Workers, *loaded: Any) -> None:
        self._logs = [DeviceLog(HostClock()) for _ in range(2)]
        super().__init__(workers, *loaded)

    def _made_channels(self, phase: int, ops: Collection[int]) -> Channels:
        channels = NotingChannels(self._timeline, self._call.binding, self._workers.group, self._workers.device, ops)
        channels.log = self._logs[phase]
        return channels

    def _watched(self, program: LoweredProgram, phase: int) -> LoweredProgram:
        return self._logs[phase].noting(program)

    def _begin(self, phase: int) -> int:
        self._logs[phase].begin()
        return super()._begin(phase)

    def _times(self, phase: int, begin_ns: int, busy_us: tuple[float, ...]) -> StepTimes:
        times = super()._times(phase, begin_ns, busy_us)
        return NotedTimes(times.wall_us, busy_us, begin_ns, (self._logs[phase].notes(),))


class CountedWorkerPhases(WorkerPhases):
    """A worker's share of a placed call in which what it holds is counted."""

    def __init__(self, workers: Workers, *loaded: Any) -> None:
        self._counts: list[list[tuple[int, int, int]]] = [[], []]
        super().__init__(workers, *loaded)

    def _watched(self, program: LoweredProgram, phase: int) -> LoweredProgram:
        return counting(program, self._timeline, self._counts[phase])

    def _slots(self, size: int) -> Slots:
        return CountedSlots(size, {value.untyped_storage().data_ptr() for value in self._step.live.values()})

    def _begin(self, phase: int) -> int:
        self._counts[phase].clear()
        return super()._begin(phase)

    def _times(self, phase: int, begin_ns: int, busy_us: tuple[float, ...]) -> StepTimes:
        times = super()._times(phase, begin_ns, busy_us)
        return CountedTimes(times.wall_us, busy_us, (list(self._counts[phase]),))


class WorkerRecorder(CallRecorder):
    """One worker's recorder; all workers record the same calls."""

    def __init__(self, workers: Workers, phases: WorkerPhases, step: ModuleStep) -> None:
        self._workers, self._number = workers, next(_numbers)
        self._ahead = [0] * workers.group.size
        self._apart: list[str] = []

        def noted() -> NotedWorkerPhases:
            self._compare_clocks()
            return phases.loaded_as(NotedWorkerPhases)

        super().__init__(noted, partial(phases.loaded_as, CountedWorkerPhases), lambda: [sum(resident_bytes(step.live).values())])

    def take(self, forward: StepTimes, backward: StepTimes) -> None:
        """See CallRecorder; the others say what they noted."""
        super().take(forward, backward)
        if self._workers.group.rank == 0:
            return
        if self.held is not None:
            self._say("held", [asdict(held) for held in self.held])
        else:
            self._say(f"call {len(self.noted) - 1}", [asdict(times) for times in self.noted[-1]])

    def measured(self, graph: OpGraph, executor: str, clock: str) -> MeasuredStep | None:
        """See CallRecorder. None, too, where another worker did not say what it noted."""
        try:
            return super().measured(graph, executor, clock)
        except RuntimeError:  # the store waited in vain, or is gone
            return None

    def parts(self, number: int) -> list[Noted]:
        """See CallRecorder; by the clock of worker 0."""
        others = [self._times(rank, number) for rank in range(1, self._workers.group.size)]
        return [*super().parts(number), *others]

    def everywhere_held(self) -> Sequence[Held] | None:
        """See CallRecorder."""
        if self.held is None:
            return None
        others = (self._heard(rank, "held") for rank in range(1, self._workers.group.size))
        return [*self.held, *(Held(**held) for said in others for held in said)]

    def notes(self) -> list[str]:
        """See CallRecorder."""
        return [*super().notes(), *([] if self.held is None else [ALL_HELD]), *self._apart]

    def _compare_clocks(self) -> None:
        devices, own = self._workers.devices, self._workers.group.rank
        if own == 0:
            self._ahead, self._apart = clocks_ahead(devices, clock_ahead)
        elif devices[own].node != devices[0].node:
            tell_clock()

    def _times(self, rank: int, number: int) -> Noted:
        ahead_ns = self._ahead[rank]
        forward, backward = (
            NotedTimes(
                said["wall_us"],
                tuple(said["busy_us"]),
                said["begin_ns"] - ahead_ns,
                tuple(DeviceNotes(**notes).shifted(-ahead_ns) for notes in said["devices"]),
            )
            for said in self._heard(rank, f"call {number}")
        )
        return forward, backward

    def _say(self, what: str, value: Any) -> None:
        self._workers.group.store.set(self._key(self._workers.group.rank, what), json.dumps(value))

    def _heard(self, rank: int, what: str) -> Any:
        key, store = self._key(rank, what), self._workers.group.store
        store.wait([key], _WAITING)
        return json.loads(store.get(key))

    def _key(self, rank: int, what: str) -> str:
        return f"recorded {self._number} {what} {rank}"


def recorder_on(
    executor: ThreadExecutor | Workers, phases: Any, timeline: Timeline, captured: CapturedCall, step: ModuleStep
) -> CallRecorder:
    """What records the placed call that `phases` runs on threads, or on worker processes, of which each has its own."""
    if isinstance(executor, Workers):
        return WorkerRecorder(executor, phases, step)
    return recorder_of(phases, timeline, captured, step)
