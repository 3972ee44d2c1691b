"""What a plan on groups says of the calls of the forward graph: who runs each, split how, and when."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from baechi_ext.errors import PlanError
from baechi_ext.hybrid.groups import Groups
from baechi_ext.hybrid.plan import HybridPlan
from baechi_ext.shard.graph import Node
from baechi_ext.simulate import Timeline


@dataclass(slots=True)
class PlannedCall:
    """The group that runs a call, backward and the update of its weights, too; into how many parts its loops are split, and when the first
    of its forward and of its backward ops begins, counted in ops that the simulator has started (None: it has none)."""

    group: int
    splits: Mapping[str, int] = field(default_factory=dict)
    forward: int | None = None
    backward: int | None = None

    def configuration(self, node: Node) -> tuple[int, ...]:
        """The node's configuration. Raises PlanError where it has no such loops."""
        names = [axis.name for axis in node.axes]
        unknown = [name for name in self.splits if name not in names]
        if unknown:
            raise PlanError(f"the plan splits {unknown[0]!r} of {node.name}, which has {names}; plan this model again")
        return tuple(self.splits.get(name, 1) for name in names)


@dataclass(frozen=True)
class CallPlan:
    """Ranks by group, and calls by name; a call without ops (a view) is not among them: it is run where it is read."""

    groups: Groups
    calls: Mapping[str, PlannedCall]

    @classmethod
    def of(cls, plan: HybridPlan, timeline: Timeline) -> "CallPlan":
        """The calls of a plan that is predicted to run so. Raises PlanError where ops of one call are on several groups."""
        calls: dict[str, PlannedCall] = {}
        rank = {v: i for i, v in enumerate(timeline.started)}
        for v, (op, split, group) in enumerate(zip(plan.graph.ops, plan.shard, plan.on_groups, strict=True)):
            if split.node is None:
                continue
            call = calls.setdefault(split.node, PlannedCall(group, dict(split.splits)))
            if (call.group, call.splits) != (group, split.splits):
                one = f"on group {list(plan.groups[group])}, split {dict(split.splits)}"
                other = f"on {list(plan.groups[call.group])}, split {dict(call.splits)}"
                raise PlanError(
                    f"op {op.id!r} of call {split.node!r} is {one}, and others of its ops are {other}; a call runs in one group, in one "
                    "split: plan again"
                )
            if op.phase == "forward":
                call.forward = min(rank[v], len(rank) if call.forward is None else call.forward)
            elif op.phase == "backward":
                call.backward = min(rank[v], len(rank) if call.backward is None else call.backward)
        return cls(plan.groups, calls)

    def strategy(self, nodes: Sequence[Node]) -> list[tuple[int, ...] | None]:
        """The configuration of each node; None where the plan does not say it."""
        return [self.calls[node.name].configuration(node) if node.name in self.calls else None for node in nodes]

    def to_json(self) -> dict[str, Any]:
        """For other processes."""
        return {"groups": [list(group) for group in self.groups], "calls": {name: asdict(call) for name, call in self.calls.items()}}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "CallPlan":
        return cls(tuple(map(tuple, value["groups"])), {name: PlannedCall(**call) for name, call in value["calls"].items()})
