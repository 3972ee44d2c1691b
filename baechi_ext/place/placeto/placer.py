"""The method `placeto`: the shipped policy, or that of a file, on a graph it has never seen; fine-tuned on it where asked."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from baechi_ext.place.common import PlanResult, Proposal, SearchProgress, Task, conclude
from baechi_ext.place.placeto.checkpoint import SHIPPED, load_policy
from baechi_ext.place.placeto.decisions import MOST_DECISIONS, Decisions
from baechi_ext.place.trial import Trial

if TYPE_CHECKING:
    from collections.abc import Callable

    from baechi_ext.place.placeto.policy import Policy
    from baechi_ext.place.placeto.train import TrainingProgress
    from baechi_ext.place.placeto.training_task import TrainingTask

_EPISODES, _BATCHES = 8, 4  # at once, and how often
_FEWEST_DECISIONS = 64
_FEWEST_TO_LEARN = 4  # episodes at once: what one is worth is found beside others
_SIMULATED_OPS = 20_000_000  # the most that all batches may simulate: on large graphs they have fewer episodes, and those fewer decisions,
# down to the fewest; beyond 40,000 ops or so it is the time limit that ends them


def placeto(task: Task) -> PlanResult:
    """The best plan seen in a few batches of episodes of the policy, and in `options.placeto_episodes` more that it learns from.

    They end at the time limit, on small graphs only learning does, or when the user interrupts them: then the result says so. The first
    episodes begin with all that is not pinned on the fastest device, so where that fits the plan is never slower. The same for the same
    seed where the clock did not end it.
    Raises FileError or PolicyError, too, where the policy can't be used, MissingBackendError without torch or safetensors.
    """
    graph, cluster = task.graph, task.cluster
    policy = load_policy(task.options.placeto_policy or SHIPPED)
    if len(graph) == 0 or len(cluster) == 1:
        return conclude(task, [Proposal((0,) * len(graph))])
    from baechi_ext.place.placeto.environment import Rules
    from baechi_ext.place.placeto.training_task import TrainingTask

    each = _BATCHES * policy.config.visits * len(graph)  # the ops that all batches simulate for a decision of an episode
    most = max(_FEWEST_DECISIONS, min(MOST_DECISIONS, _SIMULATED_OPS // each))
    decisions = Decisions.of(graph, cluster, task.order, most)
    fewest = _FEWEST_TO_LEARN if task.options.placeto_episodes else 1
    batch = max(fewest, min(_EPISODES, _SIMULATED_OPS // (each * len(decisions))))
    training = TrainingTask(decisions, batch, Rules(visits=policy.config.visits))
    interrupted = _search(task, training, policy)
    return replace(conclude(task, training.proposals()), interrupted=interrupted)


def _search(task: Task, training: "TrainingTask", policy: "Policy") -> bool:
    """Runs the episodes; whether the user interrupted them once there was a plan."""
    import torch

    from baechi_ext.place.placeto.train import Trainer, TrainingConfig, single_threaded_torch

    seed, batch = task.options.seed, training.environment.batch
    try:
        with single_threaded_torch():
            training.search(policy, torch.Generator().manual_seed(seed), _BATCHES, seconds=task.left_seconds())
        updates = math.ceil(task.options.placeto_episodes / batch)
        if updates:
            config = TrainingConfig(updates=updates, graphs=1, start="best", learning_rate=(3e-4, 1e-4), seed=seed)
            left_seconds = task.options.time_limit_seconds - task.elapsed_seconds()
            Trainer(policy, [training], config).run(_reporter(task, training), left_seconds)
    except KeyboardInterrupt:
        if not training.best:
            raise
        return True
    return False


def _reporter(task: Task, training: "TrainingTask") -> "Callable[[TrainingProgress], None] | None":
    watch = task.options.watch
    if watch is None:
        return None

    def report(progress: "TrainingProgress") -> None:
        excess, makespan_us = next(iter(training.best.values()))
        best = training.proposals()[0]
        placed = Trial(tuple(best.placement), best.priorities[0], task.simulator)
        excess_bytes = sum(placed.excess_bytes) if excess else 0.0
        watch(SearchProgress(makespan_us, excess_bytes, task.bound_us, training.environment.simulated, task.elapsed_seconds()))

    return report
