"""An independent, plain and slow reference: what a plan is worth, whether it is valid, and the best plan there is.

Written from the rules of docs/simulator.md with lists that are scanned again and again; it shares no code with the simulator or
any placer, and reads only the fields of OpGraph and Cluster.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product

from baechi_ext.ir import Cluster, OpGraph


@dataclass
class Step:
    """A simulated step. `copies[tensor, device]` = (start, end) of that transfer."""

    start_us: list[float]
    end_us: list[float]
    copies: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    host_us: float = 0.0

    @property
    def makespan_us(self) -> float:
        return max(*self.end_us, self.host_us, 0.0)


@dataclass(frozen=True)
class Optimum:
    """The best plan of an exhaustive search; `placement` is None where no plan is valid."""

    makespan_us: float
    placement: tuple[int, ...] | None


def simulate(
    graph: OpGraph,
    cluster: Cluster,
    placement: Sequence[int],
    priority: Sequence[float] | None = None,
    free: Collection[tuple[int, int]] = (),
) -> Step:
    """The step of a plan; `free` are transfers, by tensor and target, that take no time."""
    reference = _Reference(graph, cluster, placement, priority)
    reference.free = free
    return reference.run()


class _Reference:
    def __init__(self, graph: OpGraph, cluster: Cluster, placement: Sequence[int], priority: Sequence[float] | None) -> None:
        self.graph, self.cluster, self.placement, self.priority = graph, cluster, placement, priority
        self.tail = longest_paths_us(graph)
        self.step = Step([-1.0] * len(graph.ops), [-1.0] * len(graph.ops))
        self.running: dict[int, int] = {}
        self.flying: dict[tuple[int, int], float] = {}
        self.requests: list[tuple[float, float, int, int, str, int]] = []
        self.present: dict[tuple[int, int], float] = {}
        self.received: set[tuple[int, int]] = set()
        self.free: Collection[tuple[int, int]] = ()

    def run(self) -> Step:
        now = 0.0
        while True:
            self._handle_ends(now)
            self._start_transfers(now)
            self._start_ops(now)
            times = [self.step.end_us[v] for v in self.running.values()] + list(self.flying.values())
            if not times:
                self.step.host_us = self._host_us()
                return self.step
            now = min(times)

    def _host_us(self) -> float:
        transfers = [(self.placement[self.graph.tensors[t].producer], d) for t, d in self.step.copies if (t, d) not in self.free]
        host_us = sum(op.issue_us for op in self.graph.ops)
        for ends in product(range(len(self.cluster.devices)), repeat=2):
            host_us += transfers.count(ends) * self.cluster.link(*ends).issue_us
        return host_us

    def _handle_ends(self, now: float) -> None:
        for key in [key for key, end in self.flying.items() if end == now]:
            del self.flying[key]
            self.present[key] = now
        for device, v in [(d, v) for d, v in self.running.items() if self.step.end_us[v] == now]:
            del self.running[device]
            for t in self.graph.outputs[v]:
                self.present[t, device] = now
                for target in self._targets(t):
                    self._request(t, v, target, now)

    def _targets(self, t: int) -> list[int]:
        home = self.placement[self.graph.tensors[t].producer]
        return sorted({self.placement[w] for w in self.graph.tensors[t].readers if self.placement[w] != home})

    def _length(self, t: int, source: int, target: int) -> float:
        link = self.cluster.link(source, target)
        return link.latency_us + self.graph.tensors[t].bytes * link.us_per_byte

    def _request(self, t: int, v: int, target: int, now: float) -> None:
        length = self._length(t, self.placement[v], target)
        if length == 0 or (t, target) in self.free:
            self.present[t, target] = now
            self.step.copies[t, target] = (now, now)
        elif self.cluster.parallel_transfers:
            self.flying[t, target] = now + length
            self.step.copies[t, target] = (now, now + length)
        else:
            path = max(self.tail[w] for w in self.graph.tensors[t].readers if self.placement[w] == target)
            self.requests.append((now, -path, v, target, self.graph.tensors[t].name, t))

    def _start_transfers(self, now: float) -> None:
        while True:
            senders = {self.placement[self.graph.tensors[t].producer] for t, _ in self.flying}
            receivers = {target for _, target in self.flying}
            free = [r for r in self.requests if self.placement[r[2]] not in senders and r[3] not in receivers]
            if not free or self.cluster.parallel_transfers:
                return
            request = min(free)
            self.requests.remove(request)
            v, target, t = request[2], request[3], request[5]
            end = now + self._length(t, self.placement[v], target)
            self.flying[t, target] = end
            self.step.copies[t, target] = (now, end)

    def _start_ops(self, now: float) -> None:
        for device in range(len(self.cluster.devices)):
            if device in self.running:
                continue
            ready = []
            for v in range(len(self.graph.ops)):
                here = self.placement[v] == device and self.step.start_us[v] < 0
                if here and all((t, device) in self.present for t in self.graph.inputs[v]):
                    since = max((self.present[t, device] for t in self.graph.inputs[v]), default=0.0)
                    ready.append(((since, -self.tail[v], v) if self.priority is None else (self.priority[v], since, v), v))
            if ready:
                v = min(ready)[1]
                self.running[device] = v
                self.step.start_us[v] = now
                self.step.end_us[v] = now + self._duration(v, device)

    def _duration(self, v: int, device: int) -> float:
        duration = self.graph.ops[v].compute_us / self.cluster.devices[device].speed
        for t in self.graph.inputs[v]:
            source = self.placement[self.graph.tensors[t].producer]
            if source != device and (t, device) not in self.received and (t, device) not in self.free:
                self.received.add((t, device))
                link = self.cluster.link(source, device)
                duration += link.receive_us + link.receive_us_per_byte * self.graph.tensors[t].bytes
        sending = 0.0
        for t in self.graph.outputs[v]:
            for target in self._targets(t):
                if (t, target) not in self.free:
                    link = self.cluster.link(device, target)
                    sending += link.send_us + link.send_us_per_byte * self.graph.tensors[t].bytes
        return duration + sending


def longest_paths_us(graph: OpGraph) -> list[float]:
    """For each op, the longest compute-only path from its start to the end."""

    @cache
    def path(v: int) -> float:
        return graph.ops[v].compute_us + max((path(w) for t in graph.outputs[v] for w in graph.tensors[t].readers), default=0.0)

    return [path(v) for v in range(len(graph.ops))]


def peak_bytes(graph: OpGraph, cluster: Cluster, placement: Sequence[int], step: Step) -> list[float]:
    """The most bytes that each device holds: the sum of all that is live, looked at whenever something becomes live."""
    live: list[list[tuple[float, float, float]]] = [[] for _ in cluster.devices]
    for t, tensor in enumerate(graph.tensors):
        home = placement[tensor.producer]
        ends = [step.end_us[tensor.producer], *(step.end_us[w] for w in tensor.readers if placement[w] == home)]
        ends += [end for (copied, _), (_, end) in step.copies.items() if copied == t]
        size = 0 if graph.ops[tensor.producer].resident else tensor.bytes
        live[home].append((step.start_us[tensor.producer], max(ends), size))
    for (t, target), (start, _) in step.copies.items():
        until = max(step.end_us[w] for w in graph.tensors[t].readers if placement[w] == target)
        live[target].append((start, until, graph.tensors[t].bytes))
    for v, op in enumerate(graph.ops):
        extra = max(0, op.output_bytes - sum(graph.tensors[t].bytes for t in graph.outputs[v]))
        live[placement[v]].append((step.start_us[v], step.end_us[v], op.temporary_bytes + extra))
    peaks = []
    for device, pieces in enumerate(live):
        held = sum(op.persistent_bytes for v, op in enumerate(graph.ops) if placement[v] == device)
        peaks.append(held + max((sum(b for s, e, b in pieces if s <= at < e) for at, _, _ in pieces), default=0))
    return peaks


def violations(graph: OpGraph, cluster: Cluster, placement: Sequence[int], priority: Sequence[float] | None = None) -> list[str]:
    """Every rule that a plan breaks."""
    if len(placement) != len(graph.ops):
        return ["not one device per op"]
    if not all(isinstance(d, int) and 0 <= d < len(cluster.devices) for d in placement):
        return ["a device that does not exist"]
    if priority is not None and len(priority) != len(graph.ops):
        return ["not one priority per op"]
    found = []
    homes: dict[str, int] = {}
    for op, d in zip(graph.ops, placement, strict=True):
        if op.colocation is not None and homes.setdefault(op.colocation, d) != d:
            found.append(f"group {op.colocation} is split")
        if op.pin not in (None, d):
            found.append(f"{op.id} is not where it is pinned")
    peaks = peak_bytes(graph, cluster, placement, simulate(graph, cluster, placement, priority))
    for device, peak in zip(cluster.devices, peaks, strict=True):
        if device.memory_bytes is not None and peak > device.memory_bytes:
            found.append(f"{device.name} holds {peak} of {device.memory_bytes} bytes")
    return found


def placements(graph: OpGraph, num_devices: int) -> Iterator[tuple[int, ...]]:
    """Every placement that keeps colocation groups whole and pinned ops where they are pinned."""
    names = [op.colocation if op.colocation is not None else (v,) for v, op in enumerate(graph.ops)]
    distinct = list(dict.fromkeys(names))
    for devices in product(range(num_devices), repeat=len(distinct)):
        chosen = dict(zip(distinct, devices, strict=True))
        placement = tuple(chosen[name] for name in names)
        if all(op.pin in (None, d) for op, d in zip(graph.ops, placement, strict=True)):
            yield placement


def orders(graph: OpGraph) -> Iterator[tuple[float, ...]]:
    """Every topological order as priorities. No others are needed: a plan runs the same with its own order of starts."""
    n = len(graph.ops)
    before = [{graph.tensors[t].producer for t in graph.inputs[v]} for v in range(n)]

    def extend(done: list[int]) -> Iterator[tuple[float, ...]]:
        if len(done) == n:
            yield tuple(float(done.index(v)) for v in range(n))
        for v in range(n):
            if v not in done and before[v] <= set(done):
                yield from extend([*done, v])

    return extend([])


def optimum(graph: OpGraph, cluster: Cluster, *, with_orders: bool = False) -> Optimum:
    """The fastest valid plan of all placements, without priorities and, if asked for, in every order; for a handful of ops."""
    best = Optimum(float("inf"), None)
    priorities = [None, *orders(graph)] if with_orders else [None]
    for placement in placements(graph, len(cluster.devices)):
        for priority in priorities:
            step = simulate(graph, cluster, placement, priority)
            if step.makespan_us < best.makespan_us and not violations(graph, cluster, placement, priority):
                best = Optimum(step.makespan_us, placement)
    return best
