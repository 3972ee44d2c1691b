"""m-ETF (Baechi, SoCC 2020, section 3.2): earliest task first under memory limits."""

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.common import PlaceOptions, PlanResult, Proposal, begin, conclude
from baechi_ext.place.earliest_start import earliest_starts
from baechi_ext.place.list_scheduler import schedules


def m_etf(graph: OpGraph, cluster: Cluster, options: PlaceOptions) -> PlanResult:
    """The best of a few earliest-task-first schedules (`list_scheduler.schedules`, `earliest_start`) in the simulator.

    Raises InfeasibleError where no valid plan was found.
    """
    task = begin("m_etf", graph, cluster, options)
    found = [*schedules(graph, cluster), *earliest_starts(graph, cluster)]
    return conclude(task, [Proposal(s.placement, (s.priority,)) for s in found])
