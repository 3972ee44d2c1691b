"""The compiled loop of benchmarks/anneal.py: random moves, each judged by a whole simulation of the plan in the simulator's state."""

from typing import NamedTuple

import numpy as np

from baechi_ext.simulate.arrays import Problem, State
from baechi_ext.simulate.jit import allocating_kernel, kernel
from baechi_ext.simulate.simulate_kernel import run

LEAST_EXCESS = 1e-3
"""A plan that does not fit costs as much more as if it were this part of a limit further over it."""


class Units(NamedTuple):
    """The ops of unit u are ops[at[u]] to ops[at[u + 1]]."""

    at: np.ndarray
    ops: np.ndarray


class Best(NamedTuple):
    """The best plan so far; valid plans are better than all others. `cost` holds [0 where it is valid, else 1; its cost]."""

    device: np.ndarray
    priority: np.ndarray
    cost: np.ndarray


@kernel
def seed_lots(seed: int) -> None:
    np.random.seed(seed)


@kernel
def cost_of(p: Problem, s: State, penalty: float) -> tuple[float, bool]:
    """The makespan, more for bytes over the limits, and whether the plan fits."""
    makespan_us = run(p, s)
    excess = 0.0
    for d in range(len(s.devices)):
        peak, limit = s.devices[d].peak_bytes, p.devices[d].memory_bytes
        if peak > limit:
            excess += LEAST_EXCESS + (peak - limit) / max(1.0, limit)
    return makespan_us * (1.0 + penalty * excess), excess == 0.0


@kernel
def _random_move(s: State, units: Units) -> tuple[int, int, float]:
    """(unit, its device, 0) after moving it, or (-1, op, its priority) after changing that."""
    k = len(s.devices)
    if k > 1 and np.random.random() < 0.5:
        u = np.random.randint(len(units.at) - 1)
        before = np.int64(s.placement[units.ops[units.at[u]]])
        _move(s, units, u, (before + 1 + np.random.randint(k - 1)) % k)
        return u, before, 0.0
    v = np.random.randint(len(s.placement))
    was = s.priority[v]
    far = len(s.placement) ** -np.random.random()
    s.priority[v] += far * (2.0 * np.random.random() - 1.0)
    return -1, v, was


@kernel
def _move(s: State, units: Units, u: int, d: int) -> None:
    for i in range(units.at[u], units.at[u + 1]):
        s.placement[units.ops[i]] = d


@kernel
def _undo(s: State, units: Units, move: tuple[int, int, float]) -> None:
    if move[0] >= 0:
        _move(s, units, move[0], move[1])
    else:
        s.priority[move[1]] = move[2]


@kernel
def mean_change(p: Problem, s: State, units: Units, penalty: float, count: int) -> float:
    """The mean change of the cost by a random move, of those that change it at all; tries `count`."""
    cost, total, changes = cost_of(p, s, penalty)[0], 0.0, 0
    for _ in range(count):
        move = _random_move(s, units)
        change = abs(cost_of(p, s, penalty)[0] - cost)
        total += change
        changes += change > 0.0
        _undo(s, units, move)
    return total / max(1, changes)


@kernel
def anneal(p: Problem, s: State, units: Units, best: Best, at: tuple[float, float, int]) -> None:
    """Random moves at one temperature in microseconds and one price of bytes over the limits, so many."""
    temperature, penalty, count = at
    current, _ = cost_of(p, s, penalty)
    for _ in range(count):
        move = _random_move(s, units)
        cost, fits = cost_of(p, s, penalty)
        worse = cost - current
        if worse > 0.0 and np.random.random() >= np.exp(-worse / max(temperature, 1e-300)):
            _undo(s, units, move)
            continue
        current = cost
        if keep(best, s, cost, fits):
            for v in range(len(best.priority)):
                best.priority[v] = s.priority[v]


@kernel
def keep(best: Best, s: State, cost: float, fits: bool) -> bool:
    """True if the plan is better than the best so far; its devices and its cost are then kept."""
    over = 0.0 if fits else 1.0
    if over > best.cost[0] or (over == best.cost[0] and cost >= best.cost[1]):
        return False
    best.cost[0], best.cost[1] = over, cost
    for v in range(len(best.device)):
        best.device[v] = s.placement[v]
    return True


@allocating_kernel
def earliest_end(p: Problem, unit_of: np.ndarray, order: np.ndarray, factor: float) -> np.ndarray:
    """List scheduling: ops in the given topological order, each where it ends first if no transfer waits for another and each takes
    `factor` times as long."""
    k = len(p.devices)
    device, home = np.full(len(order), -1), np.full(len(order), -1)
    end, free = np.zeros(len(order)), np.zeros(k)
    for v in order:
        best, soonest = -1, np.inf
        for d in range(k):
            if home[unit_of[v]] not in (-1, d):
                continue
            ready = free[d]
            for i in range(p.ops[v].inputs_from, p.ops[v + 1].inputs_from):
                tensor = p.tensors[p.lists[i]]
                there = device[tensor.producer]
                link = p.links[there, d]
                sent_us = 0.0 if there == d else factor * (link.latency_us + tensor.bytes * link.us_per_byte)
                ready = max(ready, end[tensor.producer] + sent_us)
            if ready + p.ops[v].compute_us / p.devices[d].speed < soonest:
                best, soonest = d, ready + p.ops[v].compute_us / p.devices[d].speed
        device[v] = home[unit_of[v]] = best
        end[v] = free[best] = soonest
    return device
