"""Differences between two plans of one graph: which ops moved, what else changed, and which of that makes the step longer or shorter."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from baechi_ext.errors import MismatchError
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.ir.plan import Plan
from baechi_ext.simulate.simulator import Simulator
from baechi_ext.simulate.timeline import Timeline


@dataclass(frozen=True, slots=True)
class MovedModule:
    """The moved ops of one module (of one kind, where the graph knows no modules) between two devices, of its `of_ops` in all."""

    name: str
    source: str
    target: str
    ops: int
    of_ops: int
    compute_us: float
    persistent_bytes: int | float


@dataclass(frozen=True, slots=True)
class Crossed:
    """The step with the placement of one plan and the priorities of the other: which of both the difference comes from."""

    placement_after_us: float
    priority_after_us: float


@dataclass(frozen=True)
class PlanDiff:
    """Two plans as their simulated steps, each on its own cluster.

    Devices of equal names are the same; where the clusters share no name and have equally many, those of equal positions are.
    """

    before: Timeline
    after: Timeline
    moved: tuple[int, ...]
    reordered: tuple[int, ...]
    """The fewest ops of which one has to change the place in the order of their device to get the one order of starts from the other."""
    recosted: tuple[int, ...]
    """Ops whose costs are not the same in both plans, where groups of devices split them in other ways."""
    priorities: tuple[bool, bool]
    """One entry per plan: True if it has any."""
    ranks_differ: int | None
    """Number of ops whose rank by priority differs; None where not both plans have priorities."""
    cluster_changes: tuple[str, ...]
    crossed: Crossed | None
    """None where the clusters, or costs, differ."""
    renamed: tuple[int, ...] | None
    """Which device takes each one's place if the second plan's devices are renamed so that fewer ops move; None where that is none, or
    where devices and links are not all alike. Then `moved_renamed` ops still move."""
    moved_renamed: int

    @property
    def is_empty(self) -> bool:
        """True if both plans do the same on the same devices."""
        return not (self.moved or self.reordered or self.recosted or self.cluster_changes)

    @property
    def graph(self) -> OpGraph:
        """The first plan's; the second's has the same ops."""
        return self.before.graph

    @property
    def moved_us(self) -> float:
        return sum(self.graph.ops[v].compute_us for v in self.moved)

    @property
    def moved_bytes(self) -> int | float:
        return sum(self.graph.ops[v].persistent_bytes for v in self.moved)

    @cached_property
    def modules(self) -> tuple[MovedModule, ...]:
        """The moved ops by module and devices, most compute first."""
        ops, moves = self.graph.ops, defaultdict[tuple[str, str, str], list[int]](list)
        for v in self.moved:
            moves[_module_of(self.graph, v), _device(self.before, v), _device(self.after, v)].append(v)
        size = Counter(_module_of(self.graph, v) for v in range(len(ops)))
        found = [
            MovedModule(*ends, len(of), size[ends[0]], sum(ops[v].compute_us for v in of), sum(ops[v].persistent_bytes for v in of))
            for ends, of in moves.items()
        ]
        return tuple(sorted(found, key=lambda module: -module.compute_us))

    def to_json(self) -> dict[str, Any]:
        """The output of `baechi diff --json` (docs/files.md)."""
        ids = self.graph.ops
        return {
            "same": self.is_empty,
            "before": _side_to_json(self.before),
            "after": _side_to_json(self.after),
            "moved": [{"op": ids[v].id, "source": _device(self.before, v), "target": _device(self.after, v)} for v in self.moved],
            "moved_us": self.moved_us,
            "moved_bytes": self.moved_bytes,
            "modules": [asdict(module) for module in self.modules],
            "reordered": [ids[v].id for v in self.reordered],
            "recosted": [ids[v].id for v in self.recosted],
            "priorities": list(self.priorities),
            "ranks_differ": self.ranks_differ,
            "cluster_changes": list(self.cluster_changes),
            "crossed": None if self.crossed is None else asdict(self.crossed),
            "renamed": None if self.renamed is None else {"devices": list(self.renamed), "moved": self.moved_renamed},
        }


def diff_plans(before: Plan, after: Plan) -> PlanDiff:
    """The difference of two plans. Raises MismatchError where they are of different graphs."""
    if [op.id for op in before.graph.ops] != [op.id for op in after.graph.ops]:
        raise MismatchError("the two plans are of different graphs; give two plans of one graph")
    first, second = (Simulator(plan.graph, plan.cluster).run(plan.placement, plan.priority) for plan in (before, after))
    same_cluster, partner = before.cluster == after.cluster, partners(before.cluster, after.cluster)
    moved, recosted = tuple(v for v, d in enumerate(second.placement) if partner.get(d) != first.placement[v]), _recosted(before, after)
    renamed = _renamed(before, after) if same_cluster and moved else None
    crossed = None
    if same_cluster and not recosted:
        simulator, mixed = Simulator(before.graph, before.cluster), ((after, before), (before, after))
        crossed = Crossed(*(simulator.evaluate(plan.placement, order.priority)[0] for plan, order in mixed))
    return PlanDiff(
        before=first,
        after=second,
        moved=moved,
        reordered=_reordered(first, second, set(moved)),
        recosted=recosted,
        priorities=(before.priority is not None, after.priority is not None),
        ranks_differ=_ranks_differ(before.priority, after.priority),
        cluster_changes=_cluster_changes(before.cluster, after.cluster, partner),
        crossed=crossed,
        renamed=renamed and renamed[0],
        moved_renamed=renamed[1] if renamed else len(moved),
    )


def _side_to_json(timeline: Timeline) -> dict[str, Any]:
    return {**timeline.to_json(), "devices": [device.name for device in timeline.cluster.devices]}


def _device(timeline: Timeline, v: int) -> str:
    return timeline.cluster.devices[timeline.placement[v]].name


def _module_of(graph: OpGraph, v: int) -> str:
    op = graph.ops[v]
    return op.op if op.module is None else op.module


def partners(before: Cluster, after: Cluster) -> dict[int, int]:
    """Device of the second cluster -> the same one in the first."""
    names = {device.name: d for d, device in enumerate(before.devices)}
    shared = {d: names[device.name] for d, device in enumerate(after.devices) if device.name in names}
    if shared or len(before) != len(after):
        return shared
    return {d: d for d in range(len(after))}


def _cluster_changes(before: Cluster, after: Cluster, partner: Mapping[int, int]) -> tuple[str, ...]:
    """A sentence each."""
    gone, found = set(range(len(before))) - set(partner.values()), []
    found += [f"device {before.devices[d].name!r} is gone" for d in sorted(gone)]
    for d, device in enumerate(after.devices):
        old = before.devices[partner[d]] if d in partner else None
        if old is None:
            found.append(f"device {device.name!r} is new")
            continue
        if old.name != device.name:
            found.append(f"device {old.name!r} is called {device.name!r}")
        if old.speed != device.speed:
            found.append(f"the speed of {device.name!r} is {device.speed:g}, was {old.speed:g}")
        if old.memory_bytes != device.memory_bytes:
            limits = ["unlimited" if x.memory_bytes is None else f"{x.memory_bytes:.0f} bytes" for x in (device, old)]
            found.append(f"the memory of {device.name!r} is {limits[0]}, was {limits[1]}")
    links = [(i, j) for i in partner for j in partner if i != j]
    changed = [(i, j) for i, j in links if after.link(i, j) != before.link(partner[i], partner[j])]
    if changed:
        i, j = changed[0]
        new, old_link = after.link(i, j), before.link(partner[i], partner[j])
        example = f"{after.devices[i].name!r} -> {after.devices[j].name!r}: {new.to_json()}, was {old_link.to_json()}"
        found.append(f"{len(changed)} of {len(links)} links differ, such as {example}")
    if before.parallel_transfers != after.parallel_transfers:
        found.append(f"transfers of one device are {'' if after.parallel_transfers else 'not '}parallel now")
    return tuple(found)


def _reordered(before: Timeline, after: Timeline, moved: set[int]) -> tuple[int, ...]:
    """See `PlanDiff.reordered`: what is in no longest common subsequence of each device's orders of starts."""
    found: list[int] = []
    for order in before.device_order():
        stayed = [v for v in order if v not in moved]
        kept = _longest_increasing([after.rank[v] for v in stayed])
        found += [v for i, v in enumerate(stayed) if i not in kept]
    return tuple(sorted(found))


def _recosted(before: Plan, after: Plan) -> tuple[int, ...]:
    def costs(graph: OpGraph, v: int) -> tuple[object, ...]:
        return graph.ops[v], [graph.tensors[t].bytes for t in graph.outputs[v]]

    return tuple(v for v in range(len(before.graph)) if costs(before.graph, v) != costs(after.graph, v))


def _longest_increasing(values: Sequence[int]) -> set[int]:
    """The positions of a longest increasing subsequence (Schensted, Canadian Journal of Mathematics 13, 1961)."""
    tails: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for i, value in enumerate(values):
        length = bisect_left(tails, value)
        before.append(ends[length - 1] if length else -1)
        tails[length : length + 1] = [value]
        ends[length : length + 1] = [i]
    found, i = set(), ends[-1] if ends else -1
    while i >= 0:
        found.add(i)
        i = before[i]
    return found


def _ranks_differ(before: Sequence[float] | None, after: Sequence[float] | None) -> int | None:
    if before is None or after is None:
        return None
    ranks = [{value: i for i, value in enumerate(sorted(set(priority)))} for priority in (before, after)]
    return sum(ranks[0][a] != ranks[1][b] for a, b in zip(before, after, strict=True))


def _renamed(before: Plan, after: Plan) -> tuple[tuple[int, ...], int] | None:
    """See `PlanDiff.renamed`; devices that share most compute are taken for the same, the largest such pair first."""
    cluster = before.cluster
    if cluster.pairs or len({(device.speed, device.memory_bytes) for device in cluster.devices}) > 1:
        return None
    shared: defaultdict[tuple[int, int], float] = defaultdict(float)
    for op, source, target in zip(before.graph.ops, before.placement, after.placement, strict=True):
        shared[target, source] += op.compute_us
    names: dict[int, int] = {}
    for target, source in sorted(shared, key=lambda pair: -shared[pair]):
        if target not in names and source not in names.values():
            names[target] = source
    left = [d for d in range(len(cluster)) if d not in names.values()]
    renamed = tuple(names[d] if d in names else left.pop(0) for d in range(len(cluster)))
    still, now = (
        sum(of[d] != source for source, d in zip(before.placement, after.placement, strict=True)) for of in (renamed, range(len(cluster)))
    )
    return (renamed, still) if still < now else None
