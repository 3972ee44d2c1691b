"""The shard plan: how every layer is split, and what that costs, in a file that others can read."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from baechi_ext.errors import PlanError
from baechi_ext.ir.checked import Count, Number, Signed, checked
from baechi_ext.ir.files import SCHEMA_VERSION
from baechi_ext.ir.made_by import Saved, load_as
from baechi_ext.ir.numbers import require_finite
from baechi_ext.shard.analysis import layer_costs, other_configurations
from baechi_ext.shard.search import Found, Status
from baechi_ext.shard.tables import node_bytes

KIND = "baechi shard plan"


@dataclass(frozen=True, slots=True)
class OtherSplit:
    """A layer split in another way, and all others as they are, but for those tied to it: by how much the step would be longer, and a
    device hold more."""

    splits: dict[str, Count]
    change_us: Signed
    held_change_bytes: Signed


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """A layer's loops: how long each is, by name, and into how many parts those are split that are.

    `costs_us`, what it adds to the step, by kind, `held_bytes`, on a device, and `others`, the cheapest other splits, are empty where a
    plan by another program does not say them.
    """

    op: str
    sizes: dict[str, Count]
    splits: dict[str, Count]
    costs_us: dict[str, Signed] = field(default_factory=dict)
    held_bytes: Number = 0.0
    others: tuple[OtherSplit, ...] = ()

    @property
    def devices(self) -> int:
        return prod(self.splits.values())

    @property
    def total_us(self) -> float:
        """The microseconds that it adds to the step."""
        return sum(self.costs_us.values())

    def to_json(self) -> dict[str, Any]:
        plain = {"op": self.op, "sizes": self.sizes, "splits": self.splits}
        if not self.costs_us and not self.others:
            return plain
        others = [asdict(other) for other in self.others]
        return {**plain, "costs_us": self.costs_us, "held_bytes": self.held_bytes, "others": others}


@dataclass(frozen=True, kw_only=True)
class ShardPlan(Saved):
    """The splits of a graph's layers over `devices`. `predicted_step_us` is a device's; costs are operations of a device.

    `status` is `optimal` (no strategy of the space is cheaper) or `feasible` (none can be cheaper than `lower_bound_flop`).
    """

    graph: str
    batch: Count
    devices: Count
    status: Status
    cost_model: str
    cost_flop: Number
    lower_bound_flop: Number
    predicted_step_us: Number
    held_bytes: Number
    shard: dict[str, LayerSplit]
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, layer in self.shard.items():
            for axis, parts in layer.splits.items():
                length = layer.sizes.get(axis)
                if length is None or length % parts:
                    raise PlanError(f"{name} splits its {axis!r} of {length} into {parts} parts; give a divisor of an axis it has")
            if layer.devices > self.devices:
                raise PlanError(f"{name} is split over {layer.devices} devices of {self.devices}")

    @classmethod
    def of(cls, found: Found, batch: int, cost_model: str, options: dict[str, Any]) -> "ShardPlan":
        """The plan that a search found, with the costs of its tables."""
        tables, layers = found.tables, {}
        us = tables.machine.seconds(1e6)
        costs, others = layer_costs(tables, found.choice), other_configurations(tables, found.choice)
        for v, (node, configuration, cost, ways) in enumerate(zip(tables.graph.nodes, found.strategy, costs, others, strict=True)):
            c = found.choice[v]
            layers[node.name] = LayerSplit(
                node.op,
                {axis.name: axis.size for axis in node.axes},
                node.splits(configuration),
                {kind: part * us for kind, part in cost.parts.items()},
                float(node_bytes(node, tables.spaces[v][c : c + 1], tables.machine)[0]),
                tuple(OtherSplit(node.splits(way.configuration), way.change * us, way.held_change_bytes) for way in ways),
            )
        return cls(
            graph=tables.graph.name,
            batch=batch,
            devices=tables.machine.devices,
            status=found.status,
            cost_model=cost_model,
            cost_flop=found.cost,
            lower_bound_flop=found.lower_bound,
            predicted_step_us=found.step_seconds * 1e6,
            held_bytes=found.held_bytes,
            shard=layers,
            options=options,
        )

    def predicted_as(self, step_us: float, costs_us: Mapping[str, Mapping[str, float]]) -> "ShardPlan":
        """The plan with another prediction of the step, and of what each layer adds to it, by kind."""
        layers = {name: replace(layer, costs_us=dict(costs_us.get(name, {}))) for name, layer in self.shard.items()}
        return replace(self, predicted_step_us=step_us, shard=layers)

    def to_json(self) -> dict[str, Any]:
        """The file's object."""
        layers = {name: layer.to_json() for name, layer in self.shard.items()}
        plain = {name: getattr(self, name) for name in _FIELDS}
        return {"schema_version": SCHEMA_VERSION, "kind": KIND, **plain, "options": self.options, "shard": layers}

    @classmethod
    def load(cls, path: str | Path) -> "ShardPlan":
        """The plan in a file. Raises FileError where it can't be read, PlanError where it is not a shard plan or breaks a rule."""
        return load_as(path, "shard plan", cls.from_json)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "ShardPlan":
        """The plan of a file's object. Raises PlanError where it is none."""
        if value.get("kind") != KIND:
            raise PlanError(f"this is not a shard plan: its kind is {value.get('kind')!r}, not {KIND!r}; write one with baechi pase --out")
        layers = value.get("shard")
        if not isinstance(layers, dict) or not all(isinstance(layer, dict) for layer in layers.values()):
            raise PlanError("shard is not an object of layers; write the plan again with baechi pase --out")
        plan = checked({**value, "shard": {}}, cls, "shard plan", PlanError)
        require_finite(plan.options, "the shard plan's options", PlanError)
        named = ((name, f"layer {name} of the shard plan", layer) for name, layer in layers.items())
        return replace(plan, shard={name: checked({"op": "", **layer}, LayerSplit, what, PlanError) for name, what, layer in named})


_FIELDS = (
    "graph", "status", "cost_model", "batch", "devices", "cost_flop", "lower_bound_flop", "predicted_step_us", "held_bytes",
)  # fmt: skip
