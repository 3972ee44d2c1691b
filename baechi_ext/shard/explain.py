"""Why a sharded step takes what it does, and what two shard plans differ in: from the costs that plans carry."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from baechi_ext.errors import MismatchError, OptionError, PlanError
from baechi_ext.shard.analysis import MOVED
from baechi_ext.shard.plan import LayerSplit, OtherSplit, ShardPlan

COMPUTE, EXECUTOR, MESSAGES, UPDATE = "compute", "executor", "messages", "update"
"""The parts of a step. Messages are all kinds of cost but the others, less what goes on of them while a layer computes; `executor` is, in
measured plans, what running a call adds to it."""
PARTS = (COMPUTE, EXECUTOR, MESSAGES, UPDATE)
FORECAST_KINDS = {"calls_us": COMPUTE, "executor_us": EXECUTOR, "update_us": UPDATE, "moves_us": MOVED, "gradients_us": "weight gradient"}
"""The kinds of cost that the parts of a step predicted from measured pieces are called."""
_SAME = 1e-9
"""Changes of the step by less than this part of it are none."""


def part_of(kind: str) -> str:
    """The part of the step that a kind of cost is of."""
    return kind if kind in PARTS else MESSAGES


def parts_us(costs_us: Mapping[str, float]) -> dict[str, float]:
    """Costs by kind, added up to the parts of the step."""
    sums = dict.fromkeys(PARTS, 0.0)
    for kind, us in costs_us.items():
        sums[part_of(kind)] += us
    return sums


@dataclass(frozen=True)
class ShardExplanation:
    """The parts of the predicted step of a plan."""

    plan: ShardPlan

    @cached_property
    def kinds_us(self) -> dict[str, float]:
        """The microseconds of each kind of cost, the largest first."""
        sums: Counter[str] = Counter()
        for layer in self.plan.shard.values():
            sums.update(layer.costs_us)
        return dict(sums.most_common())

    @cached_property
    def parts_us(self) -> dict[str, float]:
        """The same, added up to the parts of the step."""
        return parts_us(self.kinds_us)

    @property
    def shown_us(self) -> dict[str, float]:
        """The parts that are more than nothing."""
        return {part: us for part, us in self.parts_us.items() if us > 0}

    @property
    def bound_by(self) -> str:
        """The largest of these."""
        return max(self.parts_us, key=lambda part: self.parts_us[part])

    @cached_property
    def costliest(self) -> list[str]:
        """All layers, the costliest first."""
        return sorted(self.plan.shard, key=lambda name: -self.plan.shard[name].total_us)

    @cached_property
    def talkative(self) -> list[str]:
        """Layers that wait for messages, those whose messages take longest first."""
        sent = {name: parts_us(layer.costs_us)[MESSAGES] for name, layer in self.plan.shard.items()}
        return sorted((name for name in sent if sent[name] > _SAME * self.plan.predicted_step_us), key=lambda name: -sent[name])

    @property
    def unsplit(self) -> list[str]:
        """Layers that every device computes whole, though they cost something and could be split."""
        return [name for name, layer in self.plan.shard.items() if not layer.splits and layer.others and layer.total_us > 0]

    def to_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "step_us": plan.predicted_step_us,
            "status": plan.status,
            "devices": plan.devices,
            "held_bytes": plan.held_bytes,
            "bound_by": self.bound_by,
            "parts_us": self.parts_us,
            "kinds_us": self.kinds_us,
            "layers": [{"name": name, **plan.shard[name].to_json(), "total_us": plan.shard[name].total_us} for name in self.costliest],
        }


@dataclass(frozen=True)
class LayerExplanation:
    """The reasons why a layer is split as it is."""

    plan: ShardPlan
    name: str

    @property
    def layer(self) -> LayerSplit:
        return self.plan.shard[self.name]

    @property
    def best(self) -> OtherSplit | None:
        """The other split that is cheapest, all other layers as they are, but for those tied to it."""
        return min(self.layer.others, key=lambda other: other.change_us, default=None)

    @property
    def is_cheapest(self) -> bool:
        """True if no other split would make the step shorter."""
        return self.best is None or self.best.change_us >= -_SAME * self.plan.predicted_step_us

    def to_json(self) -> dict[str, Any]:
        layer, step_us = self.layer, self.plan.predicted_step_us
        facts = {"name": self.name, **layer.to_json(), "step_us": step_us, "total_us": layer.total_us, "is_cheapest": self.is_cheapest}
        return {**facts, "others": [{**asdict(other), "step_us": step_us + other.change_us} for other in layer.others]}


def explain_shard_plan(plan: ShardPlan) -> ShardExplanation:
    """Raises PlanError for a plan that says no costs."""
    if not any(layer.costs_us for layer in plan.shard.values()):
        raise PlanError("the shard plan has no costs of its layers; write it again: baechi pase --out, or baechi train --sharding --out")
    return ShardExplanation(plan)


def explain_layer(plan: ShardPlan, name: str) -> LayerExplanation:
    """Raises OptionError for a layer that the plan does not have, PlanError for a plan that says no costs."""
    explain_shard_plan(plan)
    if name not in plan.shard:
        near = [other for other in plan.shard if name in other][:3] or list(plan.shard)[:3]
        raise OptionError(f"the shard plan has no layer {name!r}; layers are called as in it, such as {', '.join(near)}")
    return LayerExplanation(plan, name)


@dataclass(frozen=True)
class ShardDiff:
    """Two plans of one network."""

    before: ShardPlan
    after: ShardPlan

    @cached_property
    def changed(self) -> list[str]:
        """Layers that are split differently, those whose costs differ most first."""
        names = [name for name, layer in self.before.shard.items() if layer.splits != self.after.shard[name].splits]
        return sorted(names, key=lambda name: -abs(self.change_us(name)))

    def change_us(self, name: str) -> float:
        """The microseconds that a layer costs more after than before."""
        return self.after.shard[name].total_us - self.before.shard[name].total_us

    def to_json(self) -> dict[str, Any]:
        sides = {"before": self.before, "after": self.after}
        facts = {
            side: {
                "step_us": plan.predicted_step_us,
                "held_bytes": plan.held_bytes,
                "devices": plan.devices,
                "parts_us": ShardExplanation(plan).parts_us,
            }
            for side, plan in sides.items()
        }
        layers = [
            {"name": name, "change_us": self.change_us(name), **{side: plan.shard[name].splits for side, plan in sides.items()}}
            for name in self.changed
        ]
        return {"same": not self.changed, **facts, "changed": layers, "layers": len(self.before.shard)}


def diff_shard_plans(before: ShardPlan, after: ShardPlan) -> ShardDiff:
    """Raises MismatchError for plans of two networks."""
    sizes = [{name: layer.sizes for name, layer in plan.shard.items()} for plan in (before, after)]
    if sizes[0] != sizes[1]:
        name = next(n for n in (*sizes[0], *sizes[1]) if sizes[0].get(n) != sizes[1].get(n))
        raise MismatchError(f"the shard plans are of two networks: they differ in layer {name!r}; compare plans of one, of the same sizes")
    return ShardDiff(before, after)
