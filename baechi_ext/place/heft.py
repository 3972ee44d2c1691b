"""HEFT: heterogeneous earliest finish time (Topcuoglu, Hariri and Wu, IEEE Trans. Parallel Distributed Systems 13, 2002)."""

from baechi_ext.place.common import PlanResult, Proposal, Task, conclude
from baechi_ext.place.earliest_finish import earliest_finishes


def heft(task: Task) -> PlanResult:
    """The schedule of HEFT (`earliest_finish`), judged by the simulator like every other; the better one where there are two."""
    return conclude(task, [Proposal(s.placement, (s.priority,)) for s in earliest_finishes(task.graph, task.cluster)])
