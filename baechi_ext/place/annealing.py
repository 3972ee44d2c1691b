"""The search behind `refine`: chains of simulated annealing on threads, in rounds.

Each round starts all chains from the best plan of all and takes twice the steps of the one before; no chain looks at a clock or at
another within a round. So a search that ends by itself finds the same plan on any machine. Only where the time left is not enough
for two more rounds does the clock say how long the last one is: a round cut off while it is hot would be lost.

How hot a round may begin depends on its length and on the graph: too hot, and the good start is lost; too cold, and the chain stays
where it is. So each chain finds its temperature from how its rounds end: worse than they began, or with the very same makespan. Once
rounds are long enough to find a good plan from anywhere, one chain begins each so hot that it forgets where it began: what no search
near the best plan would find.
"""

import math
from collections.abc import Sequence

import numpy as np

from baechi_ext.place import refine_kernel
from baechi_ext.place.blocks import Block
from baechi_ext.place.common import SearchProgress, Task
from baechi_ext.place.effort import clock_seconds
from baechi_ext.place.fitting import Chain, run_together, scrambled
from baechi_ext.place.trial import Trial
from baechi_ext.simulate.arrays import Problem, make_problem

_PATH_SHARES = (0.05, 0.3)  # for each chain, how many of its moves are at the critical path
_HOTTER = (1.0, 3.0)
_ORDER_SHARE = 0.2
_TEMPERATURE, _COLDEST, _HOTTEST = 0.1, 1e-5, 3e-2
"""In parts of the first plan's makespan: the first temperature, times devices and over blocks, and what all stay between."""
_COOLER, _WARMER = (2.0, 1.2), 2.0
"""Factors: a chain begins its next round that much cooler after one that ended worse than it began, that much warmer after one without
any change."""
_LONGER = 2  # from round to round: how many times as long
_COOLING = 100.0
_RESTARTING, _STEPS_OF_RESTART, _COOLING_OF_RESTART = 1, 300, 1000.0
"""The chain that forgets the best plan in each round with this many steps for a block: it begins at the highest temperature."""
_FIRST_WORK, _FEWEST_STEPS = 3_000_000, 200  # the first round's work (steps times what there is to simulate in each), and its least steps
_STEPS_PER_BLOCK = 50
_PATIENCE = 5000
"""Steps of a chain without success for every pair of ops, after which a search ends by itself: seconds for 20 ops, minutes for 100."""
_ABSORBED = 0.05  # at first a makespan counts as much as an excess of this part of a device's memory
_HEAVIER = 20.0  # the most that an excess may come to count. Beyond it no temperature would move a plan from one excess to another.
_SAFETY = 0.9  # the part of the time left that the last round is made for
_ROUNDING = 1e-9


def anneal(task: Task, start: Trial, until_seconds: float, evaluations: float = math.inf) -> tuple[Trial, bool]:
    """The best plan of the task found from `start`, which may exceed memory limits, and whether the user interrupted the search.

    `until_seconds` is on the clock that stands still while kernels are compiled; `evaluations`: plans that may be simulated in all.
    """
    if clock_seconds() >= until_seconds:
        return start, False
    return _Annealing(task, start, until_seconds, evaluations).run()


class _Annealing:
    """The chains, and the best plan of all of them."""

    def __init__(self, task: Task, start: Trial, until_seconds: float, evaluations: float) -> None:
        self.task, self.best = task, start
        self.until_seconds, self.most_evaluations = until_seconds, evaluations
        self.problem = make_problem(task.graph, task.cluster)
        levels, seed = task.block_levels, task.options.seed
        self.chains = [_Chain(self.problem, levels, seed) for seed in range(2 * seed, 2 * seed + len(_PATH_SHARES))]
        self.begun_seconds = clock_seconds()
        work = len(self.problem.ops) + len(self.problem.lists)
        self.steps = max(_FEWEST_STEPS, min(_FIRST_WORK // work, _STEPS_PER_BLOCK * (len(levels[0]) + 10)))
        limits_bytes = self.problem.devices["memory_bytes"]
        room = float(np.mean(limits_bytes[np.isfinite(limits_bytes)])) if np.any(np.isfinite(limits_bytes)) else 0.0
        self.scale_us = max(start.makespan_us, 1e-9)
        self.weight = self.scale_us / (_ABSORBED * max(1.0, room))

    def run(self) -> tuple[Trial, bool]:
        idle, patience = 0, _PATIENCE * len(self.best.placement) ** 2
        try:
            for chain in self.chains:
                chain.prepare(self, steps=0)
                chain.run()  # compiles it, where no thread waits for it
            while idle < patience and not self._is_over():
                steps = self.steps = int(min(self.steps, self._evaluations_left()))
                for chain in self.chains:
                    chain.prepare(self, steps)
                self._run_round()
                for chain in self.chains:
                    chain.adapt(self.best.key)
                idle = 0 if self._collect() else idle + steps
        except KeyboardInterrupt:
            self._collect()
            return self.best, True
        return self.best, False

    def _is_over(self) -> bool:
        return self.task.is_optimal(self.best) or self._left_seconds() <= 0 or self._evaluations_left() < 1

    def _left_seconds(self) -> float:
        until_seconds, worth = self.until_seconds, self.task.options.worth
        if worth is not None:  # a search worth only so much time ends earlier
            excess_bytes, makespan_us = self._standing()
            worth_seconds = worth.seconds(math.inf if excess_bytes else makespan_us, self.task.bound_us)
            until_seconds = min(until_seconds, self.task.started_seconds + worth_seconds)
        return until_seconds - clock_seconds()

    def _standing(self) -> tuple[float, float]:
        """Excess and makespan of the best plan so far, of chains that still run, too."""
        plans = [(float(chain.settings["best_excess_bytes"]), float(chain.settings["best_makespan_us"])) for chain in self.chains]
        return min([self.best.key, *plans])

    @property
    def _evaluations(self) -> int:
        return sum(chain.evaluations for chain in self.chains)

    def _evaluations_left(self) -> float:
        """For each chain, after the one with which it begins a round."""
        return (self.most_evaluations - self._evaluations) / len(self.chains) - 1

    def _run_round(self) -> None:
        """Runs the chains; the next round is longer, or as long as the time left where the one after it would not fit."""
        begun_seconds = clock_seconds()
        run_together(self.chains, self._look)
        self._tell()
        now_seconds = clock_seconds()
        rate = self.steps / max(now_seconds - begun_seconds, 1e-6)  # another thread's compiling is taken off as well
        possible = int(min(max(0.0, self._left_seconds()) * rate * _SAFETY, self._evaluations_left()))
        last = possible < (_LONGER + _LONGER**2) * self.steps
        self.steps = max(1, possible) if last else _LONGER * self.steps

    def _look(self) -> bool:
        self._tell()
        return self._left_seconds() <= 0

    def _collect(self) -> bool:
        """Takes over the best plan of the chains; whether it is better than the one known."""
        trials = [self.best, *(chain.trial(self.best) for chain in self.chains)]
        before, self.best = self.best, min(trials, key=lambda trial: trial.key)
        return self.best.key < before.key

    def _tell(self) -> None:
        watch = self.task.options.watch
        if watch is None:
            return
        excess_bytes, makespan_us = self._standing()
        seconds = clock_seconds() - self.begun_seconds
        watch(SearchProgress(float(makespan_us), float(excess_bytes), self.task.bound_us, self._evaluations, seconds))


class _Chain(Chain):
    """One chain and its temperature."""

    def __init__(self, problem: Problem, levels: Sequence[Sequence[Block]], seed: int) -> None:
        super().__init__(refine_kernel.anneal, problem, levels)
        self.number = seed % len(_PATH_SHARES)
        self.blocks = len(levels[0])
        first = _TEMPERATURE * len(problem.devices) * _HOTTER[self.number] / (self.blocks + 1)
        self.temperature = min(_HOTTEST, max(_COLDEST, first))
        """In parts of the first plan's makespan: what the next round begins with."""
        self.settings["random"] = scrambled(seed)

    def prepare(self, annealing: _Annealing, steps: int) -> None:
        """Sets the chain to the best plan, and to its part of a round."""
        self.begin_at(annealing.best)
        settings = self.settings
        restarts = self.number == _RESTARTING and steps >= _STEPS_OF_RESTART * self.blocks
        hot = (_HOTTEST if restarts else self.temperature) * annealing.scale_us
        settings["from_temperature"], settings["to_temperature"] = hot, hot / (_COOLING_OF_RESTART if restarts else _COOLING)
        settings["weight"], settings["heaviest"] = annealing.weight, _HEAVIER * annealing.weight
        settings["steps"] = steps
        settings["path_share"], settings["order_share"] = _PATH_SHARES[self.number], _ORDER_SHARE
        settings["target_us"] = annealing.task.bound_us * (1 + _ROUNDING)

    def adapt(self, begun: tuple[float, float]) -> None:
        """Sets the temperature for the next round; `begun`: excess and makespan that the last one began with."""
        begun_bytes, begun_us = begun
        worse_bytes = self.settings["excess_bytes"] - begun_bytes
        worse_us = self.settings["makespan_us"] - begun_us
        if worse_bytes > 0 or (worse_bytes == 0 and worse_us > _ROUNDING * begun_us):
            self.temperature = max(_COLDEST, self.temperature / _COOLER[self.number])
        elif worse_bytes == 0 and worse_us >= -_ROUNDING * begun_us:
            self.temperature = min(_HOTTEST, self.temperature * _WARMER)
