"""The schedules that m_etf and m_sct choose from."""

from baechi_ext.place.common import Proposal, Task
from baechi_ext.place.earliest_finish import earliest_finishes
from baechi_ext.place.earliest_start import earliest_starts
from baechi_ext.place.list_scheduler import FavouriteChild, Schedule, schedules
from baechi_ext.place.trial import Trial

_MOST_FINISHED_OPS = 5000
"""Up to here an earliest-finish schedule takes no longer than the others."""


def list_proposals(task: Task, favourite_child: FavouriteChild | None = None) -> list[Proposal]:
    """Proposals of the list scheduler's schedules, each also with lower limits where it exceeds them, and of the rule to the letter.

    Where speeds differ m_etf, which has no favourite children, also tries earliest finishes: the earliest start may be on a slow device.
    """

    def excess_bytes(schedule: Schedule) -> tuple[float, ...]:
        return Trial(schedule.placement, schedule.priority, task.simulator).excess_bytes

    graph, cluster = task.graph, task.cluster
    found = schedules(graph, cluster, favourite_child, excess_bytes)
    found += earliest_starts(graph, cluster, favourite_child)
    unequal = len({device.speed for device in cluster.devices}) > 1
    if unequal and favourite_child is None and len(graph) <= _MOST_FINISHED_OPS:
        found += earliest_finishes(graph, cluster)
    return [Proposal(s.placement, (s.priority,)) for s in found]
