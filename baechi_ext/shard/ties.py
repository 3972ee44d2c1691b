"""Nodes that are split alike, as one: the calls of a layer that runs in several pieces.

Their costs are added up; a tensor between two of them costs what it does where both have the same configuration. The minimum is that of
all strategies that split them alike; it is found sooner, since one table takes the place of many.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from baechi_ext.shard.graph import Edge, ShardGraph
from baechi_ext.shard.machine import Costs
from baechi_ext.shard.memory import node_bytes
from baechi_ext.shard.tables import EdgeTable, Tables


@dataclass(frozen=True)
class _Quotient(ShardGraph):
    """Each node stands for those tied to it. What leads where does not matter to a search: edges go from lower to higher indices."""

    def __post_init__(self) -> None:
        """Nodes and tensors were checked where they come from."""


@dataclass(frozen=True)
class Tied:
    """The tables of what is left, and for each node of the graph its place in these; `whole` are the graph's own."""

    tables: Tables
    place: tuple[int, ...]
    whole: Tables

    def held(self) -> list[Costs]:
        """The bytes that each node left holds on a device, for each configuration: those of all that it stands for."""
        found: list[Costs] = [np.zeros(size) for size in self.tables.sizes]
        for p, node, space in zip(self.place, self.whole.graph.nodes, self.whole.spaces, strict=True):
            found[p] = found[p] + node_bytes(node, space, self.whole.machine)
        return found

    def choice(self, found: Sequence[int] | Mapping[int, int]) -> tuple[int, ...]:
        """The choice for all nodes that a choice for those left means."""
        return tuple(found[p] for p in self.place)


def tied(tables: Tables) -> Tied:
    """The tables with the nodes of each of the graph's ties as one, as far as these have the same configurations."""
    graph = tables.graph
    first = list(range(len(graph.nodes)))
    for tie in graph.ties:
        for v in tie[1:]:
            if np.array_equal(tables.spaces[v], tables.spaces[tie[0]]):
                first[v] = tie[0]
    if first == list(range(len(first))):
        return Tied(tables, tuple(first), tables)
    left = sorted(set(first))
    number = {v: i for i, v in enumerate(left)}
    place = tuple(number[v] for v in first)
    costs: list[Costs] = [tables.costs[v] for v in left]
    for v, p in enumerate(place):
        if left[p] != v:
            costs[p] = costs[p] + tables.costs[v]
    edges, values = [], []
    turned: dict[int, EdgeTable] = {}
    for edge, table in zip(graph.edges, tables.edges, strict=True):
        source, target = place[edge.source], place[edge.target]
        if source == target:
            costs[source] = costs[source] + table.values[table.source.of, table.target.of]
            continue
        if source > target:
            source, target = target, source
            table = turned.setdefault(id(table), EdgeTable(table.target, table.source, np.ascontiguousarray(table.values.T)))
        edges.append(Edge(source, target))
        values.append(table)
    quotient = _Quotient(graph.name, tuple(graph.nodes[v] for v in left), tuple(edges))
    return Tied(Tables(quotient, tables.machine, tuple(tables.spaces[v] for v in left), tuple(costs), tuple(values)), place, tables)
