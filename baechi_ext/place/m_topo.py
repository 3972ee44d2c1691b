"""m-TOPO (Baechi, SoCC 2020, section 3.1): topological chunks of equal memory, whatever that costs in time."""

import math

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.chunks import spread, units
from baechi_ext.place.common import PlaceOptions, PlanResult, Proposal, begin, conclude


def m_topo(graph: OpGraph, cluster: Cluster, options: PlaceOptions) -> PlanResult:
    """Fills one device after the other, in topological order, each up to the cap; never goes back.

    The cap of all devices is total bytes / number of devices + the bytes of the largest op, as in Baechi; unlike there no device
    is filled beyond its own limit by choice, and what is left over goes to the device with the most room.
    Raises InfeasibleError where no valid plan was found.
    """
    task = begin("m_topo", graph, cluster, options)
    placement = fill(graph, cluster)
    order = [0.0] * len(graph)
    for i, v in enumerate(graph.order):
        order[v] = float(i)
    return conclude(task, [Proposal(placement, (tuple(order),))])


def fill(graph: OpGraph, cluster: Cluster) -> tuple[int, ...]:
    """The placement; the first op of a colocation group takes all members along."""
    sizes = [op_bytes(graph, v) for v in range(len(graph))]
    cap = memory_cap_bytes(graph, len(cluster))
    caps = [cap if d.memory_bytes is None else min(cap, d.memory_bytes) for d in cluster.devices]
    used = [0.0] * len(cluster)
    current = 0
    ordered = units(graph)
    devices = []
    for unit in ordered:
        size = sum(sizes[v] for v in unit)
        while current < len(caps) and used[current] + size > caps[current]:
            current += 1
        d = current if current < len(caps) else max(range(len(caps)), key=lambda d: (caps[d] - used[d], -d))
        used[d] += size
        devices.append(d)
    return spread(graph, ordered, devices)


def memory_cap_bytes(graph: OpGraph, num_devices: int) -> float:
    """How many bytes of ops one device takes before the next one's turn comes."""
    sizes = [op_bytes(graph, v) for v in range(len(graph))]
    return math.floor(sum(sizes) / num_devices) + max(sizes, default=0)


def op_bytes(graph: OpGraph, v: int) -> float:
    """All bytes that op v ever allocates, as if it never freed any."""
    op = graph.ops[v]
    return op.persistent_bytes + op.temporary_bytes + max(op.output_bytes, sum(graph.tensors[t].bytes for t in graph.outputs[v]))
