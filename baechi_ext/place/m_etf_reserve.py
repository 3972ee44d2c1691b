"""Baechi's m_etf_reserve: m-ETF (SoCC 2020, section 3.2) with working memory reserved for each colocation group."""

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.common import PlaceOptions, PlanResult, Proposal, begin, conclude
from baechi_ext.place.list_scheduler import schedules
from baechi_ext.place.reserve import reserving


def m_etf_reserve(graph: OpGraph, cluster: Cluster, options: PlaceOptions) -> PlanResult:
    """The best of m_etf's schedules for the graph with its reserves (`reserve.reserving`), judged without them.

    Raises InfeasibleError where no valid plan was found.
    """
    task = begin("m_etf_reserve", graph, cluster, options)
    return conclude(task, [Proposal(s.placement, (s.priority,)) for s in schedules(reserving(graph), cluster)])
