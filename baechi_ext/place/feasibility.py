"""Proofs that no plan can hold a graph in memory, made before a placer starts."""

from collections.abc import Sequence
from typing import NoReturn

from baechi_ext.errors import GraphError, InfeasibleError
from baechi_ext.ir.cluster import Cluster, Link
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.packing import Conflict, conflict
from baechi_ext.simulate.holding import live_bytes, minimal_bytes

NEXT_STEPS = "use more devices, devices with more memory (--device_memory), or a smaller batch"
_SHOWN = 8
"""Names in a message."""
LONGEST_STEP_US = 1e14
"""Three years. Beyond it, sums of costs lose the small ones, and solvers their footing."""


def require_sane_costs(graph: OpGraph, cluster: Cluster) -> None:
    """Raises GraphError where a step could take longer than any step does, up to overflow."""
    import numpy as np

    links = sorted({_moving(link) for row in cluster.link_table() for link in row})
    slowest = min(d.speed for d in cluster.devices)
    compute = graph.total_compute_us() / slowest
    sizes = graph.columns.tensor_bytes
    with np.errstate(over="ignore"):
        transfers = float(np.max([fixed_us + us_per_byte * sizes for fixed_us, us_per_byte in links], axis=0).sum())
    for what, us, mend in (
        ("all ops on the slowest device", compute, "smaller compute_us or a larger speed"),
        ("moving every tensor over the worst link", transfers, "smaller link coefficients or bytes"),
    ):
        if not us <= LONGEST_STEP_US:
            raise GraphError(f"{what} would take {us:.3g} us, and {LONGEST_STEP_US:g} us is the most that can be planned; give {mend}")


def _moving(link: Link) -> tuple[float, float]:
    """What a tensor takes from the link and the devices at its ends: microseconds, and microseconds a byte."""
    return link.latency_us + link.send_us + link.receive_us, link.us_per_byte + link.send_us_per_byte + link.receive_us_per_byte


def require_feasible(graph: OpGraph, cluster: Cluster) -> None:
    """Raises InfeasibleError, status "infeasible", where one op, one colocation group, what is pinned to one device, or the whole
    graph provably fits nowhere.

    Says nothing about graphs that merely pack badly; `require_packing` does, and takes longer.
    """
    limits = [d.memory_bytes for d in cluster.devices]
    known = [limit for limit in limits if limit is not None]
    if not known or not graph.ops:
        return
    live = live_bytes(graph).tolist()
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
    for name, members in graph.groups.items():
        _require_place(minimal_bytes(graph, members, live), largest, f"colocation group {name!r}", name)
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


def require_packing(graph: OpGraph, cluster: Cluster) -> None:
    """Raises InfeasibleError, status "infeasible", where the ops and groups provably cannot be packed into the devices."""
    found = conflict(graph, cluster)
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
