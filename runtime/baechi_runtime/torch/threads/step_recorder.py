"""Recording one placed step: its programs are lowered once more, with a look at the clock around each op and each transfer.

The programs that are timed stay as they are, so recording costs them nothing.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from baechi_runtime.measure.recording import DeviceNotes
from baechi_runtime.torch.lowering.devices import TorchDevice
from baechi_runtime.torch.lowering.ops import Exchange, LoweredProgram, Slots

_TRIES = 5
NO_CUDA_TRANSFERS = "transfers between CUDA devices run on streams that are not recorded; they are left out"


class HostClock:
    """CLOCK_MONOTONIC, which all processes of a machine share."""

    name = "monotonic"
    mark: Callable[[], Any] = staticmethod(time.monotonic_ns)

    def begin(self) -> None:
        """Before the first mark of a step, in the device's own thread."""

    def at_ns(self, mark: Any) -> int:
        """The host's monotonic time of a mark, once the device has done its step."""
        return int(mark)


class EventClock(HostClock):
    """Events of a CUDA device's compute stream. The host's time of one of them is known to within the few microseconds that it takes to
    wait for it; events of several devices can't be compared otherwise."""

    name = "cuda_event"

    def __init__(self, device: TorchDevice) -> None:
        self._device = device
        self.mark = device.mark

    def begin(self) -> None:
        found = []
        for _ in range(_TRIES):
            self._device.synchronize()
            before = time.monotonic_ns()
            event = self._device.mark()
            event.synchronize()
            after = time.monotonic_ns()
            found.append((after - before, (before + after) // 2, event))
        _, self._first_ns, self._first = min(found, key=lambda item: item[0])

    def at_ns(self, mark: Any) -> int:
        return self._first_ns + round(self._device.elapsed_us(self._first, mark) * 1000)


def clock_of(device: TorchDevice) -> HostClock:
    return HostClock() if device.torch_device.type == "cpu" else EventClock(device)


class DeviceLog:
    """Takes the notes of one device, and makes what notes."""

    def __init__(self, device: TorchDevice) -> None:
        self._clock = clock_of(device)
        self._ops: list[int] = []
        self._marks: list[Any] = []
        self.sent: dict[tuple[int, int], tuple[int, int]] = {}
        self.received: dict[int, tuple[int, int]] = {}

    def begin(self) -> None:
        """Before a step, in the device's thread: a clean sheet."""
        self._marks.clear()
        self.sent.clear()
        self.received.clear()
        self._clock.begin()

    def noting(self, program: LoweredProgram) -> LoweredProgram:
        """The program, each of its ops noted."""
        marks, mark = self._marks, self._clock.mark

        def note(_: Slots) -> None:
            marks.append(mark())

        self._ops = [segment.op for segment in program.segments]
        return replace(program, segments=tuple(replace(s, views=(note, *s.views), after=(*s.after, note)) for s in program.segments))

    def exchange(self, exchange: Exchange) -> Exchange:
        """The exchange, its transfers noted where the host can tell when they are."""
        return exchange if isinstance(self._clock, EventClock) else _NotingExchange(exchange, self)

    def notes(self) -> DeviceNotes:
        """The last step's."""
        at_ns = self._clock.at_ns
        spans = zip(self._ops, self._marks[::2], self._marks[1::2], strict=True)
        return DeviceNotes(
            [(op, at_ns(start), at_ns(end)) for op, start, end in spans],
            [(*key, *span) for key, span in self.sent.items()],
            [(tensor, *span) for tensor, span in self.received.items()],
        )


class _NotingExchange:
    """An exchange, and what a device notes of its sends and receives."""

    def __init__(self, exchange: Exchange, log: DeviceLog) -> None:
        self._exchange = exchange
        self._log = log

    def giver(self, tensor: int, target: int, gone: Callable[[], None] | None = None) -> Callable[[Any], None]:
        sent, key = self._log.sent, (tensor, target)

        def note_end() -> None:
            sent[key] = sent[key][0], time.monotonic_ns()

        give = self._exchange.giver(tensor, target, note_end)

        def noting(value: Any) -> None:
            begin = time.monotonic_ns()
            sent[key] = begin, begin
            give(value)

        return noting

    def taker(self, tensor: int, target: int) -> Callable[[], Any]:
        take, received = self._exchange.taker(tensor, target), self._log.received

        def noting() -> Any:
            begin = time.monotonic_ns()
            value = take()
            received[tensor] = begin, time.monotonic_ns()
            return value

        return noting
