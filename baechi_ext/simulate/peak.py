"""The memory of a simulated step: the most that each device holds at one instant."""

import numpy as np

from baechi_ext.simulate.timeline import Timeline


def peak_memory_bytes(timeline: Timeline) -> tuple[int | float, ...]:
    """Peak bytes per device of a timeline (docs/simulator.md, "Memory")."""
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
    device = np.concatenate([target, home, place])
    since = np.concatenate([sent_us, start[columns.producer], start])
    until = np.concatenate([last, until, end])
    size = np.concatenate([columns.tensor_bytes[tensor], columns.tensor_bytes, columns.working_bytes()])
    counts = (size != 0) & (until > since)
    base = np.bincount(place, columns.persistent_bytes, k)
    held = [counts & (device == d) for d in range(k)]
    return tuple(_peak(b, since[h], until[h], size[h]) for b, h in zip(base, held, strict=True))


_NONE_SENT = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), np.zeros(0))


def _peak(base: float, since: np.ndarray, until: np.ndarray, size: np.ndarray) -> int | float:
    """The most that is held at one instant: `base`, and each size from `since` on; what ends is given back first."""
    changes = np.concatenate([size, -size])
    begins = np.repeat([1, 0], len(size))
    order = np.lexsort((changes, begins, np.concatenate([since, until])))
    top = float(np.cumsum(np.concatenate([[base], changes[order]])).max())
    return int(top) if top.is_integer() else top
