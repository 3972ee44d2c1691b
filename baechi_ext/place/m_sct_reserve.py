"""Baechi's m_sct_reserve: m-SCT (SoCC 2020, section 3.3) with working memory reserved for each colocation group."""

from dataclasses import replace

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.common import PlaceOptions, PlanResult, Proposal, begin, conclude
from baechi_ext.place.list_scheduler import schedules
from baechi_ext.place.reserve import reserving


def m_sct_reserve(graph: OpGraph, cluster: Cluster, options: PlaceOptions) -> PlanResult:
    """The best of m_sct's schedules for the graph with its reserves (`reserve.reserving`), judged without them.

    Raises InfeasibleError where no valid plan was found, SolverError where the solver failed; the notes say where it ran out of time.
    """
    task = begin("m_sct_reserve", graph, cluster, options)
    child, notes = None, ()
    if len(cluster) > 1:
        from baechi_ext.place.sct_lp import favourite_children

        favourites = favourite_children(graph, cluster, options.sct_threshold, options.time_limit_seconds)
        child, notes = favourites.child, favourites.notes()
    found = schedules(reserving(graph), cluster, child)
    return replace(conclude(task, [Proposal(s.placement, (s.priority,)) for s in found]), notes=notes)
