"""Proofs that no plan can hold a graph in memory, made before a placer starts; by packing, which few ops and groups are already too much.

A device holds the persistent bytes of its ops for the whole step and, while the neediest of them runs, that op's inputs, outputs and
temporaries. So units (groups, and ops without one) are packed into the devices: the sum of their persistent bytes and the largest need
have to fit. Where no packing exists no plan does. A smallest set is found as for infeasible subsystems of linear programs: drop what
can be dropped while the rest still does not fit (the deletion filter of Chinneck and Dravnieks, ORSA J. Computing 1991).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NoReturn

from baechi_ext.errors import GraphError, InfeasibleError
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph

NEXT_STEPS = "use more devices, devices with more memory (--device_memory), or a smaller batch"
_SHOWN = 8  # names in a message
LONGEST_STEP_US = 1e14
"""Three years. Beyond it, sums of costs lose the small ones, and solvers their footing."""
_STEPS_OF_A_PACKING, _STEPS = 20_000, 300_000
"""Placements tried for one question, and for all. Steps and no clock: the same input gives the same answer."""
_ROUNDING = 1e-12  # sums of sizes that are not whole may be off by so much


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
    """True if any one of them left out lets the others be packed; each was tried."""


def require_sane_costs(graph: OpGraph, cluster: Cluster) -> None:
    """Raises GraphError where a step could take longer than any step does, up to overflow."""
    import numpy as np

    links = {link.total for i, row in enumerate(cluster.link_table()) for j, link in enumerate(row) if i != j}
    slowest = min(d.speed for d in cluster.devices)
    compute = graph.total_compute_us() / slowest
    sizes = graph.columns.tensor_bytes
    worst_us = np.zeros(len(sizes))
    with np.errstate(over="ignore"):
        for fixed_us, us_per_byte in links:
            np.maximum(worst_us, fixed_us + us_per_byte * sizes, out=worst_us)
        transfers = float(worst_us.sum())
    for what, us, mend in (
        ("all ops on the slowest device", compute, "smaller compute_us or a larger speed"),
        ("moving every tensor over the worst link", transfers, "smaller link coefficients or bytes"),
    ):
        if not us <= LONGEST_STEP_US:
            raise GraphError(f"{what} would take {us:.3g} us, and {LONGEST_STEP_US:g} us is the most that can be planned; give {mend}")


def require_feasible(graph: OpGraph, cluster: Cluster) -> None:
    """Raises InfeasibleError, status "infeasible", where one op, one colocation group, what is pinned to one device, or the whole
    graph provably fits nowhere.

    Says nothing about graphs that merely pack badly; a `conflict` does, and takes longer.
    """
    limits = [d.memory_bytes for d in cluster.devices]
    known = [limit for limit in limits if limit is not None]
    if not known or not graph.ops:
        return
    live = graph.columns.charged_bytes().tolist()
    for d, device in enumerate(cluster.devices):
        members = [v for v, pin in graph.pins.items() if pin == d]
        if members and device.memory_bytes is not None and minimal_bytes(graph, members, live) > device.memory_bytes:
            needed = f"need at least {minimal_bytes(graph, members, live):.0f} bytes"
            reason = f"what is pinned to device {device.name!r} ({len(members)} ops) {needed}, and it has {device.memory_bytes:.0f}"
            names = tuple(dict.fromkeys(graph.ops[v].colocation or graph.ops[v].id for v in members))
            raise InfeasibleError(f"no plan can exist: {reason}; pin less there, or {NEXT_STEPS}", conflict=names)
    if len(known) < len(limits):
        return
    largest, total = max(known), sum(known)
    for name, group in graph.groups.items():
        _require_place(minimal_bytes(graph, group, live), largest, f"colocation group {name!r}", name)
    for op, needed in zip(graph.ops, live, strict=True):
        if op.colocation is None:
            _require_place(op.persistent_bytes + needed, largest, f"op {op.id!r}", op.id)
    persistent = sum(op.persistent_bytes for op in graph.ops)
    whole = minimal_bytes(graph, range(len(graph)), live)
    if len(known) == 1 and whole > largest:
        reason = f"the graph needs at least {whole:.0f} bytes, "
        _refuse(reason + f"its one device {cluster.devices[0].name!r} has {largest:.0f}", conflict(graph, cluster))
    if persistent > total:
        reason = f"all persistent bytes together need at least {persistent:.0f} bytes, "
        _refuse(reason + f"the {len(cluster)} devices together have {total:.0f}", conflict(graph, cluster))


def require_no_conflict(cluster: Cluster, found: Conflict | None) -> None:
    """Raises InfeasibleError, status "infeasible", where there is a `conflict`: ops and groups that cannot be packed into the devices."""
    if found is not None:
        _refuse(f"the devices hold {_listed([f'{d.memory_bytes:.0f}' for d in cluster.devices])} bytes", found)


def refuse_after_all_tried(method: str) -> NoReturn:
    """Raises InfeasibleError, status "infeasible": what to say once a method has tried everything, and nothing fits."""
    raise InfeasibleError(f"no plan can exist: {method} tried every placement and order, and none fits; {NEXT_STEPS}")


def _require_place(needed: float, available: float, what: str, name: str) -> None:
    if needed > available:
        reason = f"{what} needs at least {needed:.0f} bytes, the largest device has {available:.0f}"
        raise InfeasibleError(f"no plan can exist: {reason}; {NEXT_STEPS}", conflict=(name,), minimal=True)


def _refuse(reason: str, found: Conflict | None) -> None:
    """Raises; `found` is what already does not fit."""
    if found is None:
        raise InfeasibleError(f"no plan can exist: {reason}; {NEXT_STEPS}")
    members = _listed([f"{item.name!r} ({item.bytes:.0f} bytes)" for item in found.items])
    minimal = "any one of them left out lets the others fit" if found.minimal else "there may be fewer that do not"
    raise InfeasibleError(
        f"no plan can exist: {reason}, and {members} do not fit on them together; {minimal}; {NEXT_STEPS}",
        conflict=tuple(item.name for item in found.items),
        minimal=found.minimal,
    )


def _listed(texts: Sequence[str]) -> str:
    return ", ".join(texts[:_SHOWN]) + (f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else "")


def minimal_bytes(graph: OpGraph, members: Sequence[int], live: Sequence[float]) -> float:
    """The least that a device holds at one instant if it runs `members`, in bytes; `live` are the graph's `Columns.charged_bytes`.

    Their persistent bytes, and while the neediest of them runs its inputs, outputs and temporaries.
    """
    return sum(graph.ops[v].persistent_bytes for v in members) + max(live[v] for v in members)


def conflict(graph: OpGraph, cluster: Cluster) -> Conflict | None:
    """A set of ops and groups that provably does not fit, as small as could be found; None where nothing is proven."""
    limits = [d.memory_bytes * (1 + _ROUNDING) for d in cluster.devices if d.memory_bytes is not None]
    if len(limits) < len(cluster):
        return None
    live = graph.columns.charged_bytes().tolist()
    # What is pinned comes first: after it, devices that hold the same are alike.
    items = sorted((_item(graph, unit, live) for unit in graph.units()), key=lambda item: (item.pin is None, -item.bytes, item.name))
    packing = _Packing(limits)
    found = _smallest_prefix(packing, items)
    return None if found is None else _filtered(packing, found)


def _item(graph: OpGraph, unit: Sequence[int], live: Sequence[float]) -> Item:
    first = graph.ops[unit[0]]
    persistent = sum(graph.ops[v].persistent_bytes for v in unit)
    return Item(first.colocation or first.id, persistent, max(live[v] for v in unit), first.pin)


def _smallest_prefix(packing: "_Packing", items: Sequence[Item]) -> Sequence[Item] | None:
    """The fewest first items that provably do not fit; None where even all of them may."""
    if packing.fits(items) is not False:  # where some do not fit, all take no more steps: the search comes no further
        return None
    fits, size = 0, 1
    while size < len(items) and packing.fits(items[:size]) is not False:
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
        """True if the items, pinned ones first, can be packed; None where that took too many steps."""
        sizes = [item.persistent_bytes for item in reversed(items)]
        left = _Left(items, [0.0, *accumulate(sizes)][::-1], [float("inf"), *accumulate(sizes, min)][::-1])
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
