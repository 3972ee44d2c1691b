"""The last part of every search: its start, annealed for what is left of the time, becomes a plan."""

from baechi_ext.place.clock import clock_seconds
from baechi_ext.place.common import PlanResult, Task, finish
from baechi_ext.place.trial import Trial

_FINISHING_SECONDS = 1e-5
"""For each op, what a plan takes once its search has ended: the timeline, its peaks."""
_STARTING_SECONDS = 3e-5
"""For each op of the graph's size, what annealing takes to begin: blocks, arrays, a first simulation of each chain."""


def refined(task: Task, start: Trial, *, interrupted: bool) -> PlanResult:
    """The plan of the best trial that annealing finds from `start` by the task's time limit; of `start` where nothing can be gained.

    Raises InfeasibleError where no valid plan was found.
    """
    met = start.valid and start.makespan_us <= task.bound_us
    until_seconds = task.started_seconds + task.options.time_limit_seconds - _FINISHING_SECONDS * len(task.graph)
    begun_seconds = clock_seconds() + _STARTING_SECONDS * task.graph.size
    if interrupted or met or len(task.graph) == 0 or begun_seconds >= until_seconds:
        return finish(task, start, interrupted=interrupted)
    from baechi_ext.place.annealing import Limits, anneal

    limits = Limits(task.bound_us, until_seconds, task.options.seed, task.options.watch)
    best, interrupted = anneal(start, task.block_levels, limits)
    return finish(task, best, interrupted=interrupted)
