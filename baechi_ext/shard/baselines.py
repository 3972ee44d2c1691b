"""Strategies of others, judged by the same costs: expert strategies, and a random walk from the best of them."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from baechi_ext.shard.graph import Node
from baechi_ext.shard.machine import Costs
from baechi_ext.shard.tables import Configurations, Tables, bytes_of, divisors, node_bytes

Wanted = Sequence[tuple[str, int]]
"""Names of axes, and into how many parts each may be split; the first come first."""

_FEATURES = ("heads", "hidden", "vocabulary", "units", "channels")
"""The axes that tensor parallelism splits: the first of these that a layer has."""
_TEMPERATURE = 1e-3
"""The temperature of the walk, as a part of its first strategy's cost."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """A strategy by name: for each node the index of its configuration, and what they cost."""

    name: str
    choice: tuple[int, ...]
    cost: float
    note: str = ""
    fits: bool = True
    """False if it holds more than the machine's memory limit."""


def data_parallel(tables: Tables) -> Baseline:
    """Every layer split by batch, as far as it can be."""
    return _baseline(tables, "data parallel", lambda _: [("batch", tables.machine.devices)])


def one_weird_trick(tables: Tables) -> Baseline:
    """Linear layers and the loss split by features, all others by batch (Krizhevsky, 2014)."""
    devices = tables.machine.devices

    def wanted(node: Node) -> Wanted:
        if node.op in ("linear", "cross_entropy"):
            return [("units", devices), ("vocabulary", devices)]
        return [("batch", devices)]

    return _baseline(tables, "one weird trick", wanted)


def megatron(tables: Tables) -> Baseline:
    """Features by this many devices, and the batch by the others (Shoeybi et al., 2019); the cheapest number of at least two."""
    devices = tables.machine.devices
    found = []
    for parts in divisors(devices, devices)[1:]:

        def wanted(node: Node, parts: int = parts) -> Wanted:
            features = next((name for name in _FEATURES if node.axis(name) is not None), None)
            split = [] if features is None else [(features, parts)]
            return [*split, ("batch", devices // parts)]

        found.append(_baseline(tables, "megatron", wanted, f"{parts} by features, {devices // parts} by batch"))
    return min(found, key=lambda b: (not b.fits, b.cost), default=data_parallel(tables))


def experts(tables: Tables) -> list[Baseline]:
    """All strategies that a person would try."""
    return [data_parallel(tables), one_weird_trick(tables), megatron(tables)]


def random_walk(tables: Tables, start: Baseline, *, seconds: float, most_proposals: int = 250_000, seed: int = 0) -> Baseline:
    """The best strategy of a walk as FlexFlow's search makes it (Jia et al., 2019): a random configuration for a random layer at a time.

    A proposal that costs less is taken, one that costs more with probability exp(-difference / temperature). It ends after `seconds`, after
    half of them without a gain, or after `most_proposals`, as in the comparison of the PaSE paper.
    """
    random = np.random.default_rng(seed)
    choice, cost = list(start.choice), start.cost
    best, best_cost = tuple(choice), cost
    temperature = _TEMPERATURE * start.cost
    held, spare = _held(tables), _spare(tables, start.choice)
    began = gained = time.perf_counter()
    proposals = 0
    while proposals < most_proposals:
        now = time.perf_counter()
        if now - began > seconds or now - gained > max(seconds / 2, gained - began):
            break
        for v, part, luck in zip(random.integers(len(choice), size=64), random.random(64), random.random(64), strict=True):
            proposals += 1
            candidate = int(part * tables.sizes[v])
            more = float(held[v][candidate] - held[v][choice[v]]) if held else 0.0
            if more > spare:
                continue
            difference = _difference(tables, choice, int(v), candidate)
            if difference <= 0 or luck < math.exp(-difference / temperature):
                choice[v] = candidate
                cost, spare = cost + difference, spare - more
                if cost < best_cost * (1 - 1e-12):
                    best, best_cost, gained = tuple(choice), cost, time.perf_counter()
    note = f"from {start.name}, {proposals} proposals in {time.perf_counter() - began:.3g} s"
    return Baseline("random walk", best, tables.cost(best), note, start.fits)


def _held(tables: Tables) -> list[Costs]:
    """The bytes that each node holds in each configuration, where the machine has a limit."""
    if tables.machine.memory_bytes is None:
        return []
    return [node_bytes(node, space, tables.machine) for node, space in zip(tables.graph.nodes, tables.spaces, strict=True)]


def _spare(tables: Tables, choice: Sequence[int]) -> float:
    """The bytes that a device may hold beside a strategy's; below 0 where these are too many."""
    limit = tables.machine.memory_bytes
    return math.inf if limit is None else limit - bytes_of(tables, choice)


def _difference(tables: Tables, choice: Sequence[int], v: int, candidate: int) -> float:
    """The cost that another configuration of node v adds to the strategy."""
    changed = list(choice)
    changed[v] = candidate
    own = float(tables.costs[v][candidate] - tables.costs[v][choice[v]])
    return own + sum(tables.edge_cost(e, changed) - tables.edge_cost(e, choice) for e in tables.around[v])


def _baseline(tables: Tables, name: str, wanted: Callable[[Node], Wanted], note: str = "") -> Baseline:
    choice = tuple(_nearest(node, space, wanted(node)) for node, space in zip(tables.graph.nodes, tables.spaces, strict=True))
    fits = _spare(tables, choice) >= 0
    return Baseline(name, choice, tables.cost(choice), note if fits else ", ".join(filter(None, (note, "does not fit"))), fits)


def _nearest(node: Node, space: Configurations, wanted: Wanted) -> int:
    """The configuration that splits the wanted axes as far as wanted, the first ones first, and no others."""
    most = np.ones(len(node.axes), np.int64)
    axes = []
    for name, parts in wanted:
        axis = node.axis(name)
        if axis is not None:
            most[axis] = parts
            axes.append(axis)
    rows = np.flatnonzero((space <= most).all(axis=1))
    for axis in axes:
        splits = space[rows, axis]
        rows = rows[splits == splits.max()]
    return int(rows[0])
