"""m-ETF and m-SCT to the letter (Baechi, SoCC 2020, sections 3.2 and 3.3): one more schedule beside those of `list_scheduler`.

The ready op that can start earliest starts first, of equals the first in topological order; sends and receives of a device share one
channel; received copies take no memory, and outputs are free again when their last reader starts. With favourite children a device
waits for the child of the op it just ran, if the child is ready and could start nowhere earlier, and meanwhile runs only ops that
could start everywhere. Unlike there, an op that fits nowhere goes where most room is, and does not end the run.

The rule often lies behind those of `list_scheduler`; where it does not, the methods that carry its name are as good.
"""

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.list_scheduler import FavouriteChild, Schedule

_MOST_LOOKS = 240_000
"""The most inputs and ops that the schedule may look at to say when ops could start on a device; takes about half a second."""
_BEHIND = 4  # a run is given up where it would need this many times as many looks, judged by what has started after a part of them
_JUDGED_AFTER = 1 / 8

_Start = tuple[float, int, int, int]  # when, rank of the op in topological order, device, op


def earliest_starts(graph: OpGraph, cluster: Cluster, favourite_child: FavouriteChild | None = None) -> list[Schedule]:
    """The schedule; none for a graph so wide that it would take long, and none for one device."""
    if len(cluster) == 1 or 2 * (len(graph) + sum(map(len, graph.inputs))) > _MOST_LOOKS:  # two looks at an op are the least
        return []
    run = _Run(graph, cluster, favourite_child)
    return [Schedule(tuple(run.device), tuple(run.started))] if len(run.started) == len(graph) else []


class _Run:
    """The state of one run, which ends early where it takes long."""

    def __init__(self, graph: OpGraph, cluster: Cluster, favourite_child: FavouriteChild | None) -> None:
        n, k = len(graph), len(cluster)
        self.graph = graph
        self.links = cluster.link_table()
        self.speed = [d.speed for d in cluster.devices]
        self.child: FavouriteChild = favourite_child or (None,) * n
        self.missing = [len(p) for p in graph.predecessors]
        self.ready = {v for v in range(n) if not self.missing[v]}
        self.started: list[int] = []
        self.device, self.end_us = [-1] * n, [0.0] * n
        self.running: list[int | None] = [None] * k
        self.awake_for: list[int | None] = [None] * k
        self.free_us, self.channel_us = [0.0] * k, [0.0] * k
        self.arrival_us: dict[tuple[int, int], float] = {}
        self.room = cluster.rooms
        self.unread = [len(t.readers) for t in graph.tensors]
        self.members = [(v,) if op.colocation is None else graph.groups[op.colocation] for v, op in enumerate(graph.ops)]
        group_bytes = {name: sum(graph.ops[w].persistent_bytes for w in members) for name, members in graph.groups.items()}
        self.persistent_bytes = [op.persistent_bytes if op.colocation is None else group_bytes[op.colocation] for op in graph.ops]
        self.needed_bytes = [op.temporary_bytes + sum(graph.tensors[t].bytes for t in graph.outputs[v]) for v, op in enumerate(graph.ops)]
        self.looks = 0
        for v, pin in graph.pins.items():
            if self.device[v] == -1:
                self._assign(v, pin)
        now: float | None = 0.0
        while now is not None and self.looks < _MOST_LOOKS and not self._is_behind():
            now = self._instant(now)

    def _is_behind(self) -> bool:
        part = self.looks / _MOST_LOOKS
        return part > _JUDGED_AFTER and len(self.started) * _BEHIND < part * len(self.graph)

    def _instant(self, now: float) -> float | None:
        """Ends and starts all it can now; returns the next instant, or None where nothing is left to do."""
        for d, v in enumerate(self.running):
            if v is not None and self.end_us[v] <= now:
                self.running[d] = None
                self._release_readers(v)
                self.awake_for[d] = self._favourite(v, d)
        while self.looks < _MOST_LOOKS:
            idle = [d for d, v in enumerate(self.running) if v is None]
            starts = [start for d in idle if (start := self._proposal(d, now)) is not None]
            if not starts:
                break
            _, _, d, v = min(starts)
            self._start(v, d, now)
        later = [self.end_us[v] for v in self.running if v is not None]
        later += [at for d, v in enumerate(self.running) if v is None for at, *_ in self._starts(d) if at > now]
        if not later and self.ready and self.looks < _MOST_LOOKS:
            self._force(now)
            return now
        return min(later, default=None)

    def _release_readers(self, v: int) -> None:
        for w in self.graph.successors[v]:
            self.missing[w] -= 1
            if not self.missing[w]:
                self.ready.add(w)

    def _favourite(self, v: int, d: int) -> int | None:
        """The child that device d waits for."""
        child = self.child[v]
        if child is None or child not in self.ready or self.device[child] not in (-1, d):
            return None
        here = self._schedule_us(child, d)
        return child if all(here <= self._schedule_us(child, e) for e in range(len(self.speed))) else None

    def _starts(self, d: int) -> list[_Start]:
        """The ops that could start on d, the earliest first. None where too many ops are ready: then the run is over."""
        if self.looks + len(self.ready) > _MOST_LOOKS:
            self.looks = _MOST_LOOKS
            return []
        return sorted((self._schedule_us(v, d), self.graph.rank[v], d, v) for v in self.ready if self._fits(v, d))

    def _proposal(self, d: int, now: float) -> _Start | None:
        starts = [start for start in self._starts(d) if start[0] <= now]
        child = self.awake_for[d]
        if child is None or child not in self.ready or not self._fits(child, d):
            return starts[0] if starts else None
        urgent = (start for start in starts if start[3] != child and self._could_start_everywhere(start[3], now))
        return next(urgent, None) or next((start for start in starts if start[3] == child), None)

    def _could_start_everywhere(self, v: int, now: float) -> bool:
        return all(self._schedule_us(v, d) <= now for d in range(len(self.speed)) if self._fits(v, d))

    def _fits(self, v: int, d: int) -> bool:
        if self.device[v] == -1:
            return self.needed_bytes[v] + self.persistent_bytes[v] <= self.room[d]
        return self.device[v] == d and self.needed_bytes[v] <= self.room[d]

    def _schedule_us(self, v: int, d: int) -> float:
        """The time at which v could start on d: all that one op still has to send there counts as one transfer."""
        self.looks += 1 + len(self.graph.inputs[v])
        at, channel_us = self.free_us[d], self.channel_us[d]
        to_send: dict[int, float] = {}
        for t in self.graph.inputs[v]:
            producer = self.graph.tensors[t].producer
            if self.device[producer] == d or (t, d) in self.arrival_us:
                at = max(at, self.arrival_us.get((t, d), self.end_us[producer]))
            else:
                to_send[producer] = to_send.get(producer, 0.0) + self._transfer_us(t, d)
        for producer, transfer_us in to_send.items():
            channel_us = max(self.end_us[producer], self.channel_us[self.device[producer]], channel_us) + transfer_us
            at = max(at, channel_us)
        return at

    def _transfer_us(self, t: int, d: int) -> float:
        tensor = self.graph.tensors[t]
        return self.links[self.device[tensor.producer]][d].transfer_us(tensor.bytes)

    def _start(self, v: int, d: int, now: float) -> None:
        for t in self.graph.inputs[v]:
            self._receive(t, d)
        if self.device[v] == -1:
            self._assign(v, d)
        begin_us = max(now, self._schedule_us(v, d))
        self.end_us[v] = self.free_us[d] = begin_us + self.graph.ops[v].compute_us / self.speed[d]
        self.running[d], self.awake_for[d] = v, None
        self.ready.discard(v)
        self.started.append(v)
        self.room[d] -= sum(self.graph.tensors[t].bytes for t in self.graph.outputs[v])

    def _assign(self, v: int, d: int) -> None:
        self.room[d] -= self.persistent_bytes[v]
        for w in self.members[v]:
            self.device[w] = d

    def _receive(self, t: int, d: int) -> None:
        """Sends tensor t to device d, unless it is there, and frees it where this was its last reader."""
        tensor = self.graph.tensors[t]
        source = self.device[tensor.producer]
        if source != d and (t, d) not in self.arrival_us:
            transfer_us = self._transfer_us(t, d)
            send_us = max(self.end_us[tensor.producer], self.channel_us[source])
            receive_us = max(send_us, self.channel_us[d])
            self.channel_us[source], self.channel_us[d] = send_us + transfer_us, receive_us + transfer_us
            self.arrival_us[t, d] = receive_us + transfer_us
        self.unread[t] -= 1
        if not self.unread[t]:
            self.room[source] += tensor.bytes

    def _force(self, now: float) -> None:
        """Starts the first ready op where it has to run, or where most room is."""
        v = min(self.ready, key=self.graph.rank.__getitem__)
        d = self.device[v] if self.device[v] != -1 else max(range(len(self.room)), key=lambda d: (self.room[d], -d))
        self._start(v, d, now)
