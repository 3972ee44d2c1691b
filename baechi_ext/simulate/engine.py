"""The simulator itself: a work-conserving event simulation of one step. Pure: its inputs are never changed.

Rules (docs/simulator.md): a device runs one op at a time; an idle device starts the best ready op (smallest priority, then
earliest ready; without priorities earliest ready, then longest compute-only path to the end); a tensor is sent once per
destination, when its producer ends; all events of one instant are handled before any decision of that instant.
"""

import heapq
from collections.abc import Collection, Sequence

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.simulate.timeline import Timeline, Transfer

_OP_ENDS, _TRANSFER_ENDS = 0, 1


class Simulator:
    """Simulates many plans for one graph and cluster: `Simulator(graph, cluster).run(placement, priority)`."""

    def __init__(self, graph: OpGraph, cluster: Cluster) -> None:
        self.graph = graph
        self.cluster = cluster
        self.tails_us = graph.tails_us
        self._links = cluster.link_table()
        self._names = [t.name for t in graph.tensors]
        self._charges_devices = any(
            link.send_us or link.send_us_per_byte or link.receive_us or link.receive_us_per_byte
            for row in self._links
            for link in row
        )
        self._readers = [t.readers for t in graph.tensors]
        self._duration = [tuple(op.compute_us / d.speed for op in graph.ops) for d in cluster.devices]

    def run(
        self, placement: Sequence[int], priority: Sequence[float] | None = None, free: Collection[tuple[int, int]] = ()
    ) -> Timeline:
        """The timeline of one step of this placement; `priority` (one number per op) orders ready ops, smaller first.

        `free`: transfers, by tensor and target, that take no time of links and devices, to ask what they cost.
        """
        return _Run(self, tuple(placement), priority, free).timeline()


def simulate(graph: OpGraph, cluster: Cluster, placement: Sequence[int], priority: Sequence[float] | None = None) -> Timeline:
    """The timeline of one step; see `Simulator.run`."""
    return Simulator(graph, cluster).run(placement, priority)


class _Run:
    """The state of one simulation."""

    def __init__(
        self,
        sim: Simulator,
        placement: tuple[int, ...],
        priority: Sequence[float] | None,
        free: Collection[tuple[int, int]],
    ) -> None:
        n, k = len(sim.graph), len(sim.cluster)
        self.sim = sim
        self.placement = placement
        self.priority = priority
        self.free = free
        self.events: list[tuple[float, int, int, int, str, int]] = []
        self.ready: list[list[tuple[float, float, int]]] = [[] for _ in range(k)]
        self.missing = [len(i) for i in sim.graph.inputs]
        self.running = [False] * k
        self.sending = [False] * k
        self.receiving = [False] * k
        self.requests: dict[tuple[int, int], list[tuple[float, float, int, int, str, int, float]]] = {}
        self.unpacked: set[tuple[int, int]] = set()
        self.start = [0.0] * n
        self.end = [0.0] * n
        self.started: list[int] = []
        self.busy = [0.0] * k
        self.transfers: list[Transfer] = []

    def timeline(self) -> Timeline:
        for v, count in enumerate(self.missing):
            if count == 0:
                self._enqueue(v, 0.0)
        now = 0.0
        events = self.events
        while True:
            while events and events[0][0] == now:
                _, kind, v, device, _, tensor = heapq.heappop(events)
                if kind == _OP_ENDS:
                    self._end_op(v, device, now)
                else:
                    if not self.sim.cluster.parallel_transfers:
                        self.sending[self.placement[v]] = self.receiving[device] = False
                    self._arrive(tensor, device, now)
            if self.requests:
                self._start_transfers(now)
            for device, queue in enumerate(self.ready):
                if queue and not self.running[device]:
                    self._start_op(heapq.heappop(queue)[-1], device, now)
            if not events:
                break
            now = events[0][0]
        return Timeline(
            graph=self.sim.graph,
            cluster=self.sim.cluster,
            placement=self.placement,
            makespan_us=max(self.end, default=0.0),
            start_us=tuple(self.start),
            end_us=tuple(self.end),
            started=tuple(self.started),
            busy_us=tuple(self.busy),
            transfers=tuple(self.transfers),
        )

    def _enqueue(self, v: int, now: float) -> None:
        key = (now, -self.sim.tails_us[v], v) if self.priority is None else (self.priority[v], now, v)
        heapq.heappush(self.ready[self.placement[v]], key)

    def _arrive(self, tensor: int, device: int, now: float) -> None:
        for w in self.sim._readers[tensor]:
            if self.placement[w] == device:
                self.missing[w] -= 1
                if self.missing[w] == 0:
                    self._enqueue(w, now)

    def _remote(self, tensor: int, home: int) -> list[int]:
        return sorted({self.placement[w] for w in self.sim._readers[tensor]} - {home})

    def _end_op(self, v: int, device: int, now: float) -> None:
        self.running[device] = False
        self.end[v] = now
        for t in self.sim.graph.outputs[v]:
            self._arrive(t, device, now)
            for target in self._remote(t, device):
                self._request(v, t, device, target, now)

    def _request(self, v: int, t: int, device: int, target: int, now: float) -> None:
        is_free = (t, target) in self.free
        duration = 0.0 if is_free else self.sim._links[device][target].transfer_us(self.sim.graph.tensors[t].bytes)
        if duration == 0:
            self.transfers.append(Transfer(t, device, target, now, now, now))
            self._arrive(t, target, now)
        elif self.sim.cluster.parallel_transfers:
            self.transfers.append(Transfer(t, device, target, now, now, now + duration))
            heapq.heappush(self.events, (now + duration, _TRANSFER_ENDS, v, target, self.sim._names[t], t))
        else:
            urgency = max(self.sim.tails_us[w] for w in self.sim._readers[t] if self.placement[w] == target)
            request = (now, -urgency, v, target, self.sim._names[t], t, duration)
            heapq.heappush(self.requests.setdefault((device, target), []), request)

    def _start_transfers(self, now: float) -> None:
        while self.requests:
            free = [
                (queue[0], source, target)
                for (source, target), queue in self.requests.items()
                if not self.sending[source] and not self.receiving[target]
            ]
            if not free:
                return
            (requested, _, v, _, name, t, duration), source, target = min(free)
            queue = self.requests[source, target]
            heapq.heappop(queue)
            if not queue:
                del self.requests[source, target]
            self.sending[source] = self.receiving[target] = True
            self.transfers.append(Transfer(t, source, target, requested, now, now + duration))
            heapq.heappush(self.events, (now + duration, _TRANSFER_ENDS, v, target, name, t))

    def _start_op(self, v: int, device: int, now: float) -> None:
        duration = self.sim._duration[device][v]
        if self.sim._charges_devices:
            duration = self._with_device_charges(duration, v, device)
        self.running[device] = True
        self.start[v] = now
        self.started.append(v)
        self.busy[device] += duration
        heapq.heappush(self.events, (now + duration, _OP_ENDS, v, device, "", -1))

    def _with_device_charges(self, duration: float, v: int, device: int) -> float:
        """`duration` and what taking in its inputs (the first reader on a device pays) and sending its outputs cost the op."""
        graph = self.sim.graph
        for t in graph.inputs[v]:
            tensor = graph.tensors[t]
            source = self.placement[tensor.producer]
            if source != device and (t, device) not in self.unpacked:
                self.unpacked.add((t, device))
                if (t, device) in self.free:
                    continue
                duration += self.sim._links[source][device].receiving_us(tensor.bytes)
        sending = 0.0  # no sum(): since Python 3.12 it rounds differently
        for t in graph.outputs[v]:
            for target in self._remote(t, device):
                if (t, target) in self.free:
                    continue
                sending += self.sim._links[device][target].sending_us(graph.tensors[t].bytes)
        return duration + sending
