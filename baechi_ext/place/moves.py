"""The moves of a guided step of the repair, all costed at once. Loading this loads numpy."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.columns import sums_by
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.simulate import Timeline

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Move = tuple[float, int, int, float]
"""Cost per byte, unit, device, bytes."""


@dataclass(frozen=True)
class Moves:
    """The moves of units to other devices: bytes that they free, and time that they cost."""

    graph: OpGraph
    cluster: Cluster
    units: Sequence[tuple[int, ...]]

    def ranked(self, timeline: Timeline, source: int, held: Mapping[int, float], excess: float, room: Sequence[float]) -> list[Move]:
        """The moves of every unit that would free some of the `held` bytes on `source`: first what fits, then what costs least per byte.

        `excess` is what the source exceeds its limit by, `room` that of each device.
        """
        placement, busy = np.array(timeline.placement, np.int64), timeline.busy_us
        members, of = self._members
        held_bytes = np.zeros(len(placement))
        held_bytes[list(held)] = list(held.values())
        sizes = sums_by(of, held_bytes[members], len(self.units))
        units = np.flatnonzero(sizes > 0)
        size = sizes[units]
        cost, unit, device = [], [], []
        targets = [d for d in range(len(self.cluster)) if d != source]
        for d, extra_us in zip(targets, self._extra_transfer_us(placement, units, source, targets), strict=True):
            later_us = np.maximum(0.0, busy[d] + self._work_us[units] / self.cluster.devices[d].speed - busy[source])
            cost.append((np.maximum(0.0, extra_us) + later_us + 1.0) / np.minimum(size, excess))
            unit.append(units)
            device.append(np.full(len(units), d))
        costs, all_units, devices = (np.concatenate(column) for column in (cost, unit, device))
        too_large = np.tile(size, len(cost)) > np.array(room)[devices]
        order = np.lexsort((devices, all_units, costs, too_large))
        columns = (costs[order].tolist(), all_units[order].tolist(), devices[order].tolist(), sizes[all_units[order]].tolist())
        return list(zip(*columns, strict=True))

    @cached_property
    def _members(self) -> tuple[Ints, Ints]:
        """(ops, their units), unit by unit."""
        sizes = np.array(list(map(len, self.units)), np.int64)
        return np.array(list(chain.from_iterable(self.units)), np.int64), np.repeat(np.arange(len(sizes)), sizes)

    @cached_property
    def _work_us(self) -> Floats:
        members, of = self._members
        return sums_by(of, self.graph.columns.compute_us[members], len(self.units))

    @cached_property
    def _edges(self) -> tuple[Ints, Ints, Ints]:
        """(units, tensors, ops at the other end) of all edges between units, unit by unit."""
        columns, n = self.graph.columns, len(self.graph)
        unit, rank = np.full(n, -1), np.zeros(n, np.int64)
        members, of = self._members
        unit[members], rank[members] = of, np.arange(len(members))
        reader, tensor = columns.inputs.owners, columns.inputs.items
        read, other = columns.readers.owners, columns.readers.items
        by_op = np.argsort(columns.producer[read], kind="stable")  # an op's outputs are in the order of the tensors
        here = np.concatenate([reader, columns.producer[read][by_op]])
        tensors = np.concatenate([tensor, read[by_op]])
        there = np.concatenate([columns.producer[tensor], other[by_op]])
        keep = (unit[here] >= 0) & (unit[here] != unit[there])
        here, tensors, there = here[keep], tensors[keep], there[keep]
        order = np.lexsort((rank[here], unit[here]))
        return unit[here][order], tensors[order], there[order]

    @cached_property
    def _links(self) -> tuple[Floats, Floats]:
        """Fixed time and time per byte, by source and target, with what they take from the devices."""
        costs = np.array([[x.total for x in row] for row in self.cluster.link_table()])
        return costs[..., 0], costs[..., 1]

    def _extra_transfer_us(self, placement: Ints, units: Ints, source: int, targets: Sequence[int]) -> Iterator[Floats]:
        """For each target, the transfer time that moving each unit adds, each edge on its own; negative where its neighbours are there."""
        of, tensor, other = self._edges
        number = np.full(len(self.units), -1)
        number[units] = np.arange(len(units))
        inside = number[of] >= 0
        at, size = placement[other[inside]], self.graph.columns.tensor_bytes[tensor[inside]]
        latency_us, us_per_byte = self._links
        mover = np.repeat(number[of[inside]], 2)
        saved = np.where(at == source, 0.0, latency_us[at, source] + size * us_per_byte[at, source])
        for target in targets:
            added = np.where(at == target, 0.0, latency_us[at, target] + size * us_per_byte[at, target])
            yield sums_by(mover, np.column_stack([added, -saved]).ravel(), len(units))
