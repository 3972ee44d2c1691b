"""m-SCT (Baechi, SoCC 2020, section 3.3): m-ETF whose devices stay awake for favourite children, found by a linear program."""

from dataclasses import replace

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.common import PlaceOptions, PlanResult, begin, conclude
from baechi_ext.place.list_proposals import list_proposals


def m_sct(graph: OpGraph, cluster: Cluster, options: PlaceOptions) -> PlanResult:
    """The best of a few schedules that keep favourite children on their parents' devices, and of m_etf's.

    Waiting for a child pays where the program, which knows no devices, is right about it; where it is not, the step may be twice m_etf's.
    After an op a device waits for its favourite child where no other device could start that earlier, and runs meanwhile only ops
    that could start everywhere. On one device there is no transfer to save and no program to solve. What the program's solver does not
    solve in time has no favourite children; the result's notes say so.
    Raises InfeasibleError where no valid plan was found, SolverError where the solver failed.
    """
    task = begin("m_sct", graph, cluster, options)
    proposals = list_proposals(task)
    notes: tuple[str, ...] = ()
    if len(cluster) > 1:
        from baechi_ext.place.sct_lp import favourite_children

        favourites = favourite_children(graph, cluster, options.sct_threshold, options.time_limit_seconds)
        proposals += list_proposals(task, favourites.child)
        notes = favourites.notes()
    return replace(conclude(task, proposals), notes=notes)
