"""The plan of a step on groups of devices: a plan file that lists the groups, and how each op is split in its own."""

from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from baechi_ext.errors import PlanError
from baechi_ext.hybrid.groups import Groups, group_cluster
from baechi_ext.hybrid.splits import OpSplit, sharded_graph
from baechi_ext.ir.checked import checked
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.made_by import load_as
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.ir.plan import DEVICE_GROUPS, Plan


@dataclass(frozen=True)
class HybridPlan(Plan):
    """A plan whose ops run on groups: `placement[v]` is the first device of the group that op v runs on, all of which run their part.

    `shard[v]` is how op v is split; `graph` and `cluster` are the whole op graph and the single devices.
    """

    groups: Groups = ()
    shard: tuple[OpSplit, ...] = ()

    def __post_init__(self) -> None:
        members = [d for group in self.groups for d in group]
        if sorted(members) != list(range(len(self.cluster))) or len({len(group) for group in self.groups}) > 1:
            groups = list(map(list, self.groups))
            raise PlanError(f"the device groups {groups} of {len(self.cluster)} devices: each device has to be in one, all of one size")
        for op, device in zip(self.graph.ops, self.placement, strict=True):
            if device not in self._group_of:
                raise PlanError(f"op {op.id!r} is placed on device {device}, which is not the first of its group; give it that one")

    @cached_property
    def _group_of(self) -> dict[int, int]:
        return {group[0]: i for i, group in enumerate(self.groups)}

    @property
    def group_size(self) -> int:
        return len(self.groups[0])

    @cached_property
    def sharded(self) -> OpGraph:
        """The part of the graph that each device of a group has."""
        return sharded_graph(self.graph, self.shard)

    @cached_property
    def group_cluster(self) -> Cluster:
        """The groups as devices."""
        return group_cluster(self.cluster, self.groups)

    @property
    def of_groups(self) -> Plan:
        """The plan to simulate: that of a device's part of the graph, in which groups are the devices."""
        values = {f.name: getattr(self, f.name) for f in fields(Plan)}
        placement = tuple(self._group_of[d] for d in self.placement)
        return Plan(**(values | {"graph": self.sharded, "cluster": self.group_cluster, "placement": placement}))

    def on(self, cluster: Cluster) -> "HybridPlan":
        """The same plan where devices have other memory. Raises PlanError for other devices or links: messages are timed for its own."""
        if len(cluster) == len(self.cluster):
            pairs = zip(self.cluster.devices, cluster.devices, strict=True)
            if cluster == replace(self.cluster, devices=tuple(replace(own, memory_bytes=other.memory_bytes) for own, other in pairs)):
                return replace(self, cluster=cluster)
        raise PlanError(
            "the messages inside the plan's device groups are timed for its own cluster; it can be simulated with other memory limits, "
            "not on other devices or links"
        )

    def to_json(self) -> dict[str, Any]:
        """The plan file (docs/files.md)."""
        splits = {name: _split_to_json(split) for name, split in zip(self.graph.index, self.shard, strict=True)}
        return {**super().to_json(), DEVICE_GROUPS: [list(group) for group in self.groups], "shard": splits}

    @classmethod
    def from_json(cls, value: dict[str, Any], graph: OpGraph, cluster: Cluster | None = None) -> "HybridPlan":
        """The plan of an object, as Plan.from_json makes it. Raises PlanError, too, where groups or splits are broken."""
        groups, shard = value.get(DEVICE_GROUPS), value.get("shard")
        if not isinstance(groups, list) or not all(isinstance(g, list) and g and all(type(d) is int for d in g) for g in groups):
            raise PlanError(f'the plan\'s "{DEVICE_GROUPS}" are {groups!r}; expected lists of device indices')
        if not isinstance(shard, dict):
            raise PlanError('the plan has device groups and no object "shard"; write it again')
        plain = Plan.from_json({key: v for key, v in value.items() if key != DEVICE_GROUPS}, graph)
        values = {f.name: getattr(plain, f.name) for f in fields(Plan)}
        splits = tuple(checked(shard.get(op.id), OpSplit, f"shard of op {op.id!r}", PlanError) for op in graph.ops)
        plan = cls(**values, groups=tuple(map(tuple, groups)), shard=splits)
        return plan if cluster is None else plan.on(cluster)


def load_plan(path: str | Path, graph: OpGraph, cluster: Cluster | None = None) -> Plan:
    """The plan in a file, on single devices or on groups. Raises FileError, PlanError or MismatchError."""
    return load_as(path, "plan", lambda value: (HybridPlan if DEVICE_GROUPS in value else Plan).from_json(value, graph, cluster))


def _split_to_json(split: OpSplit) -> dict[str, Any]:
    """The fields in which it differs from an op that is not split."""
    plain = OpSplit()
    return {key: v for key, v in asdict(split).items() if v != getattr(plain, key)}
