"""Plan: a device for every op, the order to run them in, and what that is predicted to take; and what a legal placement is, whoever made
it, which is checked at stage boundaries."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from baechi_ext.errors import BaechiError, ClusterError, MismatchError, PlanError
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.files import SCHEMA_VERSION, read_json
from baechi_ext.ir.made_by import MadeBy, Saved, load_as
from baechi_ext.ir.numbers import as_bytes, as_number, require_finite
from baechi_ext.ir.op_graph import OpGraph

STATUSES = ("optimal", "feasible")
DEVICE_GROUPS = "device_groups"
"""The field of a plan file that splits ops over groups of devices; what reads plans of single devices refuses it."""


@dataclass(frozen=True, repr=False)
class Plan(Saved):
    """`placement[v]` and `priority[v]` belong to `graph.ops[v]`; files key them by op id."""

    graph: OpGraph
    method: str
    status: str
    cluster: Cluster
    placement: tuple[int, ...]
    priority: tuple[float, ...] | None
    predicted_step_us: float
    lower_bound_us: float
    peak_memory_bytes: tuple[int | float, ...]
    placement_seconds: float
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    made_by: MadeBy = field(default_factory=MadeBy, compare=False)
    """The same plan is the same, whatever made it."""

    def __repr__(self) -> str:
        step, bound = (f"{us / 1000:.4g} ms" for us in (self.predicted_step_us, self.lower_bound_us))
        return f"<Plan {self.method}: {len(self.placement)} ops on {len(self.cluster)} devices, step {step}, bound {bound}, {self.status}>"

    def to_json(self) -> dict[str, Any]:
        """The plan file (docs/files.md)."""
        ids = self.graph.index
        value: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "graph_fingerprint": self.graph.fingerprint,
            "method": self.method,
            "status": self.status,
            "cluster": self.cluster.to_json(),
            "placement": dict(zip(ids, self.placement, strict=True)),
            "predicted_step_us": self.predicted_step_us,
            "lower_bound_us": self.lower_bound_us,
            "peak_memory_bytes": list(self.peak_memory_bytes),
            "placement_seconds": self.placement_seconds,
            "options": dict(self.options),
            "seed": self.seed,
            **self.made_by.to_json(),
            "op_digests": dict(zip(ids, self.graph.op_digests, strict=True)),
        }
        if self.priority is not None:
            value["priority"] = dict(zip(ids, self.priority, strict=True))
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any], graph: OpGraph, cluster: Cluster | None = None) -> "Plan":
        """The plan in a parsed plan file, for `graph`; `cluster` overrides the plan's own.

        Raises PlanError where it breaks a rule, MismatchError where it belongs to another graph.
        """
        if DEVICE_GROUPS in value:
            raise PlanError(
                "the plan splits ops over groups of devices, and here only a plan of single devices will do; baechi simulate takes it, "
                "and --placement_method=auto makes one of single devices"
            )
        if isinstance(value.get("shard"), dict) and "placement" not in value:
            raise PlanError(
                "this is a shard plan, which says how layers are split and not where ops are; baechi explain and diff take it, "
                "and baechi train --sharding=FILE runs it"
            )
        placement = value.get("placement")
        if not isinstance(placement, dict):
            graph_instead = ": this is a graph, of which baechi place makes a plan" if {"graph", "nodes"} <= value.keys() else ""
            raise PlanError(f'the plan has no object "placement"{graph_instead}')
        require_same_graph(graph, value, "plan", placement)
        if cluster is None:
            try:
                cluster = Cluster.from_json(value.get("cluster"))
            except ClusterError as e:
                raise PlanError(f"the plan's cluster: {e}") from e
        status = value.get("status", "feasible")
        if status not in STATUSES:
            raise PlanError(f"the plan's status is {status!r}; expected one of {', '.join(STATUSES)}")
        priority = value.get("priority")
        if priority is not None and not isinstance(priority, dict):
            raise PlanError('the plan\'s "priority" is not an object')
        return cls(
            graph=graph,
            method=str(value.get("method", "")),
            status=status,
            cluster=cluster,
            placement=tuple(_checked_device(op.id, placement[op.id], cluster) for op in graph.ops),
            priority=tuple(_priority_of(op.id, priority) for op in graph.ops) if priority else None,
            predicted_step_us=as_number(value.get("predicted_step_us", 0.0), "predicted_step_us", PlanError),
            lower_bound_us=as_number(value.get("lower_bound_us", 0.0), "lower_bound_us", PlanError),
            peak_memory_bytes=_peaks_of(value.get("peak_memory_bytes")),
            placement_seconds=as_number(value.get("placement_seconds", 0.0), "placement_seconds", PlanError),
            options=_object_of(value, "options"),
            seed=int(as_number(value.get("seed", 0), "seed", PlanError)),
            # Another program's plan may have a field "command" that means something else.
            made_by=MadeBy.from_json(value if isinstance(value.get("command"), list) else {**value, "command": None}, PlanError),
        )

    def on(self, cluster: Cluster) -> "Plan":
        """The same placement and priorities on another cluster. Raises PlanError where that lacks the device of an op."""
        for op, device in zip(self.graph.ops, self.placement, strict=True):
            _checked_device(op.id, device, cluster)
        return replace(self, cluster=cluster)

    @classmethod
    def load(cls, path: str | Path, graph: OpGraph, cluster: Cluster | None = None) -> "Plan":
        """Raises FileError, PlanError or MismatchError."""
        return load_as(path, "plan", lambda value: cls.from_json(value, graph, cluster))


@dataclass(frozen=True)
class PlanFile:
    """A plan file, read but not yet put onto a graph."""

    path: str
    value: dict[str, Any]

    @classmethod
    def load(cls, path: str | Path) -> "PlanFile":
        """Raises FileError for what is no JSON object."""
        return cls(str(path), read_json(path, "plan"))

    def on(self, graph: OpGraph, cluster: Cluster) -> Plan:
        """The plan, for a graph and a cluster. Raises what Plan.from_json does, with the file's name."""
        try:
            return Plan.from_json(self.value, graph, cluster)
        except BaechiError as e:
            raise type(e)(f"{self.path}: {e}") from e


def require_same_graph(graph: OpGraph, value: Mapping[str, Any], kind: str, ids: Collection[str]) -> None:
    """Raises MismatchError, naming the first op that differs, where a parsed profile or plan belongs to another graph.

    `ids` are the ops the file speaks of: a plan written by another program may carry no digests.
    """
    differs, redo = f"the {kind} is of another graph: the first op that differs is", f"make a new {kind} for this graph"
    digests = value.get("op_digests")
    if digests is not None and not isinstance(digests, dict):
        raise MismatchError(f'the {kind}\'s "op_digests" is {type(digests).__name__}, expected an object; {redo}')
    if digests is not None:
        for op, digest in zip(graph.ops, graph.op_digests, strict=True):
            if op.id not in digests:
                raise MismatchError(f"{differs} {op.id!r}, which it lacks; {redo}")
            if digests[op.id] != digest:
                raise MismatchError(f"{differs} {op.id!r} (its type, phase, colocation or inputs changed); {redo}")
    for op in graph.ops:
        if op.id not in ids:
            raise MismatchError(f"{differs} {op.id!r}, which it lacks; {redo}")
    extra = next((i for i in (*(digests or ()), *ids) if i not in graph.index), None)
    if extra is not None:
        raise MismatchError(f"{differs} {extra!r}, which the graph lacks; {redo}")
    fingerprint = value.get("graph_fingerprint")
    if digests is None and fingerprint and fingerprint != graph.fingerprint:
        raise MismatchError(
            f"the {kind} is of another graph: its fingerprint is {str(fingerprint)[:12]}..., "
            f"the graph's {graph.fingerprint[:12]}... "
            f"(it carries no digests per op, so the op can't be named); {redo}"
        )


def _checked_device(op_id: str, device: Any, cluster: Cluster) -> int:
    if isinstance(device, bool) or not isinstance(device, int) or not 0 <= device < len(cluster):
        expected = f"0 to {len(cluster) - 1}" if len(cluster) > 1 else "0, the only one"
        raise PlanError(
            f"op {op_id!r} is placed on device {device!r}; expected {expected}: place the graph on these again, or give more devices"
        )
    return device


def _peaks_of(value: Any) -> tuple[int | float, ...]:
    if value is not None and not isinstance(value, list):
        raise PlanError(f'the plan\'s "peak_memory_bytes" is {value!r}; expected a list')
    return tuple(as_bytes(peak, "an entry of peak_memory_bytes", PlanError) for peak in value or ())


def _object_of(value: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = value.get(key)
    if found is not None and not isinstance(found, dict):
        raise PlanError(f'the plan\'s "{key}" is {found!r}; expected an object')
    require_finite(found, f'the plan\'s "{key}"', PlanError)
    return found or {}


def _priority_of(op_id: str, priority: Mapping[str, Any]) -> float:
    if op_id not in priority:
        raise PlanError(f"op {op_id!r} has no priority; give every op one, or none at all")
    value: float = priority[op_id]
    if as_number(value, f"priority of op {op_id!r}", PlanError, minimum=float("-inf")) != value:
        raise PlanError(f"priority of op {op_id!r} is {value!r}, too long to be told from its neighbours; give whole numbers up to 2**53")
    return value


def placement_violations(graph: OpGraph, cluster: Cluster, placement: Sequence[int]) -> list[str]:
    """Faults of `placement` apart from memory, one sentence each; empty where it is legal."""
    if len(placement) != len(graph):
        return [f"the placement has {len(placement)} entries for {len(graph)} ops"]
    k = len(cluster)
    found = [
        f"op {op.id!r} is placed on device {d!r}; expected 0 to {k - 1}"
        for op, d in zip(graph.ops, placement, strict=True)
        if not 0 <= d < k
    ]
    for name, members in graph.groups.items():
        devices = sorted({placement[v] for v in members})
        if len(devices) > 1:
            found.append(f"colocation group {name!r} is split over devices {', '.join(map(str, devices))}")
    for v, pin in graph.pins.items():
        if placement[v] != pin:
            found.append(f"op {graph.ops[v].id!r} is pinned to device {pin} and placed on {placement[v]}")
    return found


def require_devices(graph: OpGraph, cluster: Cluster, placement: Sequence[int]) -> None:
    """Raises PlanError where a placement has not one device of the cluster for each op."""
    if len(placement) != len(graph):
        raise PlanError(f"the placement has {len(placement)} entries for {len(graph)} ops")
    if len(placement) and not 0 <= min(placement) <= max(placement) < len(cluster):
        op, device = next((op, d) for op, d in zip(graph.ops, placement, strict=True) if not 0 <= d < len(cluster))
        raise PlanError(f"op {op.id!r} is placed on device {device!r}; expected 0 to {len(cluster) - 1}")


def memory_violations(cluster: Cluster, peak_memory_bytes: Sequence[float]) -> list[str]:
    """One sentence per device whose peak exceeds its limit."""
    return [
        f"device {d.name!r} needs {peak:.0f} bytes and has {d.memory_bytes:.0f}"
        for d, peak in zip(cluster.devices, peak_memory_bytes, strict=True)
        if d.memory_bytes is not None and peak > d.memory_bytes
    ]


def verify_placement(graph: OpGraph, cluster: Cluster, placement: Sequence[int], stage: str) -> None:
    """Raises PlanError, naming the stage that broke the rule."""
    found = placement_violations(graph, cluster, placement)
    if found:
        raise PlanError(f"{stage}: {'; '.join(found[:5])}")
