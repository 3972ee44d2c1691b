"""The parts that searches share: they start from plans of the registry's cheap methods, for the graph and for clusters of its ops; and in
the end the start, annealed for what is left of the time, becomes a plan.

Greedy methods see one op at a time. Where transfers are dear or memory is short they do far better with clusters to place.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from baechi_ext.errors import InfeasibleError, MissingBackendError, SolverError
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.ir.plan import verify_placement
from baechi_ext.place.common import PlaceOptions, PlanResult, SearchProgress, Task, finish
from baechi_ext.place.effort import Effort, clock_seconds
from baechi_ext.place.parted import ends_of_parts
from baechi_ext.place.repair import trials_by_bytes
from baechi_ext.place.trial import Trial, try_orders

_SHARE = 0.1  # the part of the time that is left that one method may take, and the part of the limit past which no further one begins
_SHARE_OF_ALWAYS = 0.5  # the same for a method that is looked at whatever time there is
_ALWAYS_TRIED = 2  # so many methods are tried whatever more time is worth: single, and one that splits
_FITTING_SHARE = 0.9  # the part of the time limit after which a search for any plan that fits gives way to refining
_FINISHING_SECONDS = 1e-5  # for each op, what a plan takes once its search has ended: the timeline, its peaks
_STARTING_SECONDS = 3e-5  # for each op of the graph's size, what annealing takes to begin: blocks, arrays, a first simulation of each chain


@dataclass(frozen=True)
class Start:
    """The start of a search: the best plan of the cheap methods; where none finds one, what comes nearest."""

    trial: Trial
    interrupted: bool = False
    """By the user."""
    untried: tuple[str, ...] = ()
    """Left out for the time limit: methods, or some of their schedules."""


def cheap_start(task: Task) -> Start:
    """The best plan of the cheap methods.

    In the registry's order, then the best of them on clusters. In a large graph after a tenth of the time limit none begins but those that
    are always looked at.
    Where there is no plan by then, the rest of the time but for another tenth goes to a search for one that fits.
    Raises InfeasibleError where a method proves that there is no plan, KeyboardInterrupt where there is none yet.
    """
    from baechi_ext.place.registry import METHODS  # above the placers that call this

    found: dict[str, Trial] = {}
    untried: tuple[str, ...] = ()
    try:
        names = tuple(name for name, method in METHODS.items() if method.cheap)
        for tried, name in enumerate(names):
            if any(map(task.is_optimal, found.values())) or (tried >= _ALWAYS_TRIED and any(map(task.is_enough, found.values()))):
                break
            if _is_late(task) and not METHODS[name].always:
                untried += (name,)
                continue
            trial, left_out = trial_of(task, name, task.graph)
            untried += left_out
            if trial is not None:
                found[name] = trial
        best = sorted(found, key=lambda name: found[name].key)[:1]
        if task.graph.is_parted:
            found |= {name: try_orders(task.simulator, p.placement, p.priorities) for name, p in ends_of_parts(task).items()}
        if (found and _is_late(task)) or any(task.is_optimal(t) or task.is_enough(t) for t in found.values()):
            best = []
        for graph in _clustered(task) if best else ():
            if _is_late(task):
                break
            for name in best:
                trial = trial_of(task, name, graph)[0]
                if trial is not None:
                    found[name] = min([trial, found[name]], key=lambda trial: trial.key)
    except KeyboardInterrupt:
        if not any(trial.valid for trial in found.values()):
            raise
        return Start(min(found.values(), key=lambda trial: trial.key), interrupted=True)
    if not any(trial.valid for trial in found.values()):  # plans of parts may exceed limits
        found["any that fits"] = _fitted(task)
    return Start(min(found.values(), key=lambda trial: trial.key), untried=untried)


def start_of(task: Task, method: str) -> Trial:
    """The plan of one method; where it finds none, what comes nearest. Raises InfeasibleError where it proves that there is no plan."""
    return trial_of(task, method, task.graph)[0] or _fitted(task)


def initial_of(task: Task) -> Trial | None:
    """The plan of `options.initial`; None where there is none. Raises PlanError where it splits a group."""
    initial = task.options.initial
    if initial is None:
        return None
    placement = task.graph.pinned(initial.placement)
    verify_placement(task.graph, task.cluster, placement, "the initial plan")
    return try_orders(task.simulator, placement, initial.priorities or (None,))


def _is_late(task: Task) -> bool:
    return task.left_seconds(_SHARE) <= 0


def trial_of(task: Task, method: str, graph: OpGraph) -> tuple[Trial | None, tuple[str, ...]]:
    """See `trial_by`: in a share of the time that is left, and without a long search for a plan that fits."""
    from baechi_ext.place.registry import METHODS

    left_seconds = task.options.time_limit_seconds - task.elapsed_seconds()
    share = _SHARE_OF_ALWAYS if METHODS[method].always else _SHARE
    options = replace(task.options, time_limit_seconds=max(left_seconds * share, 0.1), initial=None, fits=False)
    return trial_by(method, task, graph, options)


def trial_by(method: str, task: Task, graph: OpGraph, options: PlaceOptions) -> tuple[Trial | None, tuple[str, ...]]:
    """The plan of a method for the task's graph, or for one with more colocation, and what the time limit left out of it; None where it
    finds none."""
    from baechi_ext.place.registry import place

    try:
        result = place(method, graph, task.cluster, options, task)
    except (SolverError, MissingBackendError):
        return None, ()
    except InfeasibleError as e:
        if e.status == "infeasible" and graph is task.graph:
            raise
        return None, ()
    # The method's notes are of its own plan, in a share of the time; what a search makes of it is another.
    trial = result.trial if graph is task.graph else Trial(result.plan.placement, result.plan.priority, task.simulator)
    return trial, result.untried


def _clustered(task: Task) -> Iterator[OpGraph]:
    """The task's graph with clusters of ops for colocation groups, the coarsest clusters first; last, over parts of a batch, all of a part,
    and all parts of an op."""
    for blocks in reversed(task.block_levels[1:]):
        cluster_of = {v: i for i, block in enumerate(blocks) for v in block}
        # What is pinned is a cluster of its own.
        ops = [replace(op, colocation=f"cluster {cluster_of[v]}, pin {op.pin}") for v, op in enumerate(task.graph.ops)]
        yield task.graph.replace_ops(ops)


def _fitted(task: Task) -> Trial:
    """A plan that fits, found at any cost in time; what comes nearest where none was found."""
    start = min(trials_by_bytes(task.simulator), key=lambda trial: trial.key)
    if start.valid or len(task.graph) == 0:
        return start
    from baechi_ext.place.fitting import fit

    def watch(best: Trial, evaluations: int) -> None:
        if task.options.watch is not None:
            task.options.watch(SearchProgress(best.makespan_us, sum(best.excess_bytes), task.bound_us, evaluations, task.elapsed_seconds()))

    left_seconds = task.options.time_limit_seconds * _FITTING_SHARE - task.elapsed_seconds()
    return fit(start, task.options.seed, Effort(seconds=left_seconds), watch)


def refined(task: Task, start: Trial, *, interrupted: bool) -> PlanResult:
    """The plan of the best trial that annealing finds from `start` by the task's time limit; of `start` where nothing can be gained.

    Raises InfeasibleError where no valid plan was found.
    """
    until_seconds = task.started_seconds + task.options.time_limit_seconds - _FINISHING_SECONDS * len(task.graph)
    begun_seconds = clock_seconds() + _STARTING_SECONDS * task.graph.size
    if interrupted or task.is_optimal(start) or len(task.graph) == 0 or begun_seconds >= until_seconds:
        return finish(task, start, interrupted=interrupted)
    if task.is_enough(start):
        return _ended(task, start)
    from baechi_ext.place.annealing import anneal

    best, interrupted = anneal(task, start, until_seconds)
    return finish(task, best, interrupted=True) if interrupted else _ended(task, best)


def _ended(task: Task, best: Trial) -> PlanResult:
    """The plan, with a note where the search had time left that was not worth it. What is made of this plan may be of another graph, which
    this one was grouped from, or have other costs: the note is of the search alone."""
    seconds, result = task.elapsed_seconds(), finish(task, best)
    worth = task.options.worth
    if worth is None or not task.is_enough(best) or seconds >= task.options.time_limit_seconds or result.status == "optimal":
        return result
    gap = best.makespan_us / task.bound_us - 1 if task.bound_us > 0 else 0.0
    if gap <= worth.gap:
        why = f"its plan was within {worth.gap:.3g} of the proven bound"
    else:
        left_us = best.makespan_us - task.bound_us
        why = f"at most {left_us:.4g} us of a step were left to gain, which would not pay more of it in {worth.steps:g} steps"
    return replace(result, notes=(*result.notes, f"the search ended after {seconds:.2g} s: by the graph and the costs that it had, {why}"))
