"""The decision process of Placeto (NeurIPS 2019, section 3.1): visit decision after decision, choose its device, see what that gains.

A state is a complete plan and the decision whose turn it is; an action is its device; an episode visits every decision that is not pinned
once or more often. A plan costs its simulated step, in parts of the time that all ops take on the fastest device, and a penalty for memory
that exceeds the limits. The reward of an action is by how much it lowers the cost; so an episode's rewards add up to what it improves in
all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baechi_ext.place.chunks import held_bytes
from baechi_ext.place.placeto import environment_kernel as kernel
from baechi_ext.place.placeto.decisions import Decisions
from baechi_ext.place.placeto.environment_kernel import FEATURES, SCALES, SIGHT, Episodes, World
from baechi_ext.simulate.arrays import Floats, make_problem, make_state

Actions = NDArray[np.int64]
Plans = Sequence[int] | Sequence[Sequence[int]] | NDArray[np.integer]
"""A device per decision: one plan for all episodes, or one for each."""


MEMORY_PENALTY = 5.0
"""The cost of exceeding memory limits by as much as one of them; the step costs 1 on the fastest device."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of an episode."""

    visits: int = 1
    """The visits of each decision."""
    longest_path_first: bool = True
    """Plans are simulated with the longest path to the end first, transfers included; else ops run as they become ready, as published."""


class Environment:
    """A batch of episodes on one graph, in step with each other. It simulates as every placer does."""

    def __init__(self, decisions: Decisions, batch: int, rules: Rules = Rules()) -> None:  # noqa: B008 - frozen
        self.decisions = decisions
        self.rules = rules
        self.problem = make_problem(decisions.graph, decisions.cluster)
        self._state = make_state(self.problem)
        self._state.totals["has_priority"] = rules.longest_path_first
        self._world = _make_world(decisions)
        e = self._episodes = _make_episodes(decisions, batch)
        self.devices, self.visited = e.device, e.visited
        """The plans as they stand, by episode and decision; and the decisions that had their turn."""
        self.start_us, self.makespans_us = e.start_us, e.makespan_us
        """The starts of ops in the simulated plans, by episode and op; and the steps, by episode."""
        self.time = 0
        free = np.flatnonzero(decisions.pins < 0)
        self._turns: list[int] = (free if len(free) else np.arange(len(decisions))).tolist()
        """The decisions of an episode that have a turn, in order: those that are not pinned, if there are any."""
        speeds = [d.speed for d in decisions.cluster.devices]
        self.scale_us = max(decisions.graph.total_compute_us() / max(speeds), 1e-9)
        self.improvements: list[tuple[int, float]] = []
        """For each valid plan that was shorter than all before it, how many had been simulated when it was seen, and its step."""

    @property
    def batch(self) -> int:
        return len(self._episodes.device)

    @property
    def horizon(self) -> int:
        """Steps of an episode."""
        return self.rules.visits * len(self._turns)

    @property
    def most_simulated(self) -> int:
        """Plans that a batch of episodes may simulate: the first ones, and one for each step."""
        return self.batch * (self.horizon + 1)

    @property
    def current(self) -> int:
        """The decision whose turn it is."""
        return self._turns[self.time % len(self._turns)]

    @property
    def done(self) -> bool:
        return self.time == self.horizon

    @property
    def costs(self) -> Floats:
        """The costs of the plans as they stand, by episode."""
        return self.makespans_us / self.scale_us + MEMORY_PENALTY * self._episodes.excess

    @property
    def simulated(self) -> int:
        """The number of plans simulated in all."""
        return int(self._episodes.simulated[0])

    def reset(self, plans: Plans) -> None:
        """Begins episodes at these plans."""
        self._episodes.device[:] = plans
        self.time = 0
        kernel.begin(self.problem, self._state, self._world, self._episodes)
        self._note_improvement()

    def observe(self) -> NDArray[np.float32]:
        """FEATURES of every device for the current decision: episode x device x feature. The next call overwrites it."""
        kernel.observe(self.problem, self._world, self._episodes, self.current)
        return self._episodes.features

    def step(self, actions: Actions) -> Floats:
        """Places the current decision, by episode; returns the rewards."""
        before = self.costs
        kernel.act(self.problem, self._state, self._world, self._episodes, self.current, actions)
        self.time += 1
        self._note_improvement()
        return before - self.costs

    def _note_improvement(self) -> None:
        e = self._episodes
        least_us = float(e.makespan_us.min(where=e.excess == 0, initial=np.inf))
        if least_us < (self.improvements[-1][1] if self.improvements else np.inf):
            self.improvements.append((self.simulated, least_us))

    def best(self) -> dict[tuple[int, ...], tuple[float, float]]:
        """The best plan of each episode: a device per decision -> what it exceeds memory limits by, and its step in microseconds."""
        e = self._episodes
        worth = zip(e.best_excess.tolist(), e.best_makespan_us.tolist(), strict=True)
        return {tuple(devices): key for devices, key in zip(e.best.tolist(), worth, strict=True)}


def _make_world(decisions: Decisions) -> World:
    graph, units = decisions.graph, decisions.units
    speeds = [d.speed for d in decisions.cluster.devices]
    total_us = max(graph.total_compute_us(), 1e-9)
    scales = np.zeros(1, SCALES)
    scales["mean_speed"] = sum(speeds) / len(speeds)
    scales["decision_us"] = total_us / max(1, len(units)) / scales["mean_speed"]
    scales["balanced_us"] = total_us / sum(speeds)
    return World(
        unit=decisions.unit_of,
        member_from=np.cumsum([0, *map(len, units)], dtype=np.int32),
        members=np.array([v for unit in units for v in unit], np.int32),
        order=np.array(graph.order, np.int32),
        work_us=np.array([sum(graph.ops[v].compute_us for v in unit) for unit in units], np.float64),
        held_bytes=np.array(held_bytes(graph, units), np.float64),
        pin=decisions.pins,
        parallel=decisions.parallel,
        scales=scales,
    )


def _make_episodes(decisions: Decisions, batch: int) -> Episodes:
    n, m, k = len(decisions.graph), len(decisions), len(decisions.cluster)
    return Episodes(
        device=np.zeros((batch, m), np.int32),
        visited=np.zeros(m, np.bool_),
        start_us=np.zeros((batch, n)),
        end_us=np.zeros((batch, n)),
        makespan_us=np.zeros(batch),
        excess=np.zeros(batch),
        peak_bytes=np.zeros((batch, k)),
        best=np.zeros((batch, m), np.int32),
        best_makespan_us=np.zeros(batch),
        best_excess=np.zeros(batch),
        sight=np.zeros(k, SIGHT),
        features=np.zeros((batch, k, len(FEATURES)), np.float32),
        simulated=np.zeros(1, np.int32),
    )
