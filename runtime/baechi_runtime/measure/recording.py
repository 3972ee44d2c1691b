"""A step as it ran, op by op: what each device noted of it, whichever executor ran it, becomes a MeasuredStep.

An op lasts from when all it reads is there until what follows it may begin, with the tensors that it gives away given: what a profile, and
so a prediction, counts as the op's. A transfer lasts from when its tensor is given away until it is there. Whether that was before its
reader came for it, the sender says.
"""

import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from baechi_ext.collector import without_collection
from baechi_ext.ir import OpGraph
from baechi_ext.ir.measured import MeasuredOp, MeasuredStep, MeasuredTransfer, ResidentBytes
from baechi_runtime.measure.timing import StepTimes

T = TypeVar("T")
RUNS = 3
"""Steps that are recorded; the one of the median time is kept."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory that a device holds: for the whole of a step, and with each op beyond that."""

    resident: int
    ops: Sequence[Sequence[int]]
    """Op, bytes while it runs, bytes after it, in the order of the device's program."""

    @property
    def peak(self) -> int:
        return self.resident + max((running for _, running, _ in self.ops), default=0)


@dataclass(frozen=True, slots=True)
class DeviceNotes:
    """One device's notes on a step, in nanoseconds of its host's monotonic clock; as JSON an object of lists."""

    ops: Sequence[Sequence[int]] = ()
    """Op, start and end, in the order of the device's program."""
    sent: Sequence[Sequence[int]] = ()
    """Tensor, target, when it was given away, and when that was done."""
    received: Sequence[Sequence[int]] = ()
    """Tensor, when its reader came for it, and when it had it; left out where `sent` says all."""
    held: Sequence[Sequence[int]] | None = None
    """As in `DeviceMemory.ops`, where memory is counted; nothing else is noted then."""

    @property
    def span_ns(self) -> tuple[int, int] | None:
        """From the first thing noted to the last; None where nothing was."""
        times = [ns for row in (*self.ops, *self.sent, *self.received) for ns in row[-2:]]
        return (min(times), max(times)) if times else None

    def then(self, other: "DeviceNotes") -> "DeviceNotes":
        """These, and behind them those of the rest of the step."""
        ops, sent, received = [*self.ops, *other.ops], [*self.sent, *other.sent], [*self.received, *other.received]
        held = None if self.held is None or other.held is None else [*self.held, *other.held]
        return DeviceNotes(ops, sent, received, held)

    def shifted(self, ns: int) -> "DeviceNotes":
        """The same by a clock that is so much ahead."""
        ops, sent, received = ([(*row[:-2], row[-2] + ns, row[-1] + ns) for row in rows] for rows in (self.ops, self.sent, self.received))
        return DeviceNotes(ops, sent, received, self.held)


@dataclass(frozen=True, slots=True)
class NotedTimes(StepTimes):
    """Times of a step or a phase of one, and what this process's devices noted of it."""

    begin_ns: int
    devices: tuple[DeviceNotes, ...]

    @property
    def end_ns(self) -> int:
        return self.begin_ns + round(self.wall_us * 1000)


Run = tuple[int, float, Sequence[DeviceNotes]]
"""When a step began, in nanoseconds; the microseconds that it took; and what the devices noted of it."""


@dataclass(frozen=True)
class Recording:
    """One recorded step, before its times are put together: what was noted, and counted in a further step."""

    begin_ns: int
    wall_us: float
    devices: Sequence[DeviceNotes]
    held: Sequence[DeviceMemory] | None
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

    def us(self, ns: int) -> float:
        """Microseconds from the step's start."""
        return max(0, ns - self.begin_ns) / 1000

    def _ops(self, graph: OpGraph) -> Iterable[MeasuredOp]:
        for index, device in enumerate(self.devices):
            yield from (MeasuredOp(graph.ops[op].id, index, self.us(start), self.us(end)) for op, start, end in device.ops)

    def _transfers(self, graph: OpGraph) -> Iterable[MeasuredTransfer]:
        received = [{tensor: (begin, end) for tensor, begin, end in device.received} for device in self.devices]
        for source, device in enumerate(self.devices):
            for tensor, target, given, gone in device.sent:
                came, had = received[target].get(tensor, (given, gone))
                there = had if gone > came else gone
                made = graph.tensors[tensor]
                start_us = self.us(given)
                yield MeasuredTransfer(graph.ops[made.producer].id, made.name, source, target, start_us, max(start_us, self.us(there)))

    def _memory(self, device: DeviceNotes, held: DeviceMemory) -> tuple[ResidentBytes, ...]:
        spans: Mapping[int, Sequence[int]] = {op: span for op, *span in device.ops}
        found = [ResidentBytes(0.0, held.resident)]
        for op, running, after in held.ops:
            start, end = spans[op]
            found += [ResidentBytes(self.us(start), held.resident + running), ResidentBytes(self.us(end), held.resident + after)]
        return tuple(found)


def middle(runs: Sequence[T], wall_us: Callable[[T], float]) -> T:
    """The run of the median time."""
    return sorted(runs, key=wall_us)[len(runs) // 2]


def recorded_run(begin: Callable[[], object], run: Callable[[], T], notes: Callable[[T], Sequence[DeviceNotes]]) -> Run:
    """The run of the median time of RUNS, behind one to warm up. Before each all devices `begin`; `notes` gets what `run` returns."""
    runs = []
    gc.collect()
    with without_collection():
        for _ in range(1 + RUNS):
            begin()
            begin_ns = time.monotonic_ns()
            done = run()
            wall_us = (time.monotonic_ns() - begin_ns) / 1000
            runs.append((begin_ns, wall_us, notes(done)))
    return middle(runs[1:], lambda run: run[1])


def joined(parts: Sequence[tuple[NotedTimes, NotedTimes]]) -> tuple[Run, float]:
    """The two phases of a step as one, which lasts as long as they do for the first of `parts`, the processes; and the microseconds between
    them. The later phase is moved to the earlier one's end, on all devices by the same time: by less where another process was in it
    before.
    """
    first, later = parts[0]
    pairs = [(one, two) for a, b in parts for one, two in zip(a.devices, b.devices, strict=True)]
    between_ns = later.begin_ns - first.end_ns
    room_ns = [two.span_ns[0] - one.span_ns[1] for one, two in pairs if one.span_ns and two.span_ns]
    left_out_ns = min([between_ns, *room_ns])
    devices = [one.then(two.shifted(-left_out_ns)) for one, two in pairs]
    last_ns = max([later.end_ns - left_out_ns, *(notes.span_ns[1] for notes in devices if notes.span_ns)])
    return (first.begin_ns, (last_ns - first.begin_ns) / 1000, devices), max(0, between_ns) / 1000
