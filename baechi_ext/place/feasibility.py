"""Proofs that no plan can hold a graph in memory, made before a placer starts."""

from baechi_ext.errors import GraphError, InfeasibleError
from baechi_ext.ir.cluster import Cluster, Link
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.simulate.holding import minimal_bytes

NEXT_STEPS = "use more devices, devices with more memory (--device_memory), or a smaller batch"
LONGEST_STEP_US = 1e14
"""Three years. Beyond it, sums of costs lose the small ones, and solvers their footing."""


def require_sane_costs(graph: OpGraph, cluster: Cluster) -> None:
    """Raises GraphError where a step could take longer than any step does, up to overflow."""
    links = {link for row in cluster.link_table() for link in row}
    slowest = min(d.speed for d in cluster.devices)
    compute = graph.total_compute_us() / slowest
    transfers = sum(max(_moving_us(link, t.bytes) for link in links) for t in graph.tensors)
    for what, us, mend in (
        ("all ops on the slowest device", compute, "smaller compute_us or a larger speed"),
        ("moving every tensor over the worst link", transfers, "smaller link coefficients or bytes"),
    ):
        if not us <= LONGEST_STEP_US:
            raise GraphError(f"{what} would take {us:.3g} us, and {LONGEST_STEP_US:g} us is the most that can be planned; give {mend}")


def _moving_us(link: Link, size: float) -> float:
    return link.transfer_us(size) + link.sending_us(size) + link.receiving_us(size)


def require_feasible(graph: OpGraph, cluster: Cluster) -> None:
    """Raises InfeasibleError, status "infeasible", where one op, one colocation group or the whole graph provably fits nowhere.

    Says nothing about graphs that merely pack badly.
    """
    limits = [d.memory_bytes for d in cluster.devices]
    known = [limit for limit in limits if limit is not None]
    if len(known) < len(limits) or not graph.ops:
        return
    largest, total = max(known), sum(known)
    if len(known) == 1:
        where = f"its one device {cluster.devices[0].name!r} has"
        _require(minimal_bytes(graph, range(len(graph))), largest, "the graph needs", where)
    for name, members in graph.groups.items():
        _require(minimal_bytes(graph, members), largest, f"colocation group {name!r} needs", "the largest device has")
    for v, op in enumerate(graph.ops):
        if op.colocation is None:
            _require(minimal_bytes(graph, (v,)), largest, f"op {op.id!r} needs", "the largest device has")
    persistent = sum(op.persistent_bytes for op in graph.ops)
    _require(persistent, total, "all persistent bytes together need", f"the {len(cluster)} devices together have")


def _require(needed: float, available: float, what: str, where: str) -> None:
    if needed > available:
        raise InfeasibleError(f"no plan can exist: {what} at least {needed:.0f} bytes, {where} {available:.0f}; {NEXT_STEPS}")
