"""Timeline: when every op and transfer of a simulated step starts and ends, and what the devices hold meanwhile."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph


class Transfer(NamedTuple):
    """One tensor on its way to one device."""

    tensor: int
    source: int
    target: int
    request_us: float
    start_us: float
    end_us: float


@dataclass(frozen=True, repr=False)
class Timeline:
    """One simulated step. `start_us[v]` and `end_us[v]` belong to `graph.ops[v]`, the other lists to the devices."""

    graph: OpGraph
    cluster: Cluster
    placement: tuple[int, ...]
    makespan_us: float
    start_us: tuple[float, ...]
    end_us: tuple[float, ...]
    started: tuple[int, ...]
    """Op positions in the order the simulator started them: a topological order, also among ops of no duration."""
    busy_us: tuple[float, ...]
    transfers: tuple[Transfer, ...]

    def __repr__(self) -> str:
        count = f"{len(self.start_us)} ops on {len(self.cluster)} devices, {len(self.transfers)} transfers"
        return f"<Timeline: {self.makespan_us / 1000:.4g} ms, {count}>"

    @cached_property
    def rank(self) -> tuple[int, ...]:
        """For each op, its place in `started`."""
        return tuple(sorted(self.started, key=self.started.__getitem__))

    @cached_property
    def peak_memory_bytes(self) -> tuple[int | float, ...]:
        """The most each device holds at one instant; what ends at an instant is freed before what starts is taken."""
        from baechi_ext.simulate.peak import peak_memory_bytes  # loads numpy

        return peak_memory_bytes(self)

    @property
    def host_us(self) -> float:
        """Time that the step takes the host, where one thread gives all devices their work; no step is shorter."""
        host_us = self.graph.total_issue_us()
        for ends, count in sorted(Counter((t.source, t.target) for t in self.transfers).items()):
            host_us += count * self.cluster.link(*ends).issue_us
        return host_us

    @property
    def bytes_moved(self) -> int | float:
        return sum(self.graph.tensors[t.tensor].bytes for t in self.transfers)

    def device_order(self) -> tuple[tuple[int, ...], ...]:
        """For each device, its ops in the order of their starts: the runtime's static order."""
        order: list[list[int]] = [[] for _ in self.busy_us]
        for v in self.started:
            order[self.placement[v]].append(v)
        return tuple(map(tuple, order))

    def to_json(self) -> dict[str, Any]:
        """The output of `baechi simulate --json`, violations apart."""
        return {
            "makespan_us": self.makespan_us,
            "busy_us": list(self.busy_us),
            "peak_memory_bytes": list(self.peak_memory_bytes),
            "transfers": len(self.transfers),
            "bytes_moved": self.bytes_moved,
        }
