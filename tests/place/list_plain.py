"""The list scheduler (`baechi_ext.place.list_scheduler` says what it does) a second time, in plain Python: the kernel is held to it."""

import heapq
from collections.abc import Sequence

from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.place.list_scheduler import FavouriteChild, Runner, Schedule

_UNPLACED = -1
_NEVER = float("inf")


def turned_round(graph: OpGraph) -> OpGraph:
    """The same ops with every edge in the other direction, each (tensor, reader) a tensor of its own."""
    ids = [op.id for op in graph.ops]
    edges = [
        (ids[w], ids[tensor.producer], tensor.bytes, f"{t}:{w}") for t, tensor in enumerate(graph.tensors) for w in tensor.readers
    ]
    return OpGraph.from_edges(graph.ops, edges, name=graph.name)


def turned_round_links(cluster: Cluster) -> Cluster:
    pairs = {(target, source): link for (source, target), link in cluster.pairs.items()}
    return Cluster(cluster.devices, cluster.default, pairs, cluster.parallel_transfers)


class PlainRun:
    """The state of one run; `run` does it."""

    def __init__(self, graph: OpGraph, cluster: Cluster, reluctance: float, favourite_child: Sequence[int | None] | None) -> None:
        n, k = len(graph), len(cluster)
        self.graph = graph
        self.devices = range(k)
        self.reluctance = reluctance
        self.favourite_child = favourite_child
        self.ranks = [-tail for tail in graph.tails_us]
        self.speed = [d.speed for d in cluster.devices]
        self.compares_speeds = len(set(self.speed)) > 1
        self.parallel = cluster.parallel_transfers
        links = cluster.link_table()
        self.latency_us = [[x.latency_us + x.send_us for x in row] for row in links]
        self.us_per_byte = [[x.us_per_byte + x.send_us_per_byte for x in row] for row in links]
        self.links = links
        self.receiving = any(x.receive_us or x.receive_us_per_byte for row in links for x in row)
        self.memory = _Memory(graph, cluster)
        self.group_us = [sum(graph.ops[w].compute_us for w in mates) for mates in self.memory.mates]
        # Per op.
        self.device = [_UNPLACED] * n
        self.missing = [len(i) for i in graph.inputs]
        self.begun, self.done = [False] * n, [False] * n
        self.end_us = [0.0] * n
        self.least_transfer_us = [0.0] * n
        self.times_parked = [0] * n
        self.started: list[int] = []
        self.ready_us = 0.0
        # Per device. The queues are cleaned lazily: an entry counts only while its op has not begun and may run there.
        self.running = [False] * k
        self.free_us, self.out_free_us, self.in_free_us = [0.0] * k, [0.0] * k, [0.0] * k
        self.load_us = [0.0] * k
        self.awake_for: list[int | None] = [None] * k
        self.waiting: list[list[tuple[float, float, int]]] = [[] for _ in self.devices]
        self.startable: list[list[tuple[float, int]]] = [[] for _ in self.devices]
        self.parked: list[list[tuple[float, int]]] = [[] for _ in self.devices]
        self.stuck: list[tuple[float, int]] = []
        self.alarm_us = [_NEVER] * k
        # Per tensor: when its copies arrive, and where they have been taken in.
        self.arrival_us: list[dict[int, float]] = [{} for _ in graph.tensors]
        self.taken_in: set[tuple[int, int]] = set()
        self.ends: list[tuple[float, int]] = []

    def run(self) -> None:
        """Places and orders all ops: `device` and `started` say where and in which order."""
        for v, pin in self.graph.pins.items():
            if self.device[v] == _UNPLACED:
                self._assign(v, pin)
        for v, count in enumerate(self.missing):
            if count == 0:
                self._release(v)
        now = 0.0
        while True:
            ended = []
            while self.ends and self.ends[0][0] <= now:
                _, v = heapq.heappop(self.ends)
                self._end(v)
                ended.append(v)
            if self.favourite_child is not None:
                for v in ended:
                    self._stay_awake(v, self.favourite_child[v])
            self._dispatch(now)
            if self._next_us() == _NEVER and not self._force(now):
                if len(self.started) < len(self.device) and self.compares_speeds:
                    self.compares_speeds = False
                    continue
                return
            now = self._next_us()

    def _next_us(self) -> float:
        """The time at which something ends, or a device wants to be asked again."""
        return min(self.ends[0][0] if self.ends else _NEVER, *self.alarm_us)

    def _dispatch(self, now: float) -> None:
        """Commits the best proposal of the idle devices until none of them has one; then sets their alarms."""
        idle = [d for d in self.devices if not self.running[d]]
        self.alarm_us = [_NEVER] * len(self.devices)
        while idle:
            best: tuple[float, float, float, int, int] | None = None
            for d in idle:
                v = self._propose(d, now)
                if v is not None:
                    schedule_us = max(self._data_ready(v, d)[0], self.free_us[d])
                    load_us = (self.load_us[d] + self.group_us[v]) / self.speed[d]
                    proposal = (schedule_us, self.ranks[v], load_us, d, v)
                    if best is None or proposal < best:
                        best = proposal
            if best is None:
                break
            self._start(best[4], best[3], now)
            idle.remove(best[3])
        for d in idle:
            if self.waiting[d]:
                self.alarm_us[d] = min(self.alarm_us[d], self.waiting[d][0][0])

    def _propose(self, d: int, now: float) -> int | None:
        """The op that idle device d would start now, or None."""
        waiting, startable = self.waiting[d], self.startable[d]
        while waiting and waiting[0][0] <= now:
            _, rank, v = heapq.heappop(waiting)
            if self._may_start(v, d, now):
                heapq.heappush(startable, (rank, v))
        while startable and not self._may_start(startable[0][1], d, now):
            heapq.heappop(startable)
        first = startable[0][1] if startable else None
        if first is not None and self._better_elsewhere(first, d, now):
            first = None
        favourite = self.awake_for[d]
        if favourite is None or first == favourite:
            return first
        taken = self.begun[favourite] or self.device[favourite] not in (_UNPLACED, d)
        if taken or not self._fits(favourite, d) or self._better_elsewhere(favourite, d, now):
            self.awake_for[d] = None
            return first
        if first is not None and self._urgent(first, now):
            return first
        arrives_us = self._data_ready(favourite, d)[0]
        if arrives_us <= now:
            return favourite
        self.alarm_us[d] = min(self.alarm_us[d], arrives_us)
        return None

    def _urgent(self, v: int, now: float) -> bool:
        """True if v could start on every device that holds it, so that waiting can't spare it a transfer."""
        devices = self.devices if self.device[v] == _UNPLACED else (self.device[v],)
        return all(self._data_ready(v, d)[0] <= now for d in devices if self._fits(v, d))

    def _may_start(self, v: int, d: int, now: float) -> bool:
        """True if v may start on d now. Where it may later, it is put back into the queue it has to wait in."""
        if self.begun[v] or self.device[v] != _UNPLACED:
            return not self.begun[v] and self.device[v] == d
        at = self._eligible_us(v, d)
        if at > now:
            heapq.heappush(self.waiting[d], (at, self.ranks[v], v))
            return False
        if self._fits(v, d):
            return True
        heapq.heappush(self.parked[d], (self._needed_bytes(v, d), v))
        self.times_parked[v] += 1
        if self.times_parked[v] >= len(self.devices):
            heapq.heappush(self.stuck, (self.ranks[v], v))
        return False

    def _better_elsewhere(self, v: int, d: int, now: float) -> bool:
        """True if a faster device is expected to end the unplaced op v earlier, behind its share of all work that is ready."""
        if not self.compares_speeds or self.device[v] != _UNPLACED:
            return False
        work_us = self.graph.ops[v].compute_us
        end_us = now + work_us / self.speed[d]
        queue_us = (self.ready_us - work_us) / sum(self.speed)
        return any(
            self.speed[e] > self.speed[d]
            and max(self.free_us[e], now) + queue_us + work_us / self.speed[e] < end_us
            and self._data_ready(v, e)[0] + work_us / self.speed[e] < end_us
            and self._fits(v, e)
            for e in self.devices
        )

    def _force(self, now: float) -> bool:
        """Starts an op that fits nowhere on the device whose limit it exceeds least; False where no op is left."""
        while self.stuck:
            _, v = heapq.heappop(self.stuck)
            if not self.begun[v] and self.device[v] == _UNPLACED:
                d = min(self.devices, key=lambda d: self._needed_bytes(v, d) - self.memory.room[d])
                self._start(v, d, max(now, self._data_ready(v, d)[0]))
                return True
        return False

    def _eligible_us(self, v: int, d: int) -> float:
        """The time from which d may take the unplaced op v."""
        data_us, transfer_us = self._data_ready(v, d)
        return data_us + self.reluctance * max(0.0, transfer_us - self.least_transfer_us[v])

    def _data_ready(self, v: int, d: int) -> tuple[float, float]:
        """The time at which the inputs of v are, or could be, on device d, and the transfer time that still has to be spent on that."""
        device, tensors = self.device, self.graph.tensors
        latest = spent = 0.0
        incoming = self.in_free_us[d]
        for t in self.graph.inputs[v]:
            tensor = tensors[t]
            source = device[tensor.producer]
            at = self.end_us[tensor.producer]
            if source != d:
                copy_us = self.arrival_us[t].get(d)
                if copy_us is not None:
                    at = copy_us
                else:
                    transfer_us = self.latency_us[source][d] + tensor.bytes * self.us_per_byte[source][d]
                    spent += transfer_us
                    if self.parallel or not transfer_us:
                        at += transfer_us
                    else:
                        at = incoming = max(at, incoming, self.out_free_us[source]) + transfer_us
            if at > latest:
                latest = at
        return latest, spent

    def _fits(self, v: int, d: int) -> bool:
        return not self.memory.limited or self.device[v] == d or self._needed_bytes(v, d) <= self.memory.room[d]

    def _needed_bytes(self, v: int, d: int) -> float:
        copies = 0.0
        for t in self.graph.inputs[v]:
            tensor = self.graph.tensors[t]
            if self.device[tensor.producer] != d and d not in self.arrival_us[t]:
                copies += tensor.bytes
        return copies + self.memory.group_bytes[v] + self.memory.output_bytes[v] + self.memory.working_bytes[v]

    def _release(self, v: int) -> None:
        """All inputs of v have been produced: it waits at its device, or at all of them."""
        self.ready_us += self.graph.ops[v].compute_us
        self._offer(v)

    def _offer(self, v: int) -> None:
        d = self.device[v]
        if d != _UNPLACED:
            heapq.heappush(self.waiting[d], (self._data_ready(v, d)[0], self.ranks[v], v))
            return
        self.least_transfer_us[v] = min(self._data_ready(v, d)[1] for d in self.devices)
        for d in self.devices:
            heapq.heappush(self.waiting[d], (self._eligible_us(v, d), self.ranks[v], v))

    def _send(self, t: int, d: int) -> bool:
        """Enters the transfer of the finished tensor t to device d; False where it is there or on its way."""
        tensor = self.graph.tensors[t]
        source = self.device[tensor.producer]
        if source == d or d in self.arrival_us[t]:
            return False
        at = self.end_us[tensor.producer]
        transfer_us = self.latency_us[source][d] + tensor.bytes * self.us_per_byte[source][d]
        if self.parallel or not transfer_us:
            at += transfer_us
        else:
            at = max(at, self.in_free_us[d], self.out_free_us[source]) + transfer_us
            self.in_free_us[d] = self.out_free_us[source] = at
        self.arrival_us[t][d] = at
        self.memory.room[d] -= tensor.bytes
        return True

    def _assign(self, v: int, d: int) -> Sequence[int]:
        members = self.memory.mates[v]
        for w in members:
            self.device[w] = d
            self.load_us[d] += self.graph.ops[w].compute_us
        self.memory.room[d] -= self.memory.group_bytes[v]
        return members

    def _place(self, v: int, d: int) -> None:
        """Gives v and the other ops of its colocation group device d."""
        members = self._assign(v, d)
        nearer: dict[int, None] = {}
        for w in members:
            for t in self.graph.inputs[w]:
                if self.done[self.graph.tensors[t].producer] and self._send(t, d):
                    nearer.update(dict.fromkeys(self.graph.tensors[t].readers))
            if w != v and self.missing[w] == 0:
                self._offer(w)
        for w in nearer:
            if self.device[w] == _UNPLACED and self.missing[w] == 0:
                heapq.heappush(self.waiting[d], (self._eligible_us(w, d), self.ranks[w], w))

    def _start(self, v: int, d: int, now: float) -> None:
        self.ready_us -= self.graph.ops[v].compute_us
        duration_us = self.graph.ops[v].compute_us / self.speed[d]
        if self.receiving:
            duration_us += self._receiving_us(v, d)
        if self.device[v] == _UNPLACED:
            self._place(v, d)
        self.begun[v] = self.running[d] = True
        self.awake_for[d] = None
        self.started.append(v)
        self.end_us[v] = self.free_us[d] = now + duration_us
        self.memory.room[d] -= self.memory.output_bytes[v] + self.memory.working_bytes[v]
        heapq.heappush(self.ends, (now + duration_us, v))

    def _receiving_us(self, v: int, d: int) -> float:
        """The time of device d itself for taking in those inputs of v that none of its ops has read before."""
        total = 0.0
        for t in self.graph.inputs[v]:
            tensor = self.graph.tensors[t]
            source = self.device[tensor.producer]
            if source != d and (t, d) not in self.taken_in:
                self.taken_in.add((t, d))
                total += self.links[source][d].receiving_us(tensor.bytes)
        return total

    def _end(self, v: int) -> None:
        d = self.device[v]
        self.running[d], self.done[v] = False, True
        room = self.memory.room
        room[d] += self.memory.working_bytes[v]
        for t in self.graph.inputs[v]:
            self.memory.unread[t] -= 1
            if self.memory.unread[t] == 0:
                tensor = self.graph.tensors[t]
                room[self.device[tensor.producer]] += tensor.bytes
                for e in self.arrival_us[t]:
                    room[e] += tensor.bytes
                    self._unpark(e)
                self._unpark(self.device[tensor.producer])
        self._unpark(d)
        for t in self.graph.outputs[v]:
            readers = self.graph.tensors[t].readers
            for e in sorted({self.device[w] for w in readers} - {d, _UNPLACED}):
                self._send(t, e)
            for w in readers:
                self.missing[w] -= 1
                if self.missing[w] == 0:
                    self._release(w)

    def _unpark(self, d: int) -> None:
        parked = self.parked[d]
        while parked and parked[0][0] <= self.memory.room[d]:
            _, v = heapq.heappop(parked)
            self.times_parked[v] -= 1
            if not self.begun[v] and self.device[v] == _UNPLACED:
                heapq.heappush(self.waiting[d], (self._eligible_us(v, d), self.ranks[v], v))

    def _stay_awake(self, v: int, child: int | None) -> None:
        """The device of v, which just ended, stays awake for a favourite child that is ready and can start nowhere earlier."""
        d = self.device[v]
        if child is None or self.missing[child] or self.begun[child] or self.device[child] not in (_UNPLACED, d):
            return
        here = max(self._data_ready(child, d)[0], self.free_us[d])
        if all(here <= max(self._data_ready(child, e)[0], self.free_us[e]) for e in self.devices):
            self.awake_for[d] = child


class _Memory:
    """Memory as the scheduler sees it: persistent bytes by group, tensors while they have readers left, copies with them."""

    def __init__(self, graph: OpGraph, cluster: Cluster) -> None:
        limits = [d.memory_bytes for d in cluster.devices]
        self.limited = any(limit is not None for limit in limits)
        self.room = [float("inf") if limit is None else float(limit) for limit in limits]
        self.unread = [len(t.readers) for t in graph.tensors]
        self.mates = [graph.groups[op.colocation] if op.colocation is not None else (v,) for v, op in enumerate(graph.ops)]
        persistent = {name: sum(graph.ops[v].persistent_bytes for v in members) for name, members in graph.groups.items()}
        self.group_bytes = [op.persistent_bytes if op.colocation is None else persistent[op.colocation] for op in graph.ops]
        self.output_bytes = [sum(graph.tensors[t].bytes for t in outputs) for outputs in graph.outputs]
        self.working_bytes = [
            op.temporary_bytes + max(0, op.output_bytes - held) for op, held in zip(graph.ops, self.output_bytes, strict=True)
        ]


def plain_runner(graph: OpGraph, cluster: Cluster, favourite_child: FavouriteChild | None) -> Runner:
    """The scheduler as `list_scheduler.runner` gives it."""
    turned: list[OpGraph | Cluster] = []

    def run(reluctance: float, turn: bool, lowered_bytes: Sequence[float] | None) -> Schedule:
        if turn and not turned:
            turned.extend((turned_round(graph), turned_round_links(cluster)))
        child = favourite_child if not turn or favourite_child is None else _favourite_parent(favourite_child)
        state = PlainRun(*(turned if turn else (graph, cluster)), reluctance, child)
        if lowered_bytes is not None:
            state.memory.room = [room - less for room, less in zip(state.memory.room, lowered_bytes, strict=True)]
        state.run()
        return Schedule(tuple(state.device), tuple(state.started[::-1] if turn else state.started))

    return run


def _favourite_parent(favourite_child: FavouriteChild) -> list[int | None]:
    favourite_parent: list[int | None] = [None] * len(favourite_child)
    for parent, child in enumerate(favourite_child):
        if child is not None:
            favourite_parent[child] = parent
    return favourite_parent
