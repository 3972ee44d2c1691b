"""The memory of a strategy on each device: parameters, their gradients and optimizer state, and activations kept for the backward pass;
and the cheapest strategy within a limit of it, by pricing memory (a Lagrange multiplier on each byte), with a bound.

At any price the cheapest priced strategy bounds all that fit: cost(s) >= min(cost + price * bytes) - price * limit. The next price is
where the cheapest too large strategy and the cheapest that fits cost the same, until there is none between them. Blocks that repeat
change at the same price; so the two are also mixed: one up to some layer, and the other from there.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from baechi_ext.errors import ShardError
from baechi_ext.shard.elimination import Answer, Elimination
from baechi_ext.shard.graph import Node
from baechi_ext.shard.machine import Costs, Machine
from baechi_ext.shard.tables import Configurations, Tables

_VIEWS = ("unstack", "ravel", "unravel", "view")
"""Ops that write what they read, seen otherwise."""
_SWEEPS = 4
"""So often, at most, each layer's configuration is chosen again beside the others'."""


def node_bytes(node: Node, space: Configurations, machine: Machine) -> Costs:
    """Bytes that a node holds on a device, for each configuration. Devices that a configuration leaves over hold copies."""
    weights = sum((t.words / t.parts(space) for t in node.weights), np.zeros(len(space)))
    outputs = sum((t.words / t.parts(space) for t in node.outputs if node.op not in _VIEWS), np.zeros(len(space)))
    return machine.word_bytes * ((2.0 + machine.optimizer_words) * weights + outputs)


def bytes_of(tables: Tables, choice: Iterable[int]) -> float:
    """The bytes that a strategy holds on each device; `choice[v]` is the index of node v's configuration."""
    triples = zip(tables.graph.nodes, tables.spaces, choice, strict=True)
    return sum(float(node_bytes(node, space[c : c + 1], tables.machine)[0]) for node, space, c in triples)


def within_memory(tables: Tables, cheapest: Callable[[Tables], Answer], bytes_held: Callable[[], Sequence[Costs]]) -> Answer:
    """The cheapest strategy found within the machine's memory limit, if it has one; `cheapest` finds one without a limit, and
    `bytes_held` says what each node holds in each of its configurations.

    Raises ShardError where none fits.
    """
    over = cheapest(tables)
    limit = tables.machine.memory_bytes
    if limit is None:
        return over
    held = bytes_held()
    if _held(held, over.choice) <= limit:
        return over
    bound, fits = over.bound, _least(tables, held, limit, over.plan)
    best = fits
    while True:
        price = max((fits.cost - over.cost) / (_held(held, over.choice) - _held(held, fits.choice)), 0.0)
        costs = tuple(c + price * h for c, h in zip(tables.costs, held, strict=True))
        priced = cheapest(replace(tables, costs=_shared(tables.costs, costs)))
        bound = max(bound, priced.bound - price * limit)
        between = replace(priced, cost=tables.cost(priced.choice))
        best = min(best, _mixed(tables, held, limit, over, between), _mixed(tables, held, limit, between, fits), key=lambda a: a.cost)
        if priced.cost >= (fits.cost + price * _held(held, fits.choice)) * (1 - 1e-9):
            best = _improved(tables, held, limit, best)
            return replace(best, bound=min(bound, best.cost), plan=priced.plan)
        if _held(held, between.choice) <= limit:
            fits = between
        else:
            over = between


def _held(held: Sequence[Costs], choice: Sequence[int]) -> float:
    return sum(float(h[c]) for h, c in zip(held, choice, strict=True))


def _least(tables: Tables, held: Sequence[Costs], limit: float, plan: Elimination) -> Answer:
    """The strategy that holds least. Raises ShardError where even that is too much."""
    choice = tuple(int(h.argmin()) for h in held)
    if _held(held, choice) > limit:
        raise ShardError(
            f"no strategy fits {limit / 2**20:.4g} MiB a device: the least that can be held is {_held(held, choice) / 2**20:.4g} MiB; "
            "give more memory (--device_memory), more processors (-p) or a smaller batch (-b)"
        )
    return Answer(choice, tables.cost(choice), 0.0, plan)


def _mixed(tables: Tables, held: Sequence[Costs], limit: float, a: Answer, b: Answer) -> Answer:
    """The cheapest strategy within the limit that is one up to some layer, and the other from there; of infinite cost where none is."""
    best = replace(a, cost=np.inf)
    for one, other in ((a.choice, b.choice), (b.choice, a.choice)):
        for cut in range(len(held) + 1):
            choice = (*one[:cut], *other[cut:])
            if _held(held, choice) <= limit and (cost := tables.cost(choice)) < best.cost:
                best = replace(a, choice=choice, cost=cost)
    return best


def _improved(tables: Tables, held: Sequence[Costs], limit: float, answer: Answer) -> Answer:
    """The strategy, each layer in turn with the configuration that is cheapest beside the others' and fits, until nothing changes."""
    choice = list(answer.choice)
    used = _held(held, choice)
    for _ in range(_SWEEPS):
        before = list(choice)
        for v, around in enumerate(tables.around):
            costs = tables.costs[v] + sum(tables.edge_row(e, v, choice) for e in around)
            costs = np.where(used - held[v][choice[v]] + held[v] <= limit, costs, np.inf)
            best = int(costs.argmin())
            if costs[best] < costs[choice[v]]:
                used += float(held[v][best] - held[v][choice[v]])
                choice[v] = best
        if choice == before:
            break
    return replace(answer, choice=tuple(choice), cost=tables.cost(choice))


def _shared(originals: tuple[Costs, ...], changed: tuple[Costs, ...]) -> tuple[Costs, ...]:
    """The changed arrays, those alike being one again, so that repeated blocks still share tables."""
    known: dict[tuple[int, bytes], Costs] = {}
    return tuple(known.setdefault((id(o), c.tobytes()), c) for o, c in zip(originals, changed, strict=True))
