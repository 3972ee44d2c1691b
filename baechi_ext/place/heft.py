"""HEFT: heterogeneous earliest finish time (Topcuoglu, Hariri and Wu, IEEE Trans. Parallel Distributed Systems 13, 2002)."""

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.common import PlaceOptions, PlanResult, Proposal, begin, conclude
from baechi_ext.place.earliest_finish import earliest_finishes


def heft(graph: OpGraph, cluster: Cluster, options: PlaceOptions) -> PlanResult:
    """The schedule of HEFT (`earliest_finish`), judged by the simulator like every other; the better one where there are two.

    Raises InfeasibleError where no valid plan was found.
    """
    task = begin("heft", graph, cluster, options)
    return conclude(task, [Proposal(s.placement, (s.priority,)) for s in earliest_finishes(graph, cluster)])
