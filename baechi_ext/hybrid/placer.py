"""Placement and sharding chosen together, by predicted step.

For each size of groups that divides the number of devices: PaSE splits every layer over a group (times are the ops', messages the links'),
a placer puts the ops, a device's part of them, on the groups, and the simulator says what that takes. Groups of one are a plain
placement, one group is pure sharding; so the best of all is never slower than either. Then each group's layers are split again, by its own
links, knowing which tensors go to other groups, for as long as that is predicted to help.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial

from baechi_ext.errors import InfeasibleError, ShardError
from baechi_ext.group.colocation import Labels, with_colocation
from baechi_ext.hybrid import METHOD
from baechi_ext.hybrid.groups import Groups, group_cluster, group_sizes, groups_of, inner_link, slowest
from baechi_ext.hybrid.plan import HybridPlan
from baechi_ext.hybrid.sharding import Sharding, machine_of
from baechi_ext.hybrid.splits import OpSplit, op_splits, sharded_graph
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.ir.plan import Plan
from baechi_ext.place.common import PlaceOptions, PlanResult, Proposal, begin, clock_seconds, conclude
from baechi_ext.shard.graph import ShardGraph
from baechi_ext.shard.machine import Costs
from baechi_ext.shard.search import SearchOptions, search_tables, tied
from baechi_ext.shard.tables import Tables, build_tables

Placer = Callable[[OpGraph, Cluster], PlanResult]
"""Places a costed graph. Raises InfeasibleError where it finds no plan."""
ROUNDS = 2
"""So often, at most, layers are split again for a placement."""
_ROUNDING = 1e-9
_WORD_BYTES = 4


@dataclass(frozen=True)
class HybridResult(PlanResult):
    """A plan on single devices or on groups, and what every size of groups was predicted to take.

    `timeline` is that of the groups where there are groups of several devices.
    """

    steps_us: tuple[tuple[int, float | str], ...] = ()
    """(size of the groups, predicted step, or why there is none)."""

    @property
    def group_size(self) -> int:
        return self.plan.group_size if isinstance(self.plan, HybridPlan) else 1

    @property
    def splits(self) -> bool:
        return self.group_size > 1 or len(set(self.plan.placement)) > 1


@dataclass(frozen=True)
class _Problem:
    graph: OpGraph
    cluster: Cluster
    sharding: Sharding
    place: Placer
    further: Placer

    @cached_property
    def together(self) -> list[str | None]:
        """The colocation strings of ops on groups: a call is run by one group, its backward pass and the update of its weights, too."""
        labels = Labels(self.graph)
        for ops in self.sharding.ops_of:
            for op in ops[1:]:
                labels.join(ops[0], op)
        return [op.colocation for op in labels.relabelled().ops]


@dataclass(frozen=True)
class _Grouped:
    """A strategy for groups, and the plan of what it makes of the graph; no groups where that is on single devices."""

    found: PlanResult
    groups: Groups = ()
    shard: tuple[OpSplit, ...] = ()
    choice: tuple[int, ...] = ()

    @property
    def step_us(self) -> float:
        return self.found.predicted_step_us

    def on_devices(self) -> dict[str, tuple[float, ...]]:
        """The fields of the groups' plan that are by device: the first of a group stands for it."""
        peaks = {d: peak for group, peak in zip(self.groups, self.found.plan.peak_memory_bytes, strict=True) for d in group}
        placement = tuple(self.groups[i][0] for i in self.found.plan.placement)
        return {"placement": placement, "peak_memory_bytes": tuple(peaks[d] for d in sorted(peaks))}


def hybrid(graph: OpGraph, cluster: Cluster, sharding: Sharding, place: Placer, further: Placer | None = None) -> HybridResult:
    """The plan of the least predicted step among all sizes of groups. `place` places the graph on devices, `further` (by default the same)
    what is left of it on groups.

    Where ops are pinned to devices there are groups of one only. Raises InfeasibleError where nothing fits, ShardError where the sharding
    is of another graph.
    """
    if len(sharding.node_of) != len(graph):
        raise ShardError(f"the sharding is of {len(sharding.node_of)} ops and the graph has {len(graph)}; make it for this graph")
    started = clock_seconds()
    problem = _Problem(graph, cluster, sharding, place, further or place)
    pinned = any(op.pin is not None for op in graph.ops)
    best: _Grouped | None = None
    steps: list[tuple[int, float | str]] = []
    refusals: list[Exception] = []
    for size in group_sizes(cluster)[: 1 if pinned else None]:
        try:
            found = _Grouped(place(graph, cluster)) if size == 1 else _grouped(problem, groups_of(cluster, size))
        except (InfeasibleError, ShardError) as e:
            steps.append((size, str(e)))
            refusals.append(e)
            continue
        steps.append((size, found.step_us))
        if best is None or found.step_us < best.step_us * (1 - _ROUNDING):
            best = found
        if found.found.interrupted:
            break
    if best is None:
        why = "; ".join(f"groups of {size}: {refusal}" for size, refusal in steps)
        raise InfeasibleError(f"hybrid found no plan: {why}", status="unknown") from refusals[0]
    return _concluded(problem, best, steps, clock_seconds() - started, pinned=pinned)


def _grouped(problem: _Problem, groups: Groups) -> _Grouped:
    """The best plan found on these groups. Raises InfeasibleError where none fits, ShardError where nothing can be searched."""
    timed = problem.sharding.timed(problem.graph)
    tables = _tables(problem, groups, timed)
    refused: Exception | None = None
    for choice in _strategies(tables, len(groups)):
        try:
            best = _placed(problem, groups, tables, choice, [0] * len(problem.graph))
        except InfeasibleError as e:
            refused = e
            continue
        return _alternated(problem, best, tables)
    raise refused or ShardError("there is no strategy")


def _tables(problem: _Problem, groups: Groups, timed: ShardGraph) -> list[Tables]:
    """The costs in each group; groups of equal links share theirs. The first are those of the slowest links."""
    cluster = group_cluster(problem.cluster, groups)
    speed = max(device.speed for device in cluster.devices)
    links = [inner_link(problem.cluster, group) for group in groups]
    memory = min((d.memory_bytes for d in cluster.devices if d.memory_bytes is not None), default=None)
    made = {}
    for link in dict.fromkeys((slowest(links), *links)):
        made[link] = problem.sharding.runnable(build_tables(timed, machine_of(len(groups[0]), link, speed, memory)))
    return [made[link] for link in (slowest(links), *links)]


def _strategies(tables: Sequence[Tables], groups: int) -> Iterator[tuple[int, ...]]:
    """The cheapest strategy for the slowest group; then, as long as those before do not fit, ones that hold less."""
    memory = tables[0].machine.memory_bytes
    free = replace(tables[0], machine=replace(tables[0].machine, memory_bytes=None))
    yield _cheapest(free)
    if memory is None:
        return
    with contextlib.suppress(ShardError):  # all that is written counts as held there, which the simulator knows better
        yield _cheapest(replace(free, machine=replace(free.machine, memory_bytes=memory * groups)))
    joined = tied(free)
    yield joined.choice([int(held.argmin()) for held in joined.held()])


def _cheapest(tables: Tables) -> tuple[int, ...]:
    return search_tables(tables, SearchOptions(beam=1)).choice


def _placed(problem: _Problem, groups: Groups, tables: Sequence[Tables], choice: Sequence[int], homes: Sequence[int]) -> _Grouped:
    """The plan of what a strategy makes of the graph: op v's messages are costed by `tables[homes[v]]` to place it, then by its group's."""
    shard = tuple(op_splits(problem.graph, problem.sharding, [tables[home] for home in homes], choice))
    graph = with_colocation(sharded_graph(problem.graph, shard), problem.together)
    found = problem.further(graph, group_cluster(problem.cluster, groups))
    placed = _Grouped(found, groups, shard, tuple(choice))
    if all(tables[home] is tables[1 + p] for home, p in zip(homes, found.plan.placement, strict=True)):
        return placed
    return _judged(problem, placed, tables, choice)


def _judged(problem: _Problem, placed: _Grouped, tables: Sequence[Tables], choice: Sequence[int]) -> _Grouped:
    """The same placement with this strategy. Raises InfeasibleError where it does not fit so."""
    old = placed.found
    shard = tuple(op_splits(problem.graph, problem.sharding, [tables[1 + p] for p in old.plan.placement], choice))
    task = begin(METHOD, sharded_graph(problem.graph, shard), group_cluster(problem.cluster, placed.groups), PlaceOptions())
    new = conclude(task, [Proposal(old.plan.placement, (old.plan.priority,))], repairs=False)
    new = replace(new, plan=replace(new.plan, options=old.plan.options), interrupted=old.interrupted, notes=old.notes)
    return _Grouped(new, placed.groups, shard, tuple(choice))


def _alternated(problem: _Problem, best: _Grouped, tables: Sequence[Tables]) -> _Grouped:
    """The plan, or a better one: layers split again where they were placed, and what comes of it placed again, or left where it is."""
    if len(best.groups) == 1:
        return best
    for _ in range(ROUNDS):
        placement = best.found.plan.placement
        choice = _split_again(problem, best, tables, _homes(problem.sharding, placement))
        if choice == best.choice:
            break
        tries = []
        for attempt in (
            partial(_judged, problem, best, tables, choice),
            partial(_placed, problem, best.groups, tables, choice, [1 + p for p in placement]),
        ):
            with contextlib.suppress(InfeasibleError):
                tries.append(attempt())
        again = min(tries, key=lambda attempt: attempt.step_us, default=best)
        if again.step_us >= best.step_us * (1 - _ROUNDING):
            break
        best = again
    return best


def _homes(sharding: Sharding, placement: Sequence[int]) -> list[int]:
    """The group of each node: its first op's, or that of the node where its messages are waited for."""
    return [0 if host is None or not sharding.ops_of[host] else placement[sharding.ops_of[host][0]] for host in sharding.hosts]


def _split_again(problem: _Problem, best: _Grouped, tables: Sequence[Tables], homes: Sequence[int]) -> tuple[int, ...]:
    """The cheapest strategy of each group for itself, the others' being as they are."""
    choice = list(best.choice)
    cluster = group_cluster(problem.cluster, best.groups)
    for home in sorted(set(homes)):
        own = [n for n, h in enumerate(homes) if h == home]
        place = {n: i for i, n in enumerate(own)}
        whole = tables[1 + home]
        costs = {n: whole.costs[n] for n in own}
        edges = []
        for e, edge in enumerate(whole.graph.edges):
            if edge.source in place and edge.target in place:
                edges.append(e)
                continue
            for n in {edge.source, edge.target} & place.keys():
                costs[n] = costs[n] + whole.edge_row(e, n, choice)
            if edge.source in place:
                us_per_byte = cluster.link(home, homes[edge.target]).us_per_byte
                costs[edge.source] = costs[edge.source] + us_per_byte * _sent_bytes(whole, edge.source, edge.output)
        part = Tables(
            _subgraph(whole.graph, place, edges),
            replace(whole.machine, memory_bytes=None),
            tuple(whole.spaces[n] for n in own),
            tuple(costs[n] for n in own),
            tuple(whole.edges[e] for e in edges),
        )
        for n, c in zip(own, _cheapest(part), strict=True):
            choice[n] = c
    return tuple(choice)


def _subgraph(graph: ShardGraph, place: Mapping[int, int], edges: Sequence[int]) -> ShardGraph:
    """Some nodes, by their new places, and edges among them; what is tied is tied as far as it is there."""
    inner = tuple(replace(edge, source=place[edge.source], target=place[edge.target]) for edge in (graph.edges[e] for e in edges))
    ties = tuple(tuple(place[n] for n in tie if n in place) for tie in graph.ties)
    return ShardGraph(graph.name, tuple(graph.nodes[n] for n in place), inner, tuple(tie for tie in ties if len(tie) > 1))


def _sent_bytes(tables: Tables, n: int, output: int) -> Costs:
    """Bytes of a node's result that a device sends to another group, for each configuration."""
    tensor = tables.graph.nodes[n].outputs[output]
    return _WORD_BYTES * tensor.words / tensor.parts(tables.spaces[n])


def _concluded(
    problem: _Problem, best: _Grouped, steps: Sequence[tuple[int, float | str]], seconds: float, *, pinned: bool
) -> HybridResult:
    graph, cluster, found = problem.graph, problem.cluster, best.found
    bound = sum(op.compute_us for op in graph.ops) / sum(device.speed for device in cluster.devices)
    status = "optimal" if found.predicted_step_us <= bound * (1 + _ROUNDING) else "feasible"
    about = {"method": METHOD, "status": status, "lower_bound_us": bound, "placement_seconds": seconds}
    values = {f.name: getattr(found.plan, f.name) for f in fields(Plan)} | {"graph": graph, "cluster": cluster, **about}
    plan: Plan = Plan(**values) if not best.groups else HybridPlan(**(values | best.on_devices()), groups=best.groups, shard=best.shard)
    result = HybridResult(plan, found.timeline, found.interrupted, found.notes, found.untried, steps_us=tuple(steps))
    return replace(result, notes=(*found.notes, *_notes(result, pinned=pinned)))


def _notes(result: HybridResult, *, pinned: bool) -> Iterator[str]:
    """Says what placing, sharding and both were predicted to take, and whether anything helped."""
    devices = len(result.plan.cluster)
    says = {1: "placement alone", devices: "sharding alone"}
    told = []
    for size, step in result.steps_us:
        told.append(f"{says.get(size, f'groups of {size}')} {step if isinstance(step, str) else f'{step:.6g} us'}")
    if devices > 1:
        yield f"predicted step by size of groups: {'; '.join(told)}"
    if pinned:
        yield "ops are pinned to devices, so no group has more than one"
    if devices > 1 and not result.splits:
        yield "neither placing nor sharding pays: nothing found is faster than one device"
