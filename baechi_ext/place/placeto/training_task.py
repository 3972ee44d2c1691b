"""A graph to learn from: its decisions, their environment, and where its episodes begin."""

import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from baechi_ext.errors import PolicyError
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.common import Proposal
from baechi_ext.place.effort import clock_seconds
from baechi_ext.place.placeto.decisions import Decisions, View
from baechi_ext.place.placeto.environment import Environment, Plans, Rules
from baechi_ext.place.placeto.learning import Rollout, run_episodes
from baechi_ext.place.placeto.policy import Policy
from baechi_ext.place.trial import longest_placed_path_order
from baechi_ext.simulate import lower_bound_us
from baechi_ext.simulate.arrays import Floats

if TYPE_CHECKING:
    from torch import Generator, Tensor

STARTS = ("single", "random", "best")
"""Where episodes begin: all that is not pinned on the fastest device, each decision by lot, or at the best plan that earlier ones saw."""
_KEPT = 4

Devices = tuple[int, ...]


class TrainingTask:
    """Episodes on one graph and cluster, and the few best plans that any of them saw."""

    def __init__(self, decisions: Decisions, batch: int, rules: Rules) -> None:
        self.decisions = decisions
        self.environment = Environment(decisions, batch, rules)
        self.view = View(decisions)
        self.episodes = 0
        self.best: dict[Devices, tuple[float, float]] = {}
        """A device per decision -> what it exceeds memory limits by, and its step in microseconds; the best first."""

    @classmethod
    def of(cls, graph: OpGraph, cluster: Cluster, batch: int, rules: Rules) -> "TrainingTask":
        """A training task in topological order."""
        return cls(Decisions.of(graph, cluster), batch, rules)

    def run(self, policy: Policy, generator: "Generator | None", start: str = "single", likeliest: int = 0) -> Rollout:
        """A batch of episodes; without a generator the likeliest actions are taken, and in any case by the first `likeliest`."""
        environment = self.environment
        if start == "random":
            environment.reset(self._random(generator))
        elif start == "best" and self.best:
            environment.reset(next(iter(self.best)))
        else:
            environment.reset(self.single())
        rollout = run_episodes(policy, self.view, environment, generator, likeliest)
        self.episodes += environment.batch
        self._keep_best()
        return rollout

    def search(
        self, policy: Policy, generator: "Generator", batches: int, evaluations: float = math.inf, seconds: float = math.inf
    ) -> None:
        """Batches of episodes, the first of all with the likeliest actions; from the second batch on they begin at the best plan.

        There are fewer where a further one could exceed `evaluations`, the plans simulated in all, or once these seconds have passed.
        """
        begun_seconds = clock_seconds()
        self.run(policy, generator, likeliest=1)
        for _ in range(batches - 1):
            spent = self.environment.simulated + self.environment.most_simulated > evaluations
            if spent or clock_seconds() >= begun_seconds + seconds:
                break
            self.run(policy, generator, "best")

    def judge(self, plans: Plans) -> Floats:
        """The costs of a batch of plans, or of one for all; no episode."""
        self.environment.reset(plans)
        self._keep_best()
        return self.environment.costs

    def _keep_best(self) -> None:
        found = self.best | self.environment.best()
        self.best = dict(sorted(found.items(), key=lambda entry: entry[1])[:_KEPT])

    def state(self) -> dict[str, "Tensor"]:
        """All that earlier episodes leave to later ones: `plans`, by plan and decision, and `worth`, the best first; empty before any."""
        import torch

        if not self.best:
            return {}
        worth = torch.tensor(list(self.best.values()), dtype=torch.float64)
        return {"plans": torch.tensor(list(self.best), dtype=torch.int32), "worth": worth}

    def restore(self, episodes: int, state: "dict[str, Tensor]") -> None:
        """Goes on where `state` was taken, after so many episodes. Raises KeyError where something is missing, PolicyError where it is not
        of these decisions and devices."""
        best: dict[Devices, tuple[float, float]] = {}
        if state:
            plans, worth = state["plans"], state["worth"]
            shapes, own = (tuple(plans.shape), tuple(worth.shape)), len(self.decisions)
            if shapes != ((len(worth), own), (len(worth), 2)):
                raise PolicyError(f"its plans are of shapes {shapes}, expected ones of {own} decisions")
            devices = range(len(self.decisions.cluster))
            for plan, (excess, step_us) in zip(plans.tolist(), worth.tolist(), strict=True):
                if other := next((d for d in plan if d not in devices), None):
                    raise PolicyError(f"one of its plans has device {other!r} of {len(devices)}")
                best[tuple(map(int, plan))] = excess, step_us
        self.episodes, self.best = episodes, best

    def proposals(self) -> list[Proposal]:
        """The best plans, in the order in which episodes simulate them."""
        graph, cluster = self.decisions.graph, self.decisions.cluster
        placements = [self.decisions.placement(devices) for devices in self.best]
        return [Proposal(placement, (longest_placed_path_order(graph, cluster, placement),)) for placement in placements]

    @cached_property
    def bound_us(self) -> float:
        """The lower bound of the step."""
        return max(lower_bound_us(self.decisions.graph, self.decisions.cluster), 1e-9)

    @property
    def best_ratio(self) -> float:
        """Step over lower bound of the best plan that any episode saw; infinite before the first, or where none keeps the limits."""
        excess, makespan_us = next(iter(self.best.values()), (math.inf, math.inf))
        return math.inf if excess else makespan_us / self.bound_us

    def single(self) -> Devices:
        """All decisions on the fastest device."""
        return (self.decisions.cluster.fastest,) * len(self.decisions)

    def _random(self, generator: "Generator | None") -> np.ndarray:
        import torch

        shape = (self.environment.batch, len(self.decisions))
        return torch.randint(len(self.decisions.cluster), shape, generator=generator).numpy()
