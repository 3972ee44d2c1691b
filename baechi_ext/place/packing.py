"""Which few ops and colocation groups are already too much for the devices: a proof by packing.

A device holds the persistent bytes of its ops for the whole step and, while the neediest of them runs, that op's inputs, outputs and
temporaries. So units (groups, and ops without one) are packed into the devices: the sum of their persistent bytes and the largest need
have to fit. Where no packing exists no plan does. A smallest set is found as for infeasible subsystems of linear programs: drop what
can be dropped while the rest still does not fit (the deletion filter of Chinneck and Dravnieks, ORSA J. Computing 1991).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.chunks import units
from baechi_ext.simulate.holding import live_bytes

_STEPS_OF_A_PACKING, _STEPS = 20_000, 300_000
"""Placements tried for one question, and for all. Steps and no clock: the same input gives the same answer."""

_ROUNDING = 1e-12
"""Sums of sizes that are not whole may be off by so much."""


@dataclass(frozen=True, slots=True)
class Item:
    """A colocation group, or an op without one."""

    name: str
    persistent_bytes: float
    live_bytes: float
    pin: int | None = None

    @property
    def bytes(self) -> float:
        return self.persistent_bytes + self.live_bytes


@dataclass(frozen=True, slots=True)
class Conflict:
    """Items that do not fit on the devices together, the largest first."""

    items: tuple[Item, ...]
    minimal: bool
    """Whether any of them left out lets the others be packed; each was tried."""


def conflict(graph: OpGraph, cluster: Cluster) -> Conflict | None:
    """A set of ops and groups that provably does not fit, as small as could be found; None where nothing is proven."""
    limits = [d.memory_bytes * (1 + _ROUNDING) for d in cluster.devices if d.memory_bytes is not None]
    if len(limits) < len(cluster):
        return None
    live = live_bytes(graph).tolist()
    # What is pinned comes first: after it, devices that hold the same are alike.
    items = sorted((_item(graph, unit, live) for unit in units(graph)), key=lambda item: (item.pin is None, -item.bytes, item.name))
    packing = _Packing(limits)
    found = _smallest_prefix(packing, items)
    return None if found is None else _filtered(packing, found)


def _item(graph: OpGraph, unit: Sequence[int], live: Sequence[float]) -> Item:
    first = graph.ops[unit[0]]
    persistent = sum(graph.ops[v].persistent_bytes for v in unit)
    return Item(first.colocation or first.id, persistent, max(live[v] for v in unit), first.pin)


def _smallest_prefix(packing: "_Packing", items: Sequence[Item]) -> Sequence[Item] | None:
    """So many of the first items that they provably do not fit; None where even all of them may."""
    fits, size = 0, 1
    while packing.fits(items[:size]) is not False:
        if size >= len(items):
            return None
        fits, size = size, min(2 * size, len(items))
    while size - fits > 1:
        middle = (fits + size) // 2
        if packing.fits(items[:middle]) is False:
            size = middle
        else:
            fits = middle
    return items[:size]


def _filtered(packing: "_Packing", items: Sequence[Item]) -> Conflict:
    minimal = True
    left = list(items)
    for item in reversed(items):
        others = [other for other in left if other is not item]
        answer = packing.fits(others)
        if answer is False:
            left = others
        else:
            minimal = minimal and answer is True
    return Conflict(tuple(left), minimal)


class _Packing:
    """Questions about packings into devices of these limits."""

    def __init__(self, limits: Sequence[float]) -> None:
        self._limits = limits
        self._steps = _STEPS

    def fits(self, items: Sequence[Item]) -> bool | None:
        """Whether the items, pinned ones first, can be packed; None where that took too many steps."""
        left = _Left.of(items)
        if left.sums[0] > sum(self._limits):
            return False
        budget = min(_STEPS_OF_A_PACKING, self._steps)
        held = [(0.0, 0.0)] * len(self._limits)
        path: list[tuple[int, tuple[float, float]]] = []
        choices = [self._places(left, 0, held)]
        steps = 0
        while choices and len(path) < len(items) and steps <= budget:
            steps += 1
            if choices[-1]:
                d = choices[-1].pop()
                item = items[len(path)]
                path.append((d, held[d]))
                held[d] = (held[d][0] + item.persistent_bytes, max(held[d][1], item.live_bytes))
                choices.append(self._places(left, len(path), held))
            else:
                choices.pop()
                if path:
                    d, held[d] = path.pop()
        self._steps -= steps
        if len(path) == len(items):
            return True
        return False if not choices else None

    def _places(self, left: "_Left", i: int, held: Sequence[tuple[float, float]]) -> list[int]:
        """The devices that can take item i, the fullest last, one of each kind; none where what is left cannot all fit.

        `held` has for each device the persistent bytes and the largest need beside them.
        """
        if i == len(left.items):
            return []
        item = left.items[i]
        rooms = [limit - persistent for limit, (persistent, _) in zip(self._limits, held, strict=True)]
        if left.sums[i] > sum(room for room in rooms if room >= left.smallest[i]):
            return []
        kinds: dict[tuple[float, float, float], int] = {}
        for d, (limit, (persistent, need)) in enumerate(zip(self._limits, held, strict=True)):
            if item.pin in (None, d) and persistent + item.persistent_bytes + max(need, item.live_bytes) <= limit:
                kinds.setdefault((limit, persistent, need), d)
        return sorted(kinds.values(), key=lambda d: (-rooms[d], -d))


@dataclass(frozen=True, slots=True)
class _Left:
    """Items, and of those from the i-th on the sum and the smallest of their persistent bytes."""

    items: Sequence[Item]
    sums: Sequence[float]
    smallest: Sequence[float]

    @classmethod
    def of(cls, items: Sequence[Item]) -> "_Left":
        sizes = [item.persistent_bytes for item in reversed(items)]
        return cls(items, [0.0, *accumulate(sizes)][::-1], [float("inf"), *accumulate(sizes, min)][::-1])
