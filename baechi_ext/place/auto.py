"""The searches. `auto`, the default: the best plan of the cheap methods, proven optimal where that is quick, else refined for as long as
there is time. `refine`: from any plan, over placements and orders."""

from dataclasses import replace
from typing import NamedTuple

from baechi_ext.place.common import PlanResult, Task, finish
from baechi_ext.place.effort import clock_seconds
from baechi_ext.place.feasibility import refuse_after_all_tried
from baechi_ext.place.searching import cheap_start, initial_of, refined, start_of
from baechi_ext.place.trial import Trial

_STEPS = 1_000_000  # about a second's worth. What takes longer to exhaust is left to annealing, and its proof to `exact`.
_SHARE = 0.2  # the part of the time limit that a slow machine may take for them


def auto(task: Task) -> PlanResult:
    """The best plan of the cheap methods and of `options.initial`, refined until the time limit; proven where `exhaust` can.

    Never slower than `single` where one device holds the graph; where no plan found is faster than that, the plan is that one
    (`PlanResult.splits` is False). Ends earlier where more time is not worth it (`options.worth`), but not before it has tried to
    split.
    """
    cheap = cheap_start(task)
    start, interrupted = cheap.trial, cheap.interrupted
    if (initial := initial_of(task)) is not None:
        start = min([start, initial], key=lambda trial: trial.key)
    if not (interrupted or task.is_enough(start)):
        start, optimal, interrupted = exhaust(task, start)
        if optimal:
            return finish(task, start, start.makespan_us)
    return replace(refined(task, start, interrupted=interrupted), untried=cheap.untried)


def refine(task: Task) -> PlanResult:
    """The best plan that simulated annealing (`annealing`) finds from `options.initial`, or from the plan of `m_etf`.

    Ends at the time limit, when the plan meets the lower bound, when nothing better has been found for long (seconds for 20 ops,
    minutes for 100), when more time is not worth it (`options.worth`), or when the user interrupts it: then the result says so. The
    start may exceed memory limits; then the search first looks for a plan that doesn't. Never worse than its start, and the same for
    the same seed where the clock did not end it.
    Raises PlanError, too, where the start splits a group.
    """
    return refined(task, initial_of(task) or start_of(task, "m_etf"), interrupted=False)


class Exhausted(NamedTuple):
    """The result of an exhaustive search."""

    best: Trial
    optimal: bool
    """Every other placement and order has been tried, or cannot be faster."""
    interrupted: bool


def exhaust(task: Task, start: Trial) -> Exhausted:
    """The best of `start` and what the search finds, with a proof where it comes to its end; `start` where the graph is not small.

    Raises InfeasibleError, status "infeasible", where that proves that no plan is valid.
    """
    from baechi_ext.place.exact.search import Search, is_small

    if not is_small(task.graph, task.cluster) or task.is_optimal(start):
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
