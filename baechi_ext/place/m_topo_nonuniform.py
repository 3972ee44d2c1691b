"""Baechi's m_topo_nonuniform: m-TOPO (SoCC 2020, section 3.1) that fills each device to its own limit."""

from functools import partial

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.arrange import arrange
from baechi_ext.place.chunks import ranks
from baechi_ext.place.common import PlaceOptions, PlanResult, begin, conclude
from baechi_ext.place.filling import fill


def m_topo_nonuniform(graph: OpGraph, cluster: Cluster, options: PlaceOptions) -> PlanResult:
    """Fills one device after the other, in topological order, each up to its own memory limit; never goes back.

    As few devices as possible are used: a device without a limit takes all that is left. What is left over at the end goes to
    the device with the most room. Raises InfeasibleError where no valid plan was found.
    """
    task = begin("m_topo_nonuniform", graph, cluster, options)
    caps = [float("inf") if d.memory_bytes is None else float(d.memory_bytes) for d in cluster.devices]
    return conclude(task, [arrange(task, partial(fill, graph, task.order, caps), ranks(task.order))])
