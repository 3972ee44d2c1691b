"""The search: the cheapest strategy for a graph on a machine, with the proof, or with a bound of what a cheaper one could save.

Nodes that are split alike, the calls of a layer that runs in several pieces, are searched as one: their costs are added up; a tensor
between two of them costs what it does where both have the same configuration. The minimum is that of all strategies that split them
alike; it is found sooner, since one table takes the place of many.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from baechi_ext.errors import ShardError
from baechi_ext.shard.elimination import Answer, Elimination, choose, eliminate, plan_elimination
from baechi_ext.shard.graph import Edge, ShardGraph
from baechi_ext.shard.machine import Costs, Machine
from baechi_ext.shard.memory import bytes_of, node_bytes, within_memory
from baechi_ext.shard.order import elimination_order
from baechi_ext.shard.prune import pruned
from baechi_ext.shard.tables import EdgeTable, Tables, build_tables

DEFAULT_TABLE_BYTES = 128 << 20
_WORTH_PRUNING = 1e8
"""Below so many operations the search is done sooner than configurations are pruned."""
_SWEEPS = 4
"""So often, at most, configurations are pruned where tables are too large: what is left may dominate more."""
_BEAM_PART = 8
"""With a beam, tables are kept so many times smaller than they may be: there are more of them."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """`original`: tensors move as in the original release. `table_bytes`: no table may be larger. `beam`: where one would be, search on
    with smaller tables and this many states; None: refuse. `prune`: leave dominated configurations out (None: where that pays).
    """

    order: str = "generate_seq"
    original: bool = False
    table_bytes: float = DEFAULT_TABLE_BYTES
    beam: int | None = None
    prune: bool | None = None


@dataclass(frozen=True)
class Found:
    """A strategy: for each node the index of its configuration in `tables`, its cost, and a lower bound of all strategies' costs.

    `elimination` is how it was found; `seconds` by stage. `held_bytes` is what it holds on a device.
    """

    tables: Tables
    choice: tuple[int, ...]
    cost: float
    lower_bound: float
    elimination: Elimination
    held_bytes: float
    seconds: dict[str, float]

    @property
    def status(self) -> str:
        """`optimal` where no strategy is cheaper, else `feasible`."""
        return "optimal" if self.cost <= self.lower_bound * (1 + 1e-9) else "feasible"

    @property
    def strategy(self) -> list[tuple[int, ...]]:
        return self.tables.strategy(self.choice)

    @property
    def step_seconds(self) -> float:
        """The seconds that a device takes for a step."""
        return self.tables.machine.seconds(self.cost)


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


def search(graph: ShardGraph, machine: Machine, options: SearchOptions | None = None) -> Found:
    """The cheapest strategy, within the machine's memory limit where it has one.

    Raises ShardError where a table would be too large and no beam is allowed, and where nothing fits the memory limit.
    """
    options = options or SearchOptions()
    started = time.perf_counter()
    tables = build_tables(graph, machine, original=options.original)
    return search_tables(tables, options, seconds=time.perf_counter() - started)


def search_tables(tables: Tables, options: SearchOptions | None = None, *, seconds: float = 0.0) -> Found:
    """Searches as `search` does, in tables that are there already, and took so many `seconds`."""
    options = options or SearchOptions()
    if options.beam is not None and options.beam < 1:
        raise ShardError(f"a beam of {options.beam} states; give 1 or more (--beam)")
    built = time.perf_counter()
    joined = tied(tables)
    found = within_memory(joined.tables, partial(_cheapest, options=options), joined.held)
    choice = joined.choice(found.choice)
    times = {"tables": seconds, "search": time.perf_counter() - built}
    return Found(tables, choice, found.cost, found.bound, found.plan, bytes_of(tables, choice), times)


def _cheapest(tables: Tables, options: SearchOptions) -> Answer:
    reduced, plan = tables, _plan(tables, options)
    for sweep in range(_SWEEPS):
        too_large = _bytes(plan) > options.table_bytes
        wanted = too_large or (not sweep and plan.operations > _WORTH_PRUNING) if options.prune is None else options.prune and not sweep
        if not wanted:
            break
        before, reduced = sum(reduced.sizes), pruned(reduced)
        if sum(reduced.sizes) == before:
            break
        plan = _plan(reduced, options)
    if _bytes(plan) > options.table_bytes:
        if options.beam is None:
            raise ShardError(_too_large(reduced, plan, options))
        plan = _plan(reduced, options, options.table_bytes / 8 / _BEAM_PART)
    found = choose(reduced, eliminate(reduced, plan), options.beam or 1)
    return found if reduced is tables else replace(found, choice=tuple(tables.choice(reduced.strategy(found.choice))))


def _plan(tables: Tables, options: SearchOptions, most_numbers: float = float("inf")) -> Elimination:
    order = elimination_order(options.order, tables.graph.neighbours, tables.sizes)
    return plan_elimination(tables, order, most_numbers)


def _bytes(plan: Elimination) -> float:
    return 8.0 * plan.largest


def _too_large(tables: Tables, plan: Elimination, options: SearchOptions) -> str:
    step = max(plan.steps, key=lambda s: max(p.size for p in s.parts))
    part = max(step.parts, key=lambda p: p.size)
    others = "" if options.order == "generate_seq" else "; --order=generate_seq may need less"
    return (
        f"the table for {tables.graph.nodes[step.node].name} would be over {len(part.result.nodes)} layers and take "
        f"{_bytes(plan) / 2**20:.3g} MiB, and {options.table_bytes / 2**20:.4g} MiB are allowed; "
        f"raise --table_memory, or let --beam=100 find a strategy, with a bound of what it may lose{others}"
    )
