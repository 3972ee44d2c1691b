"""Exhaustive search over placements and orders: what the kernel needs, and what it finds."""

from collections.abc import Collection, Iterator, Sequence
from itertools import permutations, product
from math import factorial, prod
from typing import Any

import numpy as np

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.exact import records_kernel as records
from baechi_ext.place.exact import search_kernel
from baechi_ext.place.trial import Trial
from baechi_ext.simulate import Simulator

STEPS_AT_A_TIME = 20_000


class Search:
    """A search for plans that beat `best_us`; `run` goes on with it. What it has not found when it is `done` does not exist."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.done = False
        self._instance = make_instance(simulator)
        self._state = make_search()

    @property
    def steps(self) -> int:
        """Steps done so far."""
        return int(self._state["cursor"][0, records.NODES])

    def run(self, best_us: float, steps: int = STEPS_AT_A_TIME) -> Trial | None:
        """A valid plan faster than `best_us`, or None where these steps brought none."""
        until = self.steps + steps
        while not self.done and self.steps < until:
            self._state["best_us"] = best_us
            status = search_kernel.search(self._instance, self._state, until - self.steps)
            self.done = status == records.DONE
            if status == records.FOUND:
                trial = self._trial()
                if trial.valid and trial.timeline.makespan_us < best_us:
                    return trial
        return None

    def _trial(self) -> Trial:
        n, state = len(self.simulator.graph), self._state[0]
        placement = tuple(state["actual"][:n].tolist())
        priority = tuple(map(float, state["sequence"][state["cursor"][records.LEVEL], :n].tolist()))
        return Trial(placement, priority, self.simulator)


def is_small(graph: OpGraph, cluster: Cluster) -> bool:
    """True if the search's records have room for the instance."""
    edges = sum(map(len, graph.inputs))
    sizes = ((len(graph), records.OPS), (len(cluster), records.DEVICES), (len(graph.tensors), records.TENSORS), (edges, records.EDGES))
    return all(size <= largest for size, largest in sizes)


def make_instance(simulator: Simulator) -> np.ndarray:
    """The simulator's graph and cluster as a record."""
    graph, cluster = simulator.graph, simulator.cluster
    links, tensors, k = cluster.link_table(), graph.tensors, len(cluster)
    speeds = np.array([d.speed for d in cluster.devices])
    compute = np.array([op.compute_us for op in graph.ops], np.float64)
    duration = compute[:, None] / speeds[None, :]
    charged = ("send_us", "send_us_per_byte", "receive_us", "receive_us_per_byte")
    twin, labels = exchangeable(cluster, set(graph.pins.values()))

    def table(cost: str) -> list[list[list[float]]]:
        return [[[getattr(links[i][j], cost)(t.bytes) for t in tensors] for j in range(k)] for i in range(k)]

    values: dict[str, Any] = {
        "ops": len(graph),
        "devices": k,
        "tensors": len(tensors),
        "exchanges": len(labels),
        "parallel": cluster.parallel_transfers,
        "limited": any(d.memory_bytes is not None for d in cluster.devices),
        "charges": any(getattr(link, cost) for row in links for link in row for cost in charged),
        "order": graph.order,
        "producer": [t.producer for t in tensors],
        "name_rank": graph.columns.name_rank,
        "duration_us": duration,
        "least_us": duration.min(axis=1),
        "load_us": compute / speeds.sum(),
        "tail_us": graph.tails_us,
        "transfer_us": table("transfer_us"),
        "send_us": table("sending_us"),
        "receive_us": table("receiving_us"),
        "tensor_bytes": [t.bytes for t in tensors],
        "home_bytes": graph.columns.home_bytes,
        "persistent_bytes": [op.persistent_bytes for op in graph.ops],
        "working_bytes": graph.columns.working_bytes(),
        "live_bytes": graph.columns.charged_bytes(),
        "memory_bytes": cluster.rooms,
        "twin": twin,
        "labels": labels,
    }
    placed = graph.units()
    lists = {"inputs": graph.inputs, "outputs": graph.outputs, "readers": [t.readers for t in tensors], "members": placed}
    for name, some in lists.items():
        values[name] = [x for things in some for x in things]
        values[f"{name}_from"] = np.cumsum([0, *map(len, some)])
    values["units"] = len(placed)
    values["pin"] = [graph.pins.get(unit[0], -1) for unit in placed]
    return _record(records.INSTANCE, values)


def make_search() -> np.ndarray:
    """The search before its first step."""
    return _record(records.SEARCH, {"cursor": [0, -1, -1, 0], "choice": [-1] * records.OPS, "placement": [-1] * records.OPS})


def _record(dtype: np.dtype, values: dict[str, Any]) -> np.ndarray:
    """One record; arrays that are smaller than their fields stand at the beginning."""
    record = np.zeros(1, dtype)
    for name, value in values.items():
        array = np.asarray(value)
        if array.size:
            corner: tuple[Any, ...] = (0, *map(slice, array.shape))
            record[name][corner] = array
    return record


def exchangeable(cluster: Cluster, pinned: Collection[int] = ()) -> tuple[list[int], list[tuple[int, ...]]]:
    """For each device the first that is like it in all but the name, links included; and all exchanges of such devices. A device
    to which ops are `pinned` is like no other.

    Only the order of two transfers that tie depends on which is which. Where there are too many exchanges to try, no devices are
    said to be alike, unless all transfers run in parallel: then there are no such ties, and the first exchange, which is none, is enough.
    """
    k = len(cluster)
    twin = [next(e for e in range(d + 1) if e == d or (not {d, e} & set(pinned) and _alike(cluster, e, d))) for d in range(k)]
    classes = [[d for d in range(k) if twin[d] == first] for first in sorted(set(twin))]
    same = tuple(range(k))
    if cluster.parallel_transfers:
        return twin, [same]
    if prod(factorial(len(alike)) for alike in classes) > records.EXCHANGES:
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
    """True if exchanging two devices changes nothing but their names."""
    a, b = cluster.devices[d], cluster.devices[e]
    swap = {d: e, e: d}
    pairs = [(i, j) for i in range(len(cluster)) for j in range(len(cluster)) if i != j and {i, j} & {d, e}]
    same_links = all(cluster.link(i, j) == cluster.link(swap.get(i, i), swap.get(j, j)) for i, j in pairs)
    return (a.speed, a.memory_bytes) == (b.speed, b.memory_bytes) and same_links
