"""The shard plan: how every layer is split, in a file that others can read."""

from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from baechi_ext.errors import PlanError
from baechi_ext.ir.files import SCHEMA_VERSION, read_json, write_json
from baechi_ext.ir.numbers import as_number
from baechi_ext.shard.search import Found

KIND = "baechi shard plan"


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """A layer's loops: how long each is, by name, and into how many parts those are split that are."""

    op: str
    sizes: dict[str, int]
    splits: dict[str, int]

    @property
    def devices(self) -> int:
        return prod(self.splits.values())


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """How the layers of a graph are split over `devices`. `predicted_step_us` is a device's; costs are operations of a device.

    `status` is `optimal` (no strategy of the space is cheaper) or `feasible` (none can be cheaper than `lower_bound_flop`).
    """

    graph: str
    batch: int
    devices: int
    status: str
    cost_model: str
    cost_flop: float
    lower_bound_flop: float
    predicted_step_us: float
    held_bytes: float
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
        """The plan that a search found."""
        tables = found.tables
        layers = {}
        for node, configuration in zip(tables.graph.nodes, found.strategy, strict=True):
            names = [axis.name for axis in node.axes]
            splits = {name: parts for name, parts in zip(names, configuration, strict=True) if parts > 1}
            layers[node.name] = LayerSplit(node.op, dict(zip(names, node.sizes, strict=True)), splits)
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

    def to_json(self) -> dict[str, Any]:
        """The file's object."""
        layers = {name: {"op": layer.op, "sizes": layer.sizes, "splits": layer.splits} for name, layer in self.shard.items()}
        plain = {name: getattr(self, name) for name in _FIELDS}
        return {"schema_version": SCHEMA_VERSION, "kind": KIND, **plain, "options": self.options, "shard": layers}

    def save(self, path: str | Path) -> None:
        """Writes the file. Raises FileError where it can't be written."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> "ShardPlan":
        """The plan in a file. Raises FileError where it can't be read, PlanError where it is no shard plan or breaks a rule."""
        return cls.from_json(read_json(path, "shard plan"))

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "ShardPlan":
        """The plan of a file's object. Raises PlanError where it is none."""
        if value.get("kind") != KIND:
            raise PlanError(f"this is no shard plan: its kind is {value.get('kind')!r}, not {KIND!r}; write one with baechi pase --out")
        missing = [name for name in (*_FIELDS, "shard") if name not in value]
        if missing:
            raise PlanError(f"the shard plan lacks {', '.join(missing)}; write it again with baechi pase --out")
        for name in _FIELDS[4:]:
            as_number(value[name], f"{name} of the shard plan", PlanError)
        if not isinstance(value["shard"], dict):
            raise PlanError("shard is not an object of layers; write the plan again with baechi pase --out")
        layers = {name: _layer_of(name, layer) for name, layer in value["shard"].items()}
        whole = {name: _whole(value[name], name) for name in ("batch", "devices")}
        plain = {name: value[name] for name in _FIELDS if name not in whole}
        return cls(**plain, **whole, shard=layers, options=value.get("options", {}))


_FIELDS = (
    "graph", "status", "cost_model", "batch", "devices", "cost_flop", "lower_bound_flop", "predicted_step_us", "held_bytes",
)  # fmt: skip


def _layer_of(name: str, value: Any) -> LayerSplit:
    if not isinstance(value, dict) or not all(isinstance(value.get(key), dict) for key in ("sizes", "splits")):
        raise PlanError(f"layer {name} of the shard plan has no sizes and splits; write it again with baechi pase --out")
    numbers = [{a: _whole(n, f"{key} {a} of {name}") for a, n in value[key].items()} for key in ("sizes", "splits")]
    return LayerSplit(str(value.get("op", "")), *numbers)


def _whole(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{what} is {value!r}; expected a whole number of 1 or more")
    return value
