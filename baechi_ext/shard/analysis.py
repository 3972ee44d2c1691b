"""Where a strategy's cost lies: per layer, what it computes, what its devices tell each other for it, and what moving its inputs takes; and
what it would be with the layer split in another way."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from baechi_ext.shard.machine import Costs
from baechi_ext.shard.search import Tied, tied
from baechi_ext.shard.tables import Configurations, Tables, term_costs

MOVED, HIDDEN = "moving its inputs", "hidden"
"""Kinds of cost that are no term's: tensors that come in another split, and (below 0) what goes on while the layer computes."""
_MOST_OTHERS = 6


@dataclass(frozen=True, slots=True)
class LayerCost:
    """A layer's cost in operations of a device: its own in all, the same by kind, and `moved`, the transfer of its inputs.

    With overlap, `own` is less than the sum of its kinds by what goes on at the same time.
    """

    name: str
    own: float
    kinds: dict[str, float]
    moved: float

    @property
    def total(self) -> float:
        return self.own + self.moved

    @property
    def hidden(self) -> float:
        """The cost, below 0, of what goes on at the same time."""
        return self.own - sum(self.kinds.values())

    @property
    def parts(self) -> dict[str, float]:
        """The parts of the total that are not zero."""
        parts = {**self.kinds, MOVED: self.moved, HIDDEN: self.hidden}
        return {kind: cost for kind, cost in parts.items() if abs(cost) > 1e-9 * max(self.total, 1e-300)}


@dataclass(frozen=True, slots=True)
class Other:
    """Another configuration of a layer, all other layers as they are: how much more (or, below 0, less) the strategy would cost, in
    operations of a device, and how much more each device would hold."""

    configuration: tuple[int, ...]
    change: float
    held_change_bytes: float


def layer_costs(tables: Tables, choice: Iterable[int]) -> list[LayerCost]:
    """The cost of each layer; their totals add up to the strategy's cost."""
    chosen = list(choice)
    moved: defaultdict[int, float] = defaultdict(float)
    for edge, cost in zip(tables.graph.edges, tables.edge_costs(chosen), strict=True):
        moved[edge.target] += cost
    found = []
    for v, node in enumerate(tables.graph.nodes):
        kinds: defaultdict[str, float] = defaultdict(float)
        for term, costs in term_costs(tables, v):
            kinds[term.kind] += float(costs[chosen[v]])
        found.append(LayerCost(node.name, float(tables.costs[v][chosen[v]]), dict(kinds), float(moved[v])))
    return found


def other_configurations(tables: Tables, choice: Sequence[int]) -> Iterator[list[Other]]:
    """For each layer its cheapest other configurations, all other layers as they are, and the one that splits nothing. Layers that are tied
    change together, where they are split alike."""
    joined = tied(tables)
    alike = dict(zip(joined.place, choice, strict=True))
    if joined.choice(alike) != tuple(choice):
        joined = Tied(tables, tuple(range(len(choice))), tables)
        alike = dict(enumerate(choice))
    left, held = joined.tables, joined.held()
    chosen = [alike[p] for p in range(len(left.graph.nodes))]
    known: dict[int, list[Other]] = {}
    for p in joined.place:
        if p not in known:
            costs = left.costs[p] + sum(left.edge_row(e, p, chosen) for e in left.around[p])
            known[p] = _others(left.spaces[p], costs - costs[chosen[p]], held[p] - held[p][chosen[p]], chosen[p])
        yield known[p]


def _others(space: Configurations, change: Costs, held: Costs, chosen: int) -> list[Other]:
    order = [int(c) for c in np.argsort(change, kind="stable") if c != chosen]
    whole = [c for c in order[_MOST_OTHERS:] if (space[c] == 1).all()]
    return [Other(tuple(map(int, space[c])), float(change[c]), float(held[c])) for c in (*order[:_MOST_OTHERS], *whole)]
