"""m-TOPO (Baechi, SoCC 2020, section 3.1): topological chunks of equal memory, whatever that costs in time."""

from functools import partial

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.arrange import arrange
from baechi_ext.place.chunks import ranks
from baechi_ext.place.common import PlaceOptions, PlanResult, begin, conclude
from baechi_ext.place.filling import fill, memory_cap_bytes


def m_topo(graph: OpGraph, cluster: Cluster, options: PlaceOptions) -> PlanResult:
    """Fills one device after the other, in topological order, each up to the cap; never goes back.

    The cap of all devices is total bytes / number of devices + the bytes of the largest op, as in Baechi; unlike there no device
    is filled beyond its own limit by choice, and what is left over goes to the device with the most room.
    Raises InfeasibleError where no valid plan was found.
    """
    task = begin("m_topo", graph, cluster, options)
    cap = memory_cap_bytes(graph, len(cluster))
    caps = [cap if d.memory_bytes is None else min(cap, d.memory_bytes) for d in cluster.devices]
    return conclude(task, [arrange(task, partial(fill, graph, task.order, caps), ranks(task.order))])
