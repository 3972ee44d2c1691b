"""Placement and sharding chosen together, by predicted step.

For each size of groups that divides the number of devices: PaSE splits every layer over a group (times are the ops', messages the links'),
a placer puts the ops, a device's part of them, on the groups, and the simulator says what that takes. Groups of one are a plain
placement, one group is pure sharding; so the best of all is never slower than either.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

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
from baechi_ext.place.common import PlanResult
from baechi_ext.place.effort import clock_seconds
from baechi_ext.shard.graph import ShardGraph
from baechi_ext.shard.search import SearchOptions, search_tables, tied
from baechi_ext.shard.tables import Tables, build_tables

Placer = Callable[[OpGraph, Cluster], PlanResult]
"""Places a costed graph. Raises InfeasibleError where it finds no plan."""
_ROUNDING = 1e-9


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
    interrupted = False
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
        if interrupted := found.found.interrupted:
            break
    if best is None:
        why = "; ".join(f"groups of {size}: {refusal}" for size, refusal in steps)
        raise InfeasibleError(f"hybrid found no plan: {why}", status="unknown") from refusals[0]
    return replace(_concluded(problem, best, steps, clock_seconds() - started, pinned=pinned), interrupted=interrupted)


def _grouped(problem: _Problem, groups: Groups) -> _Grouped:
    """The best plan found on these groups. Raises InfeasibleError where none fits, ShardError where nothing can be searched."""
    timed = problem.sharding.timed(problem.graph)
    tables = _tables(problem, groups, timed)
    refused: Exception | None = None
    for choice in _strategies(tables, len(groups)):
        try:
            return _placed(problem, groups, tables, choice)
        except InfeasibleError as e:
            refused = e
    raise refused or ShardError("there is no strategy")


def _tables(problem: _Problem, groups: Groups, timed: ShardGraph) -> Tables:
    """The costs in a group: of the slowest links and the least memory of any, in operations of the fastest."""
    speed = max(min(problem.cluster.devices[d].speed for d in group) for group in groups)
    link = slowest([inner_link(problem.cluster, group) for group in groups])
    memory = min((d.memory_bytes for d in problem.cluster.devices if d.memory_bytes is not None), default=None)
    return problem.sharding.runnable(build_tables(timed, machine_of(len(groups[0]), link, speed, memory)))


def _strategies(tables: Tables, groups: int) -> Iterator[tuple[int, ...]]:
    """The cheapest strategy; then, as long as those before do not fit, ones that hold less."""
    memory = tables.machine.memory_bytes
    free = replace(tables, machine=replace(tables.machine, memory_bytes=None))
    yield _cheapest(free)
    if memory is None:
        return
    with contextlib.suppress(ShardError):  # all that is written counts as held there, which the simulator knows better
        yield _cheapest(replace(free, machine=replace(free.machine, memory_bytes=memory * groups)))
    joined = tied(free)
    yield joined.choice([int(held.argmin()) for held in joined.held()])


def _cheapest(tables: Tables) -> tuple[int, ...]:
    return search_tables(tables, SearchOptions(beam=1)).choice


def _placed(problem: _Problem, groups: Groups, tables: Tables, choice: Sequence[int]) -> _Grouped:
    """The plan of what a strategy makes of the graph. Raises InfeasibleError where it fits nowhere."""
    shard = tuple(op_splits(problem.graph, problem.sharding, tables, choice))
    graph = with_colocation(sharded_graph(problem.graph, shard), problem.together)
    return _Grouped(problem.further(graph, group_cluster(problem.cluster, groups)), groups, shard)


def _concluded(
    problem: _Problem, best: _Grouped, steps: Sequence[tuple[int, float | str]], seconds: float, *, pinned: bool
) -> HybridResult:
    graph, cluster, found = problem.graph, problem.cluster, best.found
    bound = sum(op.compute_us for op in graph.ops) / sum(device.speed for device in cluster.devices)
    if pinned or len(cluster) == 1:  # there are no larger groups
        bound = max(bound, found.plan.lower_bound_us)
    status = "optimal" if found.predicted_step_us <= bound * (1 + _ROUNDING) else "feasible"
    about = {"method": METHOD, "status": status, "lower_bound_us": bound, "placement_seconds": seconds}
    values = {f.name: getattr(found.plan, f.name) for f in fields(Plan)} | {"graph": graph, "cluster": cluster, **about}
    plan: Plan = Plan(**values) if not best.groups else HybridPlan(**(values | best.on_devices()), groups=best.groups, shard=best.shard)
    result = HybridResult(plan, found.trial, notes=found.notes, untried=found.untried, steps_us=tuple(steps))
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
