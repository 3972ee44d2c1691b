"""Exhaustive search over placements and orders: what the kernel needs, and what it finds."""

from collections.abc import Iterator, Sequence
from itertools import permutations, product
from math import factorial, prod

import numpy as np

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.chunks import units
from baechi_ext.place.exact import search_kernel as kernel
from baechi_ext.place.trial import Trial
from baechi_ext.simulate import Simulator
from baechi_ext.simulate.holding import live_bytes

STEPS_AT_A_TIME = 20_000
_MOST_RELABELINGS = 120


class Search:
    """A search for plans that beat `best_us`; `run` goes on with it. What it has not found when it is `done` does not exist."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.done = False
        self._instance = make_instance(simulator)
        self._state = make_search(self._instance)

    @property
    def steps(self) -> int:
        """Steps done so far."""
        return int(self._state.cursor[kernel.NODES])

    def run(self, best_us: float, steps: int = STEPS_AT_A_TIME) -> Trial | None:
        """A valid plan faster than `best_us`, or None where these steps brought none."""
        until = self.steps + steps
        while not self.done and self.steps < until:
            self._state.best_us[0] = best_us
            status = kernel.search(self._instance, self._state, until - self.steps)
            self.done = status == kernel.DONE
            if status == kernel.FOUND:
                trial = self._trial()
                if trial.valid and trial.timeline.makespan_us < best_us:
                    return trial
        return None

    def _trial(self) -> Trial:
        placement = tuple(self._state.actual.tolist())
        priority = tuple(map(float, self._state.sequence[self._state.cursor[kernel.LEVEL]].tolist()))
        return Trial(placement, priority, self.simulator.run(placement, priority))


def make_instance(simulator: Simulator) -> kernel.Instance:
    """The simulator's graph and cluster as arrays."""
    graph, cluster = simulator.graph, simulator.cluster
    links, tensors, k = cluster.link_table(), graph.tensors, len(cluster)
    inputs, inputs_from = _flat(graph.inputs)
    outputs, outputs_from = _flat(graph.outputs)
    readers, readers_from = _flat([t.readers for t in tensors])
    members, members_from = _flat(units(graph))
    speeds = np.array([d.speed for d in cluster.devices])
    compute = _floats([op.compute_us for op in graph.ops])
    duration = compute[:, None] / speeds[None, :]
    charged = ("send_us", "send_us_per_byte", "receive_us", "receive_us_per_byte")

    def table(cost: str) -> np.ndarray:
        return _floats([[[getattr(links[i][j], cost)(t.bytes) for t in tensors] for j in range(k)] for i in range(k)]).reshape(k, k, -1)

    twin, relabelings = exchangeable(cluster)
    return kernel.Instance(
        order=_ints(graph.order),
        inputs=inputs,
        inputs_from=inputs_from,
        outputs=outputs,
        outputs_from=outputs_from,
        readers=readers,
        readers_from=readers_from,
        producer=_ints([t.producer for t in tensors]),
        name_rank=_ints(_name_ranks(graph)),
        members=members,
        members_from=members_from,
        duration_us=duration,
        least_us=duration.min(axis=1),
        load_us=compute / speeds.sum(),
        tail_us=_floats(simulator.tails_us),
        transfer_us=table("transfer_us"),
        send_us=table("sending_us"),
        receive_us=table("receiving_us"),
        tensor_bytes=_floats([t.bytes for t in tensors]),
        persistent_bytes=_floats([op.persistent_bytes for op in graph.ops]),
        working_bytes=_floats([_working_bytes(graph, v) for v in range(len(graph))]),
        live_bytes=_floats([live_bytes(graph, v) for v in range(len(graph))]),
        memory_bytes=_floats([np.inf if d.memory_bytes is None else d.memory_bytes for d in cluster.devices]),
        twin=_ints(twin),
        relabelings=_ints(relabelings),
        parallel=cluster.parallel_transfers,
        limited=any(d.memory_bytes is not None for d in cluster.devices),
        charges=any(getattr(link, cost) for row in links for link in row for cost in charged),
    )


def make_search(p: kernel.Instance) -> kernel.Search:
    """The search before its first step."""
    n, k = len(p.order), len(p.memory_bytes)
    copies = len(p.producer) * k
    levels = n + 2

    def floats(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.float64)

    def ints(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.int64)

    def flags(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.bool_)

    return kernel.Search(
        cursor=np.array([0, -1, -1, 0], np.int64),
        best_us=floats(1),
        placement=ints(n) - 1,
        actual=ints(n),
        choice=ints(len(p.members_from) - 1) - 1,
        now=floats(levels),
        device=ints(levels),
        start=floats(levels, n),
        end=floats(levels, n),
        missing=ints(levels, n),
        sequence=ints(levels, n),
        started=ints(levels),
        running=ints(levels, k),
        sending=flags(levels, k),
        receiving=flags(levels, k),
        copy_state=ints(levels, copies),
        copy_from=floats(levels, copies),
        copy_until=floats(levels, copies),
        taken=flags(levels, copies),
        candidate=ints(levels, n + 1),
        candidates=ints(levels),
        tried=ints(levels),
        head=floats(n),
        length=floats(n),
        tail=floats(n),
        jobs=floats(3, n + copies + 1),
        urgency=floats(k),
    )


def exchangeable(cluster: Cluster) -> tuple[list[int], list[tuple[int, ...]]]:
    """For each device the first that is like it in all but the name, links included; and all exchanges of such devices.

    Only the order of two transfers that tie depends on which is which. Where there are too many exchanges to try, no devices are
    said to be alike, unless all transfers run in parallel: then there are no such ties, and the first exchange, which is none, is enough.
    """
    k = len(cluster)
    twin = [next(e for e in range(d + 1) if e == d or _alike(cluster, e, d)) for d in range(k)]
    classes = [[d for d in range(k) if twin[d] == first] for first in sorted(set(twin))]
    same = tuple(range(k))
    if cluster.parallel_transfers:
        return twin, [same]
    if prod(factorial(len(alike)) for alike in classes) > _MOST_RELABELINGS:
        return list(same), [same]
    return twin, list(_relabelings(classes, k))


def _relabelings(classes: Sequence[Sequence[int]], k: int) -> Iterator[tuple[int, ...]]:
    for orders in product(*(permutations(alike) for alike in classes)):
        label = list(range(k))
        for alike, order in zip(classes, orders, strict=True):
            for d, e in zip(alike, order, strict=True):
                label[d] = e
        yield tuple(label)


def _alike(cluster: Cluster, d: int, e: int) -> bool:
    """Whether exchanging two devices changes nothing but their names."""
    a, b = cluster.devices[d], cluster.devices[e]
    swap = {d: e, e: d}
    pairs = [(i, j) for i in range(len(cluster)) for j in range(len(cluster)) if i != j and {i, j} & {d, e}]
    same_links = all(cluster.link(i, j) == cluster.link(swap.get(i, i), swap.get(j, j)) for i, j in pairs)
    return (a.speed, a.memory_bytes) == (b.speed, b.memory_bytes) and same_links


def _name_ranks(graph: OpGraph) -> list[int]:
    rank = [0] * len(graph.tensors)
    for outputs in graph.outputs:
        for i, t in enumerate(sorted(outputs, key=lambda t: graph.tensors[t].name)):
            rank[t] = i
    return rank


def _working_bytes(graph: OpGraph, v: int) -> float:
    op = graph.ops[v]
    return op.temporary_bytes + max(0, op.output_bytes - sum(graph.tensors[t].bytes for t in graph.outputs[v]))


def _flat(lists: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """(things, things_from) of a list of lists."""
    return _ints([x for some in lists for x in some]), _ints(np.cumsum([0, *map(len, lists)]))


def _floats(values: object) -> np.ndarray:
    return np.array(values, np.float64)


def _ints(values: object) -> np.ndarray:
    return np.array(values, np.int64)
