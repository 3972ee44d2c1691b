"""Recording placed calls of a script as it runs: some of its ordinary calls are run by programs that look at the clock around each op and
transfer, and one by programs that count what the devices hold. They compute what all others do, and no call is added.

What the script does between a call and its backward pass is its own, and left out: the backward pass begins where the forward pass ended.

On worker processes each notes its own share of the same calls, and worker 0 puts them together when the script has ended. Until then what
the others noted is in the group's store, so that recording adds no message to a call.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

from torch import Tensor

from baechi_ext.capture.torch_fragments import CapturedCall
from baechi_ext.ir import OpGraph
from baechi_ext.ir.measured import MeasuredStep
from baechi_ext.simulate import Timeline
from baechi_runtime.measure.recording import RUNS, DeviceMemory, DeviceNotes, NotedTimes, Recording, joined, middle
from baechi_runtime.measure.timing import StepTimes
from baechi_runtime.report.tables import as_time
from baechi_runtime.torch.calls.optimizers import resident_bytes
from baechi_runtime.torch.calls.phases import Phases, Watch
from baechi_runtime.torch.calls.workers import Workers
from baechi_runtime.torch.lowering.checkpoint import homes
from baechi_runtime.torch.lowering.devices import TorchDevice
from baechi_runtime.torch.lowering.ops import Exchange, LoweredProgram
from baechi_runtime.torch.processes.clocks import clock_ahead, clocks_ahead, tell_clock
from baechi_runtime.torch.threads.accounting import counting
from baechi_runtime.torch.threads.executor import ThreadExecutor
from baechi_runtime.torch.threads.step_recorder import NO_CUDA_TRANSFERS, DeviceLog, HostClock, clock_of

WARM_UP = 1
"""Number of calls after the verified ones that are not recorded."""
_TRIES = 4 * (RUNS + 1)
"""The most calls that are begun to be recorded: some may have no backward pass."""
ALL_HELD = "every worker holds all parameters, and what optimizers keep for them; the plan counts those that its ops read"
NOT_HELD = "what the devices hold was not counted: that is done in a later call, which did not come"
_WAITING = timedelta(seconds=10)
"""The longest wait for what another worker noted in a call that is over."""
_numbers = itertools.count()
"""Numbers for the recorders of a process, which all workers make in the same order."""
Noted = tuple[NotedTimes, NotedTimes]
"""The forward and the backward phase of a call."""


class CountingLog(DeviceLog):
    """Counts what one device holds, and looks at no clock."""

    def __init__(self, device: TorchDevice, timeline: Timeline, live: Mapping[str, Tensor]) -> None:
        super().__init__(device)
        self._timeline, self._live = timeline, live
        self._found: list[tuple[int, int, int]] = []

    def begin(self) -> None:
        self._found.clear()

    def noting(self, program: LoweredProgram) -> LoweredProgram:
        """The program, whose slots are counted after each of its ops."""
        return counting(program, self._timeline, self._live.values(), self._found)

    def exchange(self, exchange: Exchange) -> Exchange:
        return exchange

    def notes(self) -> DeviceNotes:
        return DeviceNotes(held=list(self._found))


class CallRecorder:
    """Says which calls are recorded, and takes what was noted: after a warm-up RUNS calls op by op, then one in which memory is counted.

    A call counts when its backward pass has run. With workers each has a recorder, and all record the same calls.
    """

    def __init__(
        self, executor: ThreadExecutor | Workers, phases: Phases, timeline: Timeline, call: CapturedCall, live: Mapping[str, Tensor]
    ) -> None:
        self._workers = executor if isinstance(executor, Workers) else None
        self._devices = [executor.device] if isinstance(executor, Workers) else executor.devices[: len(timeline.cluster)]
        self._phases: Phases | None = phases
        self._timeline, self._homes, self._live = timeline, homes(call.binding, timeline.placement), live
        self._name = f"recorded {next(_numbers)}"
        self._ahead: list[int] = []
        self._apart: list[str] = []
        self._loaded: dict[bool, Phases] = {}
        self._begun = 0
        self.noted: list[Noted] = []
        self.held: list[DeviceMemory] | None = None

    def is_next(self) -> bool:
        """True if the next call that runs placed is recorded."""
        return self.held is None and WARM_UP <= self._begun < WARM_UP + _TRIES

    def phases(self) -> Phases | None:
        """The phases that run the call that begins now, if it is recorded; None if the programs that are timed run it."""
        is_recorded = self.is_next()
        self._begun += 1
        if self._phases is None or not is_recorded:
            self._loaded.clear()
            return None
        noting = len(self.noted) < RUNS
        if noting not in self._loaded:
            self._loaded = {noting: self._phases.watched_by(self._watch(noting))}
        return self._loaded[noting]

    def end(self) -> None:
        """Let go of the programs: no further call is recorded."""
        self._phases, self._loaded = None, {}

    def _watch(self, noting: bool) -> Watch:
        if not noting:
            return Watch(lambda device: CountingLog(device, self._timeline, self._live), self._devices)
        if self._workers is not None:
            self._compare_clocks(self._workers)
        return Watch(DeviceLog, self._devices)

    def take(self, forward: StepTimes, backward: StepTimes) -> None:
        """Take the phases of a call that was recorded; with workers, the others say what they noted."""
        if not isinstance(forward, NotedTimes) or not isinstance(backward, NotedTimes):
            return
        counted = [first.then(later).held for first, later in zip(forward.devices, backward.devices, strict=True)]
        if counted[0] is not None:
            self.held = [DeviceMemory(resident, ops or ()) for resident, ops in zip(self._resident(), counted, strict=True)]
            self._say("held", self.held)
        else:
            self._say(f"call {len(self.noted)}", (forward, backward))
            self.noted.append((forward, backward))

    def measured(self, graph: OpGraph, executor: str) -> MeasuredStep | None:
        """The recorded call of the median time; None where no call was, or another worker did not say what it noted."""
        if not self.noted:
            return None
        number = middle(range(len(self.noted)), lambda i: sum(times.wall_us for times in self.noted[i]))
        try:
            parts = [self.noted[number], *(self._by_our_clock(said, ns) for said, ns in self._heard(f"call {number}"))]
            held = None if self.held is None else [*self.held, *(DeviceMemory(**h) for said, _ in self._heard("held") for h in said)]
        except RuntimeError:  # the store waited in vain, or is gone
            return None
        (begin_ns, wall_us, devices), between_us = joined(parts)
        idle = len(self._timeline.cluster) - len(devices)  # where the plan leaves all to one device, that one alone is there
        clock = clock_of(self._devices[0]).name
        notes = [f"what the script does between a call and its backward pass, in this call for {as_time(between_us)}, is left out"]
        notes += [NO_CUDA_TRANSFERS] if clock != HostClock.name else []
        notes += [NOT_HELD] if not held else [ALL_HELD] if self._workers is not None else []
        devices = [*devices, *[DeviceNotes()] * idle]
        held = held and [*held, *[DeviceMemory(0, ())] * idle]
        return Recording(begin_ns, wall_us, devices, held, clock, (*notes, *self._apart)).measured(graph, executor)

    def _resident(self) -> list[int]:
        """Bytes that each device of this process holds for the whole of a step."""
        sizes = resident_bytes(self._live)
        if self._workers is not None:
            return [sum(sizes.values())]
        held = [0] * len(self._devices)
        for name, home in self._homes.items():
            held[home] += sizes.get(name, 0)  # the script may have let go of it
        return held

    def _compare_clocks(self, workers: Workers) -> None:
        devices, own = workers.devices, workers.group.rank
        if own == 0:
            self._ahead, self._apart = clocks_ahead(devices, partial(clock_ahead, workers.group))
        elif devices[own].node != devices[0].node:
            tell_clock(workers.group)

    @staticmethod
    def _by_our_clock(said: Sequence[dict[str, Any]], ahead_ns: int) -> Noted:
        def noted(wall_us: float, busy_us: Sequence[float], begin_ns: int, devices: Sequence[dict[str, Any]]) -> NotedTimes:
            shifted = tuple(DeviceNotes(**notes).shifted(-ahead_ns) for notes in devices)
            return NotedTimes(wall_us, tuple(busy_us), begin_ns - ahead_ns, shifted)

        return noted(**said[0]), noted(**said[1])

    def _say(self, what: str, values: Sequence[Any]) -> None:
        if self._workers is not None and self._workers.group.rank:
            group = self._workers.group
            group.store.set(f"{self._name} {what} {group.rank}", json.dumps([asdict(value) for value in values]))

    def _heard(self, what: str) -> list[tuple[Any, int]]:
        """For each worker but 0 what it said, and by how many nanoseconds its clock is ahead."""
        found = []
        for rank, ahead_ns in list(enumerate(self._ahead))[1:]:
            key, store = f"{self._name} {what} {rank}", self._workers.group.store  # type: ignore[union-attr]
            store.wait([key], _WAITING)
            found.append((json.loads(store.get(key)), ahead_ns))
        return found
