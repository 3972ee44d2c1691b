"""Watches over the phases of a placed call in one process: they time them, and may note the ops and transfers, or count memory."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from baechi_ext.simulate import Timeline
from baechi_runtime.measure.recording import DeviceNotes, NotedTimes
from baechi_runtime.measure.timing import StepTimes
from baechi_runtime.torch.lowering.devices import TorchDevice
from baechi_runtime.torch.lowering.ops import Exchange, LoweredProgram, Slots
from baechi_runtime.torch.threads.accounting import CountedSlots, counting
from baechi_runtime.torch.threads.step_recorder import DeviceLog


class CountingLog:
    """Counts what one device holds, as a DeviceLog that looks at no clock."""

    def __init__(self, timeline: Timeline, live: Iterable[Tensor]) -> None:
        self._timeline = timeline
        self._left_out = {value.untyped_storage().data_ptr() for value in live}
        self._found: list[tuple[int, int, int]] = []
        self.begin = self._found.clear

    def noting(self, program: LoweredProgram) -> LoweredProgram:
        """The program, which runs on `slots`, counted after each of its ops."""
        return counting(program, self._timeline, self._found)

    def exchange(self, exchange: Exchange) -> Exchange:
        """The same exchange."""
        return exchange

    def slots(self, size: int) -> Slots:
        """Slots that know what is in them."""
        return CountedSlots(size, self._left_out)

    def notes(self) -> DeviceNotes:
        """The last phase's."""
        return DeviceNotes(held=list(self._found))


class Watch:
    """Takes the times of phases, and what the logs note that are made for each of the devices; without a `make` there are none."""

    def __init__(self, make: Callable[[TorchDevice], DeviceLog | CountingLog] | None = None, devices: Sequence[TorchDevice] = ()) -> None:
        self._logs = None if make is None else [[make(device) for device in devices] for _ in range(2)]

    def exchange(self, exchange: Exchange, phase: int, device: int = 0) -> Exchange:
        """The exchange through which a device's program of a phase sends and receives."""
        return exchange if self._logs is None else self._logs[phase][device].exchange(exchange)

    def program(self, program: LoweredProgram, phase: int, device: int = 0) -> LoweredProgram:
        """The program to run on a device, given the lowered one."""
        return program if self._logs is None else self._logs[phase][device].noting(program)

    def slots(self, size: int) -> Slots:
        """Empty slots for one device."""
        return [None] * size if self._logs is None else self._logs[0][0].slots(size)

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
