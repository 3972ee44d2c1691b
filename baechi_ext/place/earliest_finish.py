"""The schedule of HEFT: heterogeneous earliest finish time (Topcuoglu et al., IEEE Trans. Parallel Distributed Systems 13, 2002).

Ops in the order of their upward ranks (the longest path to the end, with mean compute and transfer times), each on the device
where it ends first; gaps between ops that are placed already are used. What the publication does not have:

- transfers hold the sender's outgoing and the receiver's incoming channel, and use gaps in them, where the cluster has channels;
- a tensor is sent once to a device, and what receiving takes from the device lengthens the op that reads it first;
- the first op of a colocation group decides for all members, and a device without room for them is left out;
- of devices where an op ends at the same time it goes to the one from which sending takes the least.
"""

from bisect import bisect_left, bisect_right

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.chunks import Unit, ranks
from baechi_ext.place.list_scheduler import Schedule
from baechi_ext.place.sct_lp import pair_costs_us


def earliest_finishes(graph: OpGraph, cluster: Cluster) -> list[Schedule]:
    """The schedule; where memory is limited also one that counts the outputs of ops, too, as if none were freed."""
    limited = any(device.memory_bytes is not None for device in cluster.devices)
    runs = (_Run(graph, cluster, outputs) for outputs in ((False, True) if limited else (False,)))
    return [Schedule(tuple(run.device), tuple(run.order())) for run in runs]


def upward_ranks_us(graph: OpGraph, cluster: Cluster) -> list[float]:
    """For each op the longest path from its start to the end of the step: mean compute times, mean transfer times between ops."""
    slowness = sum(1 / device.speed for device in cluster.devices) / len(cluster)
    costs = pair_costs_us(graph, cluster)
    rank = [0.0] * len(graph)
    for v in reversed(graph.order):
        after = max((costs[v, w] + rank[w] for w in graph.successors[v]), default=0.0)
        rank[v] = graph.ops[v].compute_us * slowness + after
    return rank


class Slots:
    """The times at which a device or channel is busy: disjoint intervals, those that touch joined."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []

    def earliest(self, ready_us: float, duration_us: float) -> float:
        """The first time from `ready_us` on at which it is free for so long."""
        at = ready_us
        for i in range(bisect_right(self.ends, at), len(self.ends)):
            if at + duration_us <= self.starts[i]:
                break
            at = self.ends[i]
        return at

    def take(self, start_us: float, duration_us: float) -> None:
        """Makes it busy for a time that `earliest` found to be free."""
        if duration_us:
            end_us = start_us + duration_us
            touched = slice(bisect_left(self.ends, start_us), bisect_right(self.starts, end_us))
            self.starts[touched] = [min([start_us, *self.starts[touched]])]
            self.ends[touched] = [max([end_us, *self.ends[touched]])]


class _Run:
    """One run of HEFT: `device` and `start_us` of every op."""

    def __init__(self, graph: OpGraph, cluster: Cluster, counts_outputs: bool) -> None:
        self.graph = graph
        self.links = cluster.link_table()
        self.speed = [d.speed for d in cluster.devices]
        self.parallel = cluster.parallel_transfers
        self.room = cluster.rooms
        columns = graph.columns
        self.held_bytes: list[float] = (columns.held_bytes() if counts_outputs else columns.persistent_bytes).tolist()
        mean_bytes = sum(tensor.bytes for tensor in graph.tensors) / max(1, len(graph.tensors))
        self.sending_us = [sum(x.transfer_us(mean_bytes) for e, x in enumerate(row) if e != d) for d, row in enumerate(self.links)]
        self.busy, self.sends, self.receives = ([Slots() for _ in cluster.devices] for _ in range(3))
        self.device = [-1] * len(graph)
        self.start_us, self.end_us = [0.0] * len(graph), [0.0] * len(graph)
        self.arrival_us: list[dict[int, float]] = [{} for _ in graph.tensors]
        unit_of = {v: unit for unit in graph.units() for v in unit}
        rank_us = upward_ranks_us(graph, cluster)
        topological = ranks(graph.order)
        for v in sorted(range(len(graph)), key=lambda v: (-rank_us[v], topological[v])):
            if self.device[v] < 0:
                self._choose(v, unit_of[v])
            self._commit(v, self.device[v])

    def order(self) -> list[int]:
        """The ops by their starts, in a topological order."""
        topological = ranks(self.graph.order)
        return sorted(range(len(self.graph)), key=lambda v: (self.start_us[v], topological[v]))

    def _choose(self, v: int, unit: Unit) -> None:
        """Gives the unit of v the device where v ends first, of those with room, or the one that it is pinned to."""
        needed = sum(self.held_bytes[w] for w in unit)
        roomy = [d for d, room in enumerate(self.room) if needed <= room] or [max(range(len(self.room)), key=self.room.__getitem__)]
        pin = self.graph.ops[v].pin
        among = roomy if pin is None else [pin]
        d = min(among, key=lambda d: (sum(self._slot(v, d)), self.sending_us[d], d))
        self.room[d] -= needed
        for w in unit:
            self.device[w] = d

    def _slot(self, v: int, d: int) -> tuple[float, float]:
        """The time at which v could start on device d, and the time that it would run."""
        ready_us, taking_in_us = 0.0, 0.0
        for arrival_us, receiving_us in self._inputs(v, d):
            ready_us = max(ready_us, arrival_us)
            taking_in_us += receiving_us
        duration_us = self.graph.ops[v].compute_us / self.speed[d] + taking_in_us
        return self.busy[d].earliest(ready_us, duration_us), duration_us

    def _inputs(self, v: int, d: int, commit: bool = False) -> list[tuple[float, float]]:
        """For each input of v, when it is on d, and what taking it in costs d.

        With `commit` those that are not there yet are sent: they hold their channels.
        """
        found, incoming_us = [], 0.0
        for t in sorted(self.graph.inputs[v], key=lambda t: self.end_us[self.graph.tensors[t].producer]):
            tensor = self.graph.tensors[t]
            source, at = self.device[tensor.producer], self.end_us[tensor.producer]
            receiving_us = 0.0
            if source != d and d in self.arrival_us[t]:
                at = self.arrival_us[t][d]
            elif source != d:
                link = self.links[source][d]
                receiving_us = link.receiving_us(tensor.bytes)
                transfer_us = link.transfer_us(tensor.bytes) + link.sending_us(tensor.bytes)
                start_us = at
                if transfer_us and not self.parallel:
                    start_us = incoming_us = self._common_gap(source, d, max(at, incoming_us), transfer_us)
                    incoming_us += transfer_us
                at = start_us + transfer_us
                if commit:
                    self.arrival_us[t][d] = at
                    if not self.parallel:
                        self.sends[source].take(start_us, transfer_us)
                        self.receives[d].take(start_us, transfer_us)
            found.append((at, receiving_us))
        return found

    def _common_gap(self, source: int, target: int, ready_us: float, duration_us: float) -> float:
        """The first time at which both channels are free for so long."""
        at = ready_us
        while True:
            sends = self.sends[source].earliest(at, duration_us)
            at = self.receives[target].earliest(sends, duration_us)
            if at == sends:
                return at

    def _commit(self, v: int, d: int) -> None:
        start_us, duration_us = self._slot(v, d)
        self._inputs(v, d, commit=True)
        self.busy[d].take(start_us, duration_us)
        self.start_us[v], self.end_us[v] = start_us, start_us + duration_us
