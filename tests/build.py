"""Small graphs and clusters for tests."""

from typing import Any

from baechi_ext.ir import Cluster, Device, Link, Op, OpGraph


def graph_of(costs: dict[str, float], *edges: tuple[Any, ...], **fields: dict[str, Any]) -> OpGraph:
    """Ops from `costs` (id -> compute_us) and edges `(source, target, bytes[, tensor])`.

    `fields` are further op fields, e.g. `persistent_bytes={"a": 10}`.
    """
    ops = [
        Op(id=id_, op="test", compute_us=us, **{field: values[id_] for field, values in fields.items() if id_ in values})
        for id_, us in costs.items()
    ]
    return OpGraph.from_edges(ops, [(*edge, "")[:4] for edge in edges])


def cluster_of(
    n: int = 2, latency_us: float = 0.0, us_per_byte: float = 1.0, *, speeds: tuple[float, ...] = (), **fields: Any
) -> Cluster:
    """`n` devices; a transfer of b bytes takes latency_us + b * us_per_byte, one microsecond per byte unless told."""
    link = Link(us_per_byte=us_per_byte, latency_us=latency_us)
    memory = fields.pop("memory_bytes", None)
    devices = tuple(Device(f"device:{i}", memory, speeds[i] if speeds else 1.0) for i in range(n))
    return Cluster(devices, link, **fields)


def with_memory(cluster: Cluster, memory_bytes: int | None) -> Cluster:
    """The cluster with the same limit for every device."""
    devices = tuple(Device(d.name, memory_bytes, d.speed) for d in cluster.devices)
    return Cluster(devices, cluster.default, cluster.pairs, cluster.parallel_transfers)
