"""Checks at stage boundaries: what a legal placement is, whoever made it."""

from collections.abc import Sequence

from baechi_ext.errors import PlanError
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph


def placement_violations(graph: OpGraph, cluster: Cluster, placement: Sequence[int]) -> list[str]:
    """What is wrong with `placement` apart from memory, one sentence each; empty where it is legal."""
    if len(placement) != len(graph):
        return [f"the placement has {len(placement)} entries for {len(graph)} ops"]
    found = [
        f"op {op.id!r} is placed on device {d!r}; expected 0 to {len(cluster) - 1}"
        for op, d in zip(graph.ops, placement, strict=True)
        if not 0 <= d < len(cluster)
    ]
    for name, members in graph.groups.items():
        devices = sorted({placement[v] for v in members})
        if len(devices) > 1:
            found.append(f"colocation group {name!r} is split over devices {', '.join(map(str, devices))}")
    for v, pin in graph.pins.items():
        if placement[v] != pin:
            found.append(f"op {graph.ops[v].id!r} is pinned to device {pin} and placed on {placement[v]}")
    return found


def memory_violations(cluster: Cluster, peak_memory_bytes: Sequence[float]) -> list[str]:
    """One sentence per device whose peak exceeds its limit."""
    return [
        f"device {d.name!r} needs {peak:.0f} bytes and has {d.memory_bytes:.0f}"
        for d, peak in zip(cluster.devices, peak_memory_bytes, strict=True)
        if d.memory_bytes is not None and peak > d.memory_bytes
    ]


def verify_placement(graph: OpGraph, cluster: Cluster, placement: Sequence[int], stage: str) -> None:
    """Raises PlanError, naming the stage that broke the rule."""
    found = placement_violations(graph, cluster, placement)
    if found:
        raise PlanError(f"{stage}: {'; '.join(found[:5])}")
