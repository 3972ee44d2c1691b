"""Recording one placed step: its programs are lowered once more, with a look at the clock around each op and each transfer.

The programs that are timed stay as they are, so recording costs them nothing. An op lasts from when all it reads is there until what
follows it may begin, with the tensors that it gives away given: what a profile, and so a prediction, counts as the op's. A transfer lasts
from when its tensor is given away until it is there. Whether that was before its reader came for it, the sender says.
"""

import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from baechi_ext.capture.torch_joint import Binding
from baechi_ext.ir import OpGraph
from baechi_ext.ir.measured import HeldBytes, MeasuredOp, MeasuredStep, MeasuredTransfer
from runtime.accounting import Held, held_by_threads
from runtime.executor import LoadedStep
from runtime.program import cut
from runtime.thread_executor import PlacedStep
from runtime.torch_devices import TorchDevice
from runtime.torch_ops import Exchange, LoweredProgram, Lowering, Slots

RUNS = 3
"""Steps that are recorded; the one of the median time is kept."""
_TRIES = 5
NO_CUDA_TRANSFERS = "transfers between CUDA devices run on streams that are not recorded; they are left out"


class Clock(Protocol):
    """Where marks come from, and when they were on the host's monotonic clock."""

    name: str

    def begin(self) -> None:
        """Before the first mark of a step, in the device's own thread."""

    def mark(self) -> Any:
        """Now."""

    def at_ns(self, mark: Any) -> int:
        """When that was, once the device has done its step."""


class HostClock:
    """CLOCK_MONOTONIC, which all processes of a machine share."""

    name = "monotonic"
    mark = staticmethod(time.monotonic_ns)

    def begin(self) -> None:
        """It always runs."""

    def at_ns(self, mark: int) -> int:
        return mark


class EventClock:
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


def clock_of(device: TorchDevice) -> Clock:
    return HostClock() if device.torch_device.type == "cpu" else EventClock(device)


@dataclass(frozen=True, slots=True)
class DeviceNotes:
    """What one device noted of a step, in nanoseconds of its host's monotonic clock; as JSON it is an object of lists."""

    ops: Sequence[Sequence[int]]
    """Op, start and end, in the order of the device's program."""
    sent: Sequence[Sequence[int]]
    """Tensor, target, when it was given away, and when that was done."""
    received: Sequence[Sequence[int]]
    """Tensor, when its reader came for it, and when it had it."""

    @property
    def span_ns(self) -> tuple[int, int] | None:
        """From the first thing noted to the last; None where nothing was."""
        times = [ns for row in (*self.ops, *self.sent, *self.received) for ns in row[-2:]]
        return (min(times), max(times)) if times else None

    def then(self, other: "DeviceNotes") -> "DeviceNotes":
        """These, and behind them those of the rest of the step."""
        return DeviceNotes([*self.ops, *other.ops], [*self.sent, *other.sent], [*self.received, *other.received])

    def shifted(self, ns: int) -> "DeviceNotes":
        """The same by a clock that is so much ahead."""
        return DeviceNotes(
            [(op, start + ns, end + ns) for op, start, end in self.ops],
            [(tensor, target, begin + ns, end + ns) for tensor, target, begin, end in self.sent],
            [(tensor, begin + ns, end + ns) for tensor, begin, end in self.received],
        )


class DeviceLog:
    """Takes the notes of one device, and makes what notes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
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
        segments = [
            replace(s, before=(*s.before[: s.arrivals], note, *s.before[s.arrivals :]), after=(*s.after, note)) for s in program.segments
        ]
        return replace(program, segments=tuple(segments))

    def exchange(self, exchange: Exchange) -> Exchange:
        """The exchange, its transfers noted where the host can tell when they are."""
        return _NotingExchange(exchange, self) if isinstance(self._clock, HostClock) else exchange

    def notes(self) -> DeviceNotes:
        """Of the last step."""
        at_ns = self._clock.at_ns
        spans = zip(self._ops, self._marks[::2], self._marks[1::2], strict=True)
        return DeviceNotes(
            [(op, at_ns(start), at_ns(end)) for op, start, end in spans],
            [(*key, *span) for key, span in self.sent.items()],
            [(tensor, *span) for tensor, span in self.received.items()],
        )


class _NotingExchange:
    """Mailboxes, or whatever gives a tensor away for good when it returns."""

    def __init__(self, exchange: Exchange, log: DeviceLog) -> None:
        self._exchange = exchange
        self._log = log
        self.abort = exchange.abort

    def giver(self, tensor: int, target: int) -> Callable[[Any], None]:
        give, sent = self._exchange.giver(tensor, target), self._log.sent

        def noting(value: Any) -> None:
            begin = time.monotonic_ns()
            give(value)
            sent[tensor, target] = begin, time.monotonic_ns()

        return noting

    def taker(self, tensor: int, target: int) -> Callable[[], Any]:
        return noting_taker(self._exchange.taker(tensor, target), tensor, self._log)


def noting_taker(take: Callable[[], Any], tensor: int, log: DeviceLog) -> Callable[[], Any]:
    """`take`, which notes when the reader of `tensor` came for it, and when it had it."""

    def noting() -> Any:
        begin = time.monotonic_ns()
        value = take()
        log.received[tensor] = begin, time.monotonic_ns()
        return value

    return noting


@dataclass(frozen=True)
class Recording:
    """One recorded step, before its times are put together: what was noted, and counted in a further step."""

    begin_ns: int
    wall_us: float
    devices: Sequence[DeviceNotes]
    held: Sequence[Held] | None
    """None where nobody counted."""
    clock: str
    notes: tuple[str, ...] = ()

    def measured(self, graph: OpGraph, executor: str) -> MeasuredStep:
        """The recorded step, for people and files."""
        return MeasuredStep(
            graph_fingerprint=graph.fingerprint,
            executor=executor,
            clock=self.clock,
            wall_us=self.wall_us,
            ops=tuple(self._ops(graph)),
            transfers=tuple(sorted(self._transfers(graph), key=lambda t: t.start_us)),
            memory=None if self.held is None else tuple(map(self._memory, self.devices, self.held)),
            notes=self.notes,
        )

    def _us(self, ns: int) -> float:
        return max(0, ns - self.begin_ns) / 1000

    def _ops(self, graph: OpGraph) -> Iterable[MeasuredOp]:
        for index, device in enumerate(self.devices):
            yield from (MeasuredOp(graph.ops[op].id, index, self._us(start), self._us(end)) for op, start, end in device.ops)

    def _transfers(self, graph: OpGraph) -> Iterable[MeasuredTransfer]:
        received = [{tensor: (begin, end) for tensor, begin, end in device.received} for device in self.devices]
        for source, device in enumerate(self.devices):
            for tensor, target, given, gone in device.sent:
                came, had = received[target][tensor]
                there = had if gone > came else gone
                made = graph.tensors[tensor]
                start_us = self._us(given)
                yield MeasuredTransfer(graph.ops[made.producer].id, made.name, source, target, start_us, max(start_us, self._us(there)))

    def _memory(self, device: DeviceNotes, held: Held) -> tuple[HeldBytes, ...]:
        spans: Mapping[int, Sequence[int]] = {op: span for op, *span in device.ops}
        found = [HeldBytes(0.0, held.resident)]
        for op, running, after in held.ops:
            start, end = spans[op]
            found += [HeldBytes(self._us(start), held.resident + running), HeldBytes(self._us(end), held.resident + after)]
        return tuple(found)


class Recorded(Protocol):
    """A recorded step, whoever recorded it."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said of it."""

    def measured(self, graph: OpGraph, executor: str) -> MeasuredStep:
        """The step, for people and files."""


def record_step(placed: LoadedStep, binding: Binding) -> Recorded:
    """A few more steps, recorded, the one of the median time kept; and one in which memory is counted. The state goes on with them."""
    gc.collect()
    gc.disable()
    try:
        return _of_threads(placed, binding) if isinstance(placed, PlacedStep) else placed.record()
    finally:
        gc.enable()


def _of_threads(placed: PlacedStep, binding: Binding) -> Recording:
    executor, context, timeline = placed.executor, placed.context, placed.timeline
    programs = cut(timeline)
    devices = executor.devices[: len(programs)]
    logs = [DeviceLog(clock_of(device)) for device in devices]
    noting = []
    for i, (log, device, program) in enumerate(zip(logs, devices, programs, strict=True)):
        watched = replace(context, mailboxes=log.exchange(context.mailboxes))
        noting.append(log.noting(Lowering(watched, device, i).lower(program)))
    recorded = PlacedStep(executor, noting, context, timeline)
    recorded.limits = placed.limits
    runs = []
    for _ in range(1 + RUNS):
        for i, log in enumerate(logs):
            executor.call(i, log.begin)
        begin_ns = time.monotonic_ns()
        recorded.run()
        wall_us = (time.monotonic_ns() - begin_ns) / 1000
        runs.append((wall_us, begin_ns, [log.notes() for log in logs]))
    wall_us, begin_ns, notes = middle(runs[1:])
    on_host = all(d.torch_device.type == "cpu" for d in devices)
    said = () if on_host or not timeline.transfers else (NO_CUDA_TRANSFERS,)
    return Recording(begin_ns, wall_us, notes, held_by_threads(placed, timeline, binding), clock_of(devices[0]).name, said)


def middle(runs: Sequence[tuple[float, int, Any]]) -> tuple[float, int, Any]:
    """The run of the median time."""
    return sorted(runs, key=lambda run: run[0])[len(runs) // 2]
