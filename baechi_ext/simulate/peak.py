"""The memory of a simulated step: what each device holds when, and the most at one instant."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from baechi_ext.ir.columns import sums_by
from baechi_ext.ir.op_graph import OpGraph

COPY, TENSOR, WORKING = range(3)
"""Kinds of what is held: a received copy, a tensor where it is produced, what an op needs only while it runs."""


class Simulated(Protocol):
    """The fields of a `Timeline` that say what is held."""

    @property
    def graph(self) -> OpGraph: ...
    @property
    def placement(self) -> Sequence[int]: ...
    @property
    def busy_us(self) -> Sequence[float]: ...
    @property
    def start_us(self) -> Sequence[float]: ...
    @property
    def end_us(self) -> Sequence[float]: ...
    @property
    def transfers(self) -> Sequence[Any]: ...


class Holdings(NamedTuple):
    """All that devices hold for a part of the step (docs/simulator.md, "Memory"), an entry each. What takes nothing is left out."""

    device: NDArray[np.int64]
    since_us: NDArray[np.float64]
    until_us: NDArray[np.float64]
    bytes: NDArray[np.float64]
    kind: NDArray[np.int64]
    item: NDArray[np.int64]
    """A tensor's position in the graph, or an op's."""

    def of(self, device: int) -> "Holdings":
        """Those of one device."""
        here = self.device == device
        return Holdings(*(column[here] for column in self))

    def course(self, base: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The times at which the sum of `base` and all entries changes, and the sums from then on; what ends is given back first."""
        changes = np.concatenate([self.bytes, -self.bytes])
        begins = np.repeat([1, 0], len(self.bytes))
        at_us = np.concatenate([self.since_us, self.until_us])
        order = np.lexsort((changes, begins, at_us))
        return np.concatenate([[0.0], at_us[order]]), np.cumsum(np.concatenate([[base], changes[order]]))

    def at_peak(self, base: float = 0.0) -> tuple[float, list[tuple[int, int, float]]]:
        """The first instant at which the sum of `base` and all entries is the largest; kind, item and bytes of what is held then."""
        at_us, bytes_then = self.course(base)
        peak_us = float(at_us[bytes_then.argmax()])
        live = (self.since_us <= peak_us) & (self.until_us > peak_us)
        columns = (column[live].tolist() for column in (self.kind, self.item, self.bytes))
        return peak_us, list(zip(*columns, strict=True))


def peak_memory_bytes(timeline: Simulated) -> tuple[int | float, ...]:
    """Peak bytes per device of a timeline (docs/simulator.md, "Memory")."""
    held = holdings(timeline)
    peaks = [float(held.of(d).course(base)[1].max()) for d, base in enumerate(persistent_bytes(timeline))]
    return tuple(int(peak) if peak.is_integer() else peak for peak in peaks)


def persistent_bytes(timeline: Simulated) -> NDArray[np.float64]:
    """Bytes that each device holds for the whole step."""
    return sums_by(np.array(timeline.placement, np.int64), timeline.graph.columns.persistent_bytes, len(timeline.busy_us))


def holdings(timeline: Simulated) -> Holdings:
    """All that devices hold beside persistent bytes."""
    columns, k = timeline.graph.columns, len(timeline.busy_us)
    place = np.array(timeline.placement, np.int64)
    start, end = np.array(timeline.start_us), np.array(timeline.end_us)
    sent = [(x.tensor, x.target, x.start_us, x.end_us) for x in timeline.transfers]
    tensor, target, sent_us, arrived_us = (np.array(column) for column in zip(*sent, strict=True)) if sent else _NONE_SENT
    read, reader, home = columns.readers.owners, columns.readers.items, place[columns.producer]
    remote = place[reader] != home[read]
    until = end[columns.producer]
    np.maximum.at(until, read[~remote], end[reader[~remote]])
    np.maximum.at(until, tensor, arrived_us)
    copies = tensor * k + target
    by_copy = np.argsort(copies)
    copy_of = by_copy[np.searchsorted(copies, read[remote] * k + place[reader[remote]], sorter=by_copy)]
    last = np.zeros(len(copies))
    np.maximum.at(last, copy_of, end[reader[remote]])
    found = Holdings(
        device=np.concatenate([target, home, place]),
        since_us=np.concatenate([sent_us, start[columns.producer], start]),
        until_us=np.concatenate([last, until, end]),
        bytes=np.concatenate([columns.tensor_bytes[tensor], columns.home_bytes, columns.working_bytes()]),
        kind=np.repeat([COPY, TENSOR, WORKING], [len(tensor), len(home), len(place)]),
        item=np.concatenate([tensor, np.arange(len(home)), np.arange(len(place))]),
    )
    counts = (found.bytes != 0) & (found.until_us > found.since_us)
    return Holdings(*(column[counts] for column in found))


_NONE_SENT = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
