"""m-ETF (Baechi, SoCC 2020, section 3.2): earliest task first under memory limits."""

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.common import PlaceOptions, PlanResult, begin, conclude
from baechi_ext.place.list_proposals import list_proposals


def m_etf(graph: OpGraph, cluster: Cluster, options: PlaceOptions) -> PlanResult:
    """The best of a few earliest-task-first schedules (`list_proposals`) in the simulator.

    Raises InfeasibleError where no valid plan was found.
    """
    task = begin("m_etf", graph, cluster, options)
    return conclude(task, list_proposals(task))
