"""The search: the cheapest strategy for a graph on a machine, with the proof, or with a bound of what a cheaper one could save.

Nodes that are split alike, the calls of a layer that runs in several pieces, are searched as one: their costs are added up; a tensor
between two of them costs what it does where both have the same configuration. The minimum is that of all strategies that split them
alike; it is found sooner, since one table takes the place of many.

Within a limit of memory, bytes have a price (a Lagrange multiplier). At any price the cheapest priced strategy bounds all that fit:
cost(s) >= min(cost + price * bytes) - price * limit. The next price is where the cheapest too large strategy and the cheapest that fits
cost the same, until there is none between them. Blocks that repeat change at the same price; so the two are also mixed: one up to some
layer, and the other from there.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from baechi_ext.errors import ShardError
from baechi_ext.shard.elimination import Answer, Elimination, choose, eliminate, plan_elimination
from baechi_ext.shard.graph import Edge, ShardGraph
from baechi_ext.shard.machine import Costs, Machine
from baechi_ext.shard.order import elimination_order
from baechi_ext.shard.prune import pruned
from baechi_ext.shard.tables import EdgeTable, Tables, build_tables, bytes_of, node_bytes

Status = Literal["optimal", "feasible"]
DEFAULT_TABLE_BYTES = 128 << 20
_WORTH_PRUNING = 1e8
"""Below so many operations the search is done sooner than configurations are pruned."""
_SWEEPS = 4
"""So often, at most, configurations are pruned where tables are too large (what is left may dominate more), and each layer's is chosen
again beside the others'."""
_BEAM_PART = 8
"""With a beam, tables are kept so many times smaller than they may be: there are more of them."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """`original`: tensors move as in the original release. `table_bytes`: no table may be larger. `beam`: where one would be, search on
    with smaller tables and this many states; None: refuse.
    """

    order: str = "generate_seq"
    original: bool = False
    table_bytes: float = DEFAULT_TABLE_BYTES
    beam: int | None = None


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
    def status(self) -> Status:
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
        if _bytes(plan) <= options.table_bytes and (sweep or plan.operations <= _WORTH_PRUNING):
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
            "give more memory (--device_memory), more processors or a smaller batch"
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
