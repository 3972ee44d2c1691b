"""Contenders of `baechi placeto evaluate`: searches that get the same number of simulated plans, and methods that need few.

Searches begin with everything on the fastest device, and the best placements they saw go through the same choice of an order (about
ten more plans, for all alike).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from baechi_ext.errors import InfeasibleError, MissingBackendError, OptionError
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.ir.hints import require_hints
from baechi_ext.place.annealing import anneal
from baechi_ext.place.common import PlaceOptions, Proposal, SearchProgress, Task, begin, conclude
from baechi_ext.place.effort import clock_seconds
from baechi_ext.place.placeto.environment import Rules
from baechi_ext.place.placeto.policy import Policy
from baechi_ext.place.placeto.rnn import RnnConfig, RnnPlacer
from baechi_ext.place.placeto.train import Trainer, TrainingConfig, single_threaded_torch
from baechi_ext.place.placeto.training_task import TrainingTask
from baechi_ext.place.registry import place
from baechi_ext.place.trial import Trial

_EPISODES = 4  # a policy's episodes at once: few, so that it learns often
_PLANS = 16  # plans at once, of the RNN placer and of random placement
_MOST_BATCHES = 100  # ends the search of a policy that leaves most decisions as they are, which takes no simulation
CURVE_STEP = 0.002
"""The least relative gain from one point of a curve to the next: there are many, and they are kept."""
_LONG_SECONDS = 1e6
_UNTIL_THE_BUDGET_ENDS = 10**6


@dataclass(frozen=True, slots=True)
class Contest:
    """One graph on one cluster, and what a search may use."""

    graph: OpGraph
    cluster: Cluster
    policy: Policy
    evaluations: int
    seed: int

    def training(self, batch: int, visits: int = 1) -> TrainingTask:
        return TrainingTask.of(self.graph, self.cluster, batch, Rules(visits=visits))

    def episodes(self, policy: Policy, fewest: int = 1) -> TrainingTask:
        """At once as many episodes as a batch has, or as the plans allow. Raises OptionError where they allow fewer than `fewest`."""
        training = self.training(_EPISODES, policy.config.visits)
        each = training.environment.horizon + 1
        if each * fewest > self.evaluations:
            raise OptionError(
                f"{self.evaluations} plans are too few for {'an episode' if fewest == 1 else f'{fewest} episodes'} of a policy, "
                f"{'which' if fewest == 1 else 'each of which'} may simulate {each}; allow {each * fewest}"
            )
        fitting = self.evaluations // each
        return training if fitting >= _EPISODES else self.training(fitting, policy.config.visits)

    def begin(self, name: str, watch: Callable[[SearchProgress], None] | None = None) -> Task:
        return begin(name, self.graph, self.cluster, PlaceOptions(seed=self.seed, watch=watch))


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender's result."""

    step_us: float
    evaluations: int | None
    """Plans simulated to find it; None where the method does not search."""
    seconds: float
    """Processor time."""
    curve: tuple[tuple[int, float], ...] = ()
    """(Plans simulated, step in microseconds) whenever a step was shorter than all before; the choice of an order comes later. Empty where
    the search does not know."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "curve": [list(point) for point in self.curve]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Entry":
        curve = tuple((int(plans), float(step_us)) for plans, step_us in value["curve"])
        return cls(float(value["step_us"]), value["evaluations"], float(value["seconds"]), curve)


def _thinned(curve: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """The points that are better by CURVE_STEP than the one kept before them, and the last one."""
    kept: list[tuple[int, float]] = []
    for plans, step_us in curve:
        if not kept or step_us <= kept[-1][1] * (1 - CURVE_STEP) or (plans, step_us) == curve[-1]:
            kept.append((plans, step_us))
    return tuple(kept)


def _from_training(task: Task, training: TrainingTask) -> Entry:
    result = conclude(task, training.proposals())
    environment = training.environment
    return Entry(result.predicted_step_us, environment.simulated, result.placement_seconds, _thinned(environment.improvements))


def zero_shot(contest: Contest) -> Entry:
    """The policy as it is."""
    import torch

    task, training = contest.begin("placeto"), contest.episodes(contest.policy)
    with single_threaded_torch():
        training.search(contest.policy, torch.Generator().manual_seed(contest.seed), _MOST_BATCHES, contest.evaluations)
    return _from_training(task, training)


def fine_tuned(contest: Contest) -> Entry:
    """The policy, which learns on the graph."""
    return _learning(contest, contest.policy, 1e-3)


def from_scratch(contest: Contest) -> Entry:
    """The same network without what it learned before, which learns on the graph alone."""
    return _learning(contest, Policy.fresh(contest.policy.config, contest.seed), 3e-3)


def _learning(contest: Contest, policy: Policy, learning_rate: float) -> Entry:
    import torch

    task, training = contest.begin("placeto"), contest.episodes(policy, Trainer.FEWEST_EPISODES)
    config = TrainingConfig(
        updates=_UNTIL_THE_BUDGET_ENDS,
        graphs=1,
        start="best",
        learning_rate=(learning_rate, learning_rate),
        entropy=(0.02, 0.02),
        seed=contest.seed,
    )
    with single_threaded_torch():
        training.search(policy, torch.Generator().manual_seed(contest.seed), 1)
    Trainer(policy, [training], config).run(evaluations=contest.evaluations)
    return _from_training(task, training)


def rnn(contest: Contest) -> Entry:
    """The RNN placer, which learns on the graph alone."""
    task, training = contest.begin("rnn"), contest.training(_PLANS)
    with single_threaded_torch():
        RnnPlacer(training, RnnConfig(seed=contest.seed)).run(contest.evaluations)
    return _from_training(task, training)


def annealing(contest: Contest) -> Entry:
    """Local search: the annealing of `refine`, which moves ops in their order, too."""
    reported: list[SearchProgress] = []
    task = contest.begin("annealing", reported.append)
    start = Trial((contest.cluster.fastest,) * len(contest.graph), None, task.simulator)
    best, _ = anneal(task, start, clock_seconds() + _LONG_SECONDS, contest.evaluations)
    result = conclude(task, [Proposal(best.placement, (best.priority,))])
    return Entry(result.predicted_step_us, reported[-1].evaluations if reported else 1, result.placement_seconds)


def random(contest: Contest) -> Entry:
    """Each decision by lot, again and again."""
    batch = min(_PLANS, contest.evaluations)
    task, training = contest.begin("random"), contest.training(batch)
    draw = np.random.default_rng(contest.seed)
    training.judge(training.single())
    for _ in range(contest.evaluations // batch - 1):
        training.judge(draw.integers(len(contest.cluster), size=(batch, len(training.decisions))))
    return _from_training(task, training)


def _method(name: str, contest: Contest) -> Entry:
    result = place(name, contest.graph, contest.cluster, PlaceOptions(seed=contest.seed))
    return Entry(result.predicted_step_us, None, result.placement_seconds)


def expert(contest: Contest) -> Entry:
    """Raises OptionError where the graph has no hints."""
    require_hints(contest.graph)
    return _method("expert", contest)


CONTENDERS: dict[str, Callable[[Contest], Entry]] = {
    "zero_shot": zero_shot,
    "fine_tuned": fine_tuned,
    "from_scratch": from_scratch,
    "rnn": rnn,
    "annealing": annealing,
    "random": random,
    **{name: partial(_method, name) for name in ("single", "metis", "scotch", "m_etf", "m_sct")},
    "expert": expert,
}
"""Placeto in three ways, the RNN placer, two searches without learning, and methods that simulate few plans."""


WITH_POLICY = ("zero_shot", "fine_tuned", "from_scratch")
"""Contenders whose results depend on the policy, or on what it is made of."""


def entry(name: str, contest: Contest) -> Entry | str:
    """A contender's result; or why it has none: no plan, no hints, or a missing package."""
    begun_seconds = time.process_time()
    try:
        return replace(CONTENDERS[name](contest), seconds=time.process_time() - begun_seconds)
    except (InfeasibleError, MissingBackendError, OptionError) as e:
        return str(e)
