"""The method `placeto`: the shipped policy, or that of a file, on a graph it has never seen; fine-tuned on it where asked."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.common import PlaceOptions, PlanResult, Proposal, SearchProgress, Task, begin, conclude
from baechi_ext.place.placeto.checkpoint import SHIPPED, load_policy
from baechi_ext.place.placeto.decisions import MOST_DECISIONS, Decisions
from baechi_ext.place.trial import Trial

if TYPE_CHECKING:
    from collections.abc import Callable

    from baechi_ext.place.placeto.lesson import Lesson
    from baechi_ext.place.placeto.policy import Policy
    from baechi_ext.place.placeto.train import TrainingProgress

_EPISODES, _BATCHES = 8, 4
"""At once, and how often."""
_FEWEST_DECISIONS = 64
_SIMULATED_OPS = 20_000_000
"""What all batches may simulate: on large graphs they have fewer episodes, and those fewer decisions."""


def placeto(graph: OpGraph, cluster: Cluster, options: PlaceOptions) -> PlanResult:
    """The best plan seen in a few batches of episodes of the policy, and in `options.placeto_episodes` more that it learns from.

    Learning also ends at the time limit, or when the user interrupts it: then the result says so. The first episodes begin with all on the
    fastest device, so where that holds everything the plan is never slower. The same for the same seed where the clock did not end it.
    Raises InfeasibleError where no valid plan was found, FileError or PolicyError where the policy can't be used,
    MissingBackendError without torch or safetensors.
    """
    task = begin("placeto", graph, cluster, options)
    policy = load_policy(options.placeto_policy or SHIPPED)
    if len(graph) == 0 or len(cluster) == 1:
        return conclude(task, [Proposal((0,) * len(graph))])
    from baechi_ext.place.placeto.environment import Rules
    from baechi_ext.place.placeto.lesson import Lesson

    most = max(_FEWEST_DECISIONS, min(MOST_DECISIONS, _SIMULATED_OPS // len(graph)))
    decisions = Decisions.of(graph, cluster, task.order, most)
    simulated_ops = len(graph) * len(decisions) * policy.config.visits
    batch = max(1, min(_EPISODES, _SIMULATED_OPS // (_BATCHES * simulated_ops)))
    lesson = Lesson(decisions, batch, Rules(visits=policy.config.visits))
    interrupted = _search(task, lesson, policy)
    return replace(conclude(task, lesson.proposals()), interrupted=interrupted)


def _search(task: Task, lesson: "Lesson", policy: "Policy") -> bool:
    """Runs the episodes; whether the user interrupted them once there was a plan."""
    import torch

    from baechi_ext.place.placeto.train import Trainer, TrainingConfig, single_threaded_torch

    seed, batch = task.options.seed, lesson.environment.batch
    try:
        with single_threaded_torch():
            lesson.search(policy, torch.Generator().manual_seed(seed), _BATCHES)
        updates = math.ceil(task.options.placeto_episodes / batch)
        if updates:
            config = TrainingConfig(updates=updates, graphs=1, start="best", learning_rate=(3e-4, 1e-4), seed=seed)
            left_seconds = task.options.time_limit_seconds - task.elapsed_seconds()
            Trainer(policy, [lesson], config).run(_reporter(task, lesson), left_seconds)
    except KeyboardInterrupt:
        if not lesson.best:
            raise
        return True
    return False


def _reporter(task: Task, lesson: "Lesson") -> "Callable[[TrainingProgress], None] | None":
    watch = task.options.watch
    if watch is None:
        return None

    def report(progress: "TrainingProgress") -> None:
        excess, makespan_us = next(iter(lesson.best.values()))
        best = lesson.proposals()[0]
        placed = Trial(best.placement, best.priorities[0], task.simulator)
        excess_bytes = sum(placed.excess_bytes) if excess else 0.0
        watch(SearchProgress(makespan_us, excess_bytes, task.bound_us, lesson.environment.simulated, task.elapsed_seconds()))

    return report
