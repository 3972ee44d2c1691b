"""Where a strategy's cost lies: per layer, what it computes, what its devices tell each other for it, and what moving its inputs takes."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from baechi_ext.shard.tables import Tables, term_costs


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


def layer_costs(tables: Tables, choice: Iterable[int]) -> list[LayerCost]:
    """The cost of each layer; their totals add up to the strategy's cost."""
    chosen = list(choice)
    moved: Counter[int] = Counter()
    for edge, cost in zip(tables.graph.edges, tables.edge_costs(chosen), strict=True):
        moved[edge.target] += cost
    found = []
    for v, node in enumerate(tables.graph.nodes):
        kinds: Counter[str] = Counter()
        for term, costs in term_costs(tables, v):
            kinds[term.kind] += float(costs[chosen[v]])
        found.append(LayerCost(node.name, float(tables.costs[v][chosen[v]]), dict(kinds), float(moved[v])))
    return found
