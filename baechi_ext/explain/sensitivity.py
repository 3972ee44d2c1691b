"""The same plan where something is faster, slower or free: what would change the step. Every number is a simulation."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baechi_ext.cost import scale_links
from baechi_ext.explain.path import Stretch, transfer_to_json
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.simulate.simulator import Simulator
from baechi_ext.simulate.timeline import Timeline, Transfer

MOST_DEVICES = 16
"""So many devices, the busiest, are tried with a higher speed."""
FASTER = 1.1
ALL_FASTER = "all devices 10% faster"
MOST_TRIED, OPS_TRIED = 100, 300_000
"""So many transfers are simulated as free, but in all no more ops than that, if not the ten of which most is expected."""
SHOWN = 10


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The step if something were different. `change`: what, in words; `gain_us`: by how much it is shorter then."""

    change: str
    device: int | None
    step_us: float
    gain_us: float


@dataclass(frozen=True, slots=True)
class CostlyTransfer:
    """A transfer, and by how much the step is shorter if it takes no time, on the link and on its devices; None: not tried."""

    transfer: Transfer
    is_critical: bool
    gain_us: float | None

    @property
    def us(self) -> float:
        return self.transfer.end_us - self.transfer.start_us

    @property
    def queue_us(self) -> float:
        return self.transfer.start_us - self.transfer.request_us

    def to_json(self, graph: OpGraph) -> dict[str, Any]:
        times = {"us": self.us, "queue_us": self.queue_us, "start_us": self.transfer.start_us, "gain_us": self.gain_us}
        return {**transfer_to_json(graph, self.transfer), **times, "critical": self.is_critical}


@dataclass(frozen=True, slots=True)
class TransferCosts:
    """The ten costliest transfers by what the step would gain without them, and by duration; how many were tried, of how many."""

    by_gain: tuple[CostlyTransfer, ...]
    by_duration: tuple[CostlyTransfer, ...]
    tried: int
    count: int

    def to_json(self, graph: OpGraph) -> dict[str, Any]:
        lists = {name: [x.to_json(graph) for x in getattr(self, name)] for name in ("by_gain", "by_duration")}
        return {"count": self.count, "tried": self.tried, **lists}


def sensitivity(timeline: Timeline, priority: Sequence[float] | None) -> tuple[WhatIf, ...]:
    """The step with other links, and with each device 10% faster, where there are several.

    "Latency" stands for all that a transfer takes whatever its size, from devices and host, too; "bandwidth" for all that a byte takes.
    """
    cluster = timeline.cluster
    changed: list[tuple[str, int | None, Cluster]] = []
    if timeline.transfers:
        changed = [
            ("links twice as fast", None, scale_links(cluster, 0.5)),
            ("links twice as slow", None, scale_links(cluster, 2.0)),
            ("half the latency of links", None, scale_links(cluster, 0.5, per_byte=1.0)),
            ("twice the bandwidth of links", None, scale_links(cluster, 1.0, per_byte=0.5)),
            ("links that take no time", None, scale_links(cluster, 0.0)),
        ]
    busiest = sorted((d for d, busy in enumerate(timeline.busy_us) if busy > 0), key=lambda d: -timeline.busy_us[d])
    changed += [(f"{cluster.devices[d].name} 10% faster", d, _faster(cluster, {d})) for d in sorted(busiest[:MOST_DEVICES])]
    if len(busiest) > 1:
        changed.append((ALL_FASTER, None, _faster(cluster, set(busiest))))
    steps = [Simulator(timeline.graph, other).evaluate(timeline.placement, priority)[0] for *_, other in changed]
    return tuple(WhatIf(what, d, us, timeline.makespan_us - us) for (what, d, _), us in zip(changed, steps, strict=True))


def transfer_costs(
    timeline: Timeline, priority: Sequence[float] | None, path: Sequence[Stretch], handled: Collection[int]
) -> TransferCosts:
    """The step's gain without single transfers, tried for those on the critical path first, and for the longest first.

    `handled`: ops of the critical path that transfers lengthen. Where all are tried, `by_gain` is exact; where not, others are off the
    critical path, where a transfer that becomes free can only gain by a better order of ops.
    """
    critical = {(x.transfer.tensor, x.transfer.target) for x in path if x.transfer is not None}
    graph, place = timeline.graph, timeline.placement

    def is_critical(x: Transfer) -> bool:
        if (x.tensor, x.target) in critical or graph.tensors[x.tensor].producer in handled:
            return True
        return any(w in handled for w in graph.tensors[x.tensor].readers if place[w] == x.target)

    marked = [(is_critical(x), x) for x in timeline.transfers]
    marked.sort(key=lambda pair: (not pair[0], pair[1].start_us - pair[1].end_us))
    count = max(SHOWN, min(MOST_TRIED, OPS_TRIED // graph.size)) if graph.size else 0
    simulator = Simulator(graph, timeline.cluster)

    def gain_us(x: Transfer) -> float:
        return timeline.makespan_us - simulator.run(place, priority, {(x.tensor, x.target)}).makespan_us

    costs = [CostlyTransfer(x, on_path, gain_us(x) if i < count else None) for i, (on_path, x) in enumerate(marked)]
    by_gain = sorted(costs[:count], key=lambda x: (-(x.gain_us or 0.0), -x.us))[:SHOWN]
    by_duration = sorted(costs, key=lambda x: -x.us)[:SHOWN]
    return TransferCosts(tuple(by_gain), tuple(by_duration), len(costs[:count]), len(costs))


def _faster(cluster: Cluster, chosen: Collection[int]) -> Cluster:
    """Some devices 10% faster."""
    devices = tuple(replace(x, speed=x.speed * FASTER) if d in chosen else x for d, x in enumerate(cluster.devices))
    return replace(cluster, devices=devices)
