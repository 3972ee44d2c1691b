"""Fitting: the search for a plan that keeps all memory limits, whatever its step takes.

Simulated annealing of the bytes over the limits (`fit_kernel`): chains on threads, in rounds that begin at the best plan and
take twice the steps of the one before. No chain looks at another within a round, nor at a clock unless it is told to.
"""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

from baechi_ext.place import fit_kernel
from baechi_ext.place.blocks import Block, block_levels
from baechi_ext.place.effort import Effort
from baechi_ext.place.refine_kernel import Search, make_search
from baechi_ext.place.trial import Trial
from baechi_ext.simulate import Simulator
from baechi_ext.simulate.arrays import Problem, State, make_problem, make_state

_ORDER_SHARES = (0.0, 0.6, 0.3)
"""For each chain, how many of its moves change the order. The first one begins each round at its own best plan, in the draining order."""
_HOT, _COLD = (0.02, 0.02, 0.3), 2e-5
"""For each chain the first temperature of a round, and the last one of all, in parts of the mean limit. A hot chain packs large units
anew, a cool one improves on the order."""
_FIRST_WORK, _FEWEST_STEPS = 1_000_000, 50  # the first round's work (steps times ops), and its least steps
_LOOK_SECONDS = 0.1

Watch = Callable[[Trial, int], None]
"""Gets the best plan so far, and how many were simulated."""


_FEW_OPS, _TRIES_PER_PLAN = 8, 100  # few ops have few plans: a search at random that could have tried each of them so often has tried all


def fit(start: Trial, seed: int, effort: Effort, watch: Watch | None = None) -> Trial:
    """The first plan found that fits, or else the one with the fewest bytes over the limits; `start` where it is no worse.

    The same for the same seed unless `effort.seconds` ends it. Raises KeyboardInterrupt where the user interrupts it.
    """
    if start.valid or effort.seconds <= 0:
        return start
    simulator = start.simulator
    problem = make_problem(simulator.graph, simulator.cluster)
    levels = block_levels(simulator.graph, simulator.cluster)
    chains = [_Chain(problem, levels, *kind) for kind in zip(_ORDER_SHARES, _HOT, strict=True)]
    n = len(simulator.graph)
    bests = [start for _ in chains]
    best, left, rounds, done = start, min(effort.simulated_ops / n, _TRIES_PER_PLAN * _plans(simulator)) / len(chains), 0, 0
    steps = max(_FEWEST_STEPS, _FIRST_WORK // n)
    chains[0].prepare(start, 0, seed)
    chains[0].run()  # compiles it, where no thread waits for it
    until = time.perf_counter() + effort.seconds

    def look() -> bool:
        if watch is not None:
            watch(best, done)
        return time.perf_counter() >= until

    while not best.valid and left > 0 and time.perf_counter() < until:
        for i, chain in enumerate(chains):
            begin = bests[i] if chain.order_share == 0 else best
            chain.prepare(begin, int(min(steps, left)), seed + 1_000_003 * (len(chains) * rounds + i))
        run_together(chains, look)
        done += sum(chain.evaluations for chain in chains)
        bests = [min(old, chain.trial(old), key=lambda trial: trial.key) for old, chain in zip(bests, chains, strict=True)]
        best = min(bests, key=lambda trial: trial.key)
        left, steps, rounds = left - steps, 2 * steps, rounds + 1
    return best


def _plans(simulator: Simulator) -> float:
    """The number of placements and orders there could be at most; infinity for more than a few ops."""
    n = len(simulator.graph)
    return float(len(simulator.cluster) ** n * math.factorial(n)) if n <= _FEW_OPS else math.inf


class Chain:
    """One chain of simulated annealing by a kernel, and its part of the state."""

    def __init__(self, kernel: Callable[[Problem, State, Search], None], problem: Problem, levels: Sequence[Sequence[Block]]) -> None:
        self.kernel = kernel
        self.problem = problem
        self.state = make_state(problem)
        self.search = make_search(problem, levels)
        self.settings = self.search.settings[0]

    @property
    def evaluations(self) -> int:
        return int(self.settings["done"])

    def begin_at(self, start: Trial) -> None:
        """Sets the chain to a plan, the best one that it knows forgotten."""
        self.state.placement[:] = start.placement
        self.state.totals["has_priority"] = start.priority is not None
        if start.priority is not None:
            self.state.priority[:] = start.priority
        self.settings["best_excess_bytes"] = self.settings["best_makespan_us"] = np.inf

    def run(self) -> None:
        """Takes the steps that the settings ask for, or fewer once they say `stop`."""
        self.kernel(self.problem, self.state, self.search)

    def trial(self, default: Trial) -> Trial:
        """The chain's best plan; `default` where it has none."""
        if not np.isfinite(self.settings["best_makespan_us"]):
            return default
        return Trial(tuple(self.search.placement.tolist()), tuple(self.search.priority.tolist()), default.simulator)


def run_together(chains: Sequence[Chain], look: Callable[[], bool]) -> None:
    """Runs chains, each on a thread, until all are done or `look`, asked several times a second, returns True. None still runs after it,
    even where the user interrupts it."""
    for chain in chains:
        chain.settings["stop"] = False
    with ThreadPoolExecutor(len(chains)) as pool:
        running = [pool.submit(chain.run) for chain in chains]
        try:
            while wait(running, _LOOK_SECONDS).not_done and not look():
                pass
        finally:
            for chain in chains:
                chain.settings["stop"] = True


class _Chain(Chain):
    def __init__(self, problem: Problem, levels: Sequence[Sequence[Block]], order_share: float, hot: float) -> None:
        super().__init__(fit_kernel.fit, problem, levels)
        self.order_share = self.settings["order_share"] = order_share
        limits = problem.devices["memory_bytes"]
        limit = float(np.mean(limits[np.isfinite(limits)]))
        self.settings["from_temperature"], self.settings["to_temperature"] = max(1.0, hot * limit), max(1e-3, _COLD * limit)

    def prepare(self, start: Trial, steps: int, seed: int) -> None:
        """Sets the chain to a plan, and to its part of a round."""
        self.begin_at(start)
        if self.order_share == 0:
            self.state.totals["has_priority"] = True
            self.state.priority[:] = self.problem.ops["tail_us"][:-1]
        self.settings["steps"], self.settings["done"], self.settings["random"] = steps, 0, scrambled(seed)


def scrambled(seed: int) -> int:
    """A first state for a chain's random numbers: splitmix64 of the seed, and never 0."""
    mask = 2**64 - 1
    z = (seed + 1) * 0x9E3779B97F4A7C15 & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return (z ^ z >> 31) or 1
