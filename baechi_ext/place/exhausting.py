"""The part of a search that only small graphs have: the exhaustive search of `exact`, as long as it takes no more than a moment."""

from typing import NamedTuple

from baechi_ext.place.clock import clock_seconds
from baechi_ext.place.common import Task
from baechi_ext.place.feasibility import refuse_after_all_tried
from baechi_ext.place.trial import Trial

_STEPS = 1_000_000
"""About a second's worth. What takes longer to exhaust is left to annealing, and its proof to `exact`."""
_SHARE = 0.2
"""The part of the time limit that a slow machine may take for them."""


class Exhausted(NamedTuple):
    """What an exhaustive search came to."""

    best: Trial
    optimal: bool
    """Every other placement and order has been tried, or cannot be faster."""
    interrupted: bool


def exhaust(task: Task, start: Trial) -> Exhausted:
    """The best of `start` and what the search finds, with a proof where it comes to its end; `start` where the graph is not small.

    Raises InfeasibleError, status "infeasible", where that proves that no plan is valid.
    """
    from baechi_ext.place.exact.search import Search, is_small

    if not is_small(task.graph, task.cluster) or (start.valid and start.makespan_us <= task.bound_us):
        return Exhausted(start, False, False)
    best, search = start, Search(task.simulator)
    until_seconds = clock_seconds() + _SHARE * task.options.time_limit_seconds
    try:
        while not search.done and search.steps < _STEPS and clock_seconds() < until_seconds:
            best = search.run(best.makespan_us if best.valid else float("inf")) or best
    except KeyboardInterrupt:
        return Exhausted(best, False, True)
    if search.done and not best.valid:
        refuse_after_all_tried(task.method)
    return Exhausted(best, search.done, False)
