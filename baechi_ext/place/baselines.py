"""The plans that every method has to beat: one device, and topological chunks of equal time."""

from baechi_ext.errors import InfeasibleError
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.chunks import chunks, depth_first_order, held_bytes, spread, units
from baechi_ext.place.common import PlaceOptions, PlanResult, Proposal, begin, conclude


def single(graph: OpGraph, cluster: Cluster, options: PlaceOptions) -> PlanResult:
    """Every op on one device: the fastest that holds them all, of equals the first.

    Raises InfeasibleError, with the bytes needed and available, where no device does.
    """
    task = begin("single", graph, cluster, options)
    # Of equal devices only the first is simulated.
    kinds = {(device.speed, device.memory_bytes): d for d, device in reversed(list(enumerate(cluster.devices)))}
    try:
        return conclude(task, [Proposal((d,) * len(graph)) for d in sorted(kinds.values())], repairs=False)
    except InfeasibleError as e:
        raise InfeasibleError(f"{e}, or a method that spreads the graph over several devices", e.status) from e


def contiguous(graph: OpGraph, cluster: Cluster, options: PlaceOptions) -> PlanResult:
    """Chunks of a topological order that take equal time, one per device; colocation groups stay whole, with their first op.

    Tried in breadth-first and in depth-first order, and with chunks that end early where parameters and outputs fill a device.
    Raises InfeasibleError where no valid plan was found.
    """
    task = begin("contiguous", graph, cluster, options)
    speeds = [d.speed for d in cluster.devices]
    unlimited = [float("inf")] * len(cluster)
    limits = [float("inf") if d.memory_bytes is None else float(d.memory_bytes) for d in cluster.devices]
    proposals = []
    for order in (graph.order, depth_first_order(graph)):
        rank = [0.0] * len(graph)
        for i, v in enumerate(order):
            rank[v] = float(i)
        ordered = units(graph, order)
        times = [sum(graph.ops[v].compute_us for v in unit) for unit in ordered]
        sizes = [held_bytes(graph, unit) for unit in ordered]
        for room in (unlimited, limits):
            proposals.append(Proposal(spread(graph, ordered, chunks(times, speeds, sizes, room)), (tuple(rank),)))
    return conclude(task, proposals)
