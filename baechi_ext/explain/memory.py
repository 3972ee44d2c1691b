"""Contents of each device when its memory is fullest, and what of that could be elsewhere."""

from dataclasses import asdict, dataclass
from typing import Any

from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.simulate.peak import COPY, TENSOR, WORKING, holdings, persistent_bytes
from baechi_ext.simulate.timeline import Timeline

PERSISTENT = 3
KINDS = {COPY: "copy", TENSOR: "tensor", WORKING: "working", PERSISTENT: "persistent"}
"""A received copy; a tensor where it is produced; what an op needs while it runs; what it holds for the whole step."""
MOST_HOLDERS = 10


@dataclass(frozen=True, slots=True)
class Holder:
    """Something that holds memory at a device's peak: a tensor of `op`, or the op itself."""

    kind: str
    op: int
    tensor: str | None
    bytes: float


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One device's peak, since when it is held, and what holds it: in all by kind, and the largest."""

    device: int
    peak_bytes: float
    limit_bytes: float | None
    at_us: float
    by_kind: dict[str, float]
    holders: tuple[Holder, ...]

    @property
    def share(self) -> float | None:
        """The part of its memory that the device needs; None where there is no limit."""
        if self.limit_bytes is None:
            return None
        return self.peak_bytes / self.limit_bytes if self.limit_bytes else float(self.peak_bytes > 0)

    def to_json(self, graph: OpGraph) -> dict[str, Any]:
        value = asdict(self)
        by_kind, holders = value.pop("by_kind"), value.pop("holders")
        value |= {"share": self.share, "by_kind_bytes": by_kind}
        return value | {"holders": [holder | {"op": graph.ops[holder["op"]].id} for holder in holders]}


def device_memories(timeline: Timeline) -> tuple[DeviceMemory, ...]:
    """Contents of each device at its peak."""
    graph, held, found = timeline.graph, holdings(timeline), []
    for d, (base, device) in enumerate(zip(persistent_bytes(timeline), timeline.cluster.devices, strict=True)):
        at_us, live = held.of(d).at_peak(base)
        ops = (v for v, op in enumerate(graph.ops) if op.persistent_bytes and timeline.placement[v] == d)
        holders = [Holder(KINDS[PERSISTENT], v, None, graph.ops[v].persistent_bytes) for v in ops]
        by_kind = dict.fromkeys(KINDS.values(), 0.0) | {KINDS[PERSISTENT]: float(base)}
        for kind, item, size in live:
            tensor = None if kind == WORKING else graph.tensors[item]
            holders.append(Holder(KINDS[kind], item if tensor is None else tensor.producer, None if tensor is None else tensor.name, size))
            by_kind[KINDS[kind]] += size
        largest = tuple(sorted(holders, key=lambda holder: -holder.bytes)[:MOST_HOLDERS])
        found.append(DeviceMemory(d, timeline.peak_memory_bytes[d], device.memory_bytes, at_us, by_kind, largest))
    return tuple(found)


def memory_courses(timeline: Timeline) -> tuple[tuple[tuple[float, float], ...], ...]:
    """For each device, (from when, bytes): what it holds from each instant on at which that changes, from the step's start on."""
    held, found = holdings(timeline), []
    for d, base in enumerate(persistent_bytes(timeline)):
        at_us, bytes_then = held.of(d).course(base)
        found.append(tuple(dict(zip(at_us.tolist(), bytes_then.tolist(), strict=True)).items()))
    return tuple(found)
