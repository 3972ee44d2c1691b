"""Topological chunks: runs of neighbouring ops, one per device, of equal time or equal bytes."""

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from baechi_ext.ir.op_graph import OpGraph

Unit = tuple[int, ...]

_HALVINGS = 60  # a double has 53 bits


def held_bytes(graph: OpGraph, ordered: Sequence[Unit]) -> list[float]:
    """`Columns.held_bytes` of each unit."""
    return sums(graph.columns.held_bytes().tolist(), ordered)


def sums(values: Sequence[float], ordered: Sequence[Unit]) -> list[float]:
    """For each unit, the sum of its ops' values."""
    return [values[unit[0]] if len(unit) == 1 else sum(values[v] for v in unit) for unit in ordered]


def chunks(weights: Sequence[float], shares: Sequence[float], sizes: Sequence[float], rooms: Sequence[float]) -> tuple[int, ...]:
    """A device for each of a sequence of units: the one in whose share of the total weight the unit's middle falls.

    Device d gets a part of the weight in proportion to shares[d] >= 0 (not all 0). A device whose room (bytes) the sizes would
    exceed is left for the next one; the last takes all that is left.
    """
    whole = sum(weights) / sum(shares)
    found = []
    d, done, until, held = 0, 0.0, whole * shares[0], 0.0
    for weight, size in zip(weights, sizes, strict=True):
        while d < len(shares) - 1 and (done + weight / 2 > until or held + size > rooms[d]):
            d, held = d + 1, 0.0
            until = max(until, done) + whole * shares[d]
        done += weight
        held += size
        found.append(d)
    return tuple(found)


def best_split(weights: Sequence[float], speeds: Sequence[float], sizes: Sequence[float], rooms: Sequence[float]) -> tuple[int, ...]:
    """A device for each of a sequence of units: the split into runs, device after device, whose slowest run is the fastest.

    A run takes the sum of its weights over the device's speed; its sizes stay within the device's room (bytes), but for the last
    device, which takes all that is left. The least longest run is found by halving an interval that holds it.
    """
    weight_until, size_until = [0.0, *accumulate(weights)], [0.0, *accumulate(sizes)]

    def ends(longest_us: float) -> list[int]:
        """The ends of the devices' runs if each takes at most that long."""
        found: list[int] = []
        i = 0
        for d, (speed, room) in enumerate(zip(speeds, rooms, strict=True)):
            i = bisect_right(weight_until, weight_until[i] + longest_us * speed, lo=i) - 1
            if d < len(speeds) - 1:
                i = min(i, bisect_right(size_until, size_until[found[-1] if found else 0] + room) - 1)
            found.append(i)
        return found

    low, high = 0.0, weight_until[-1] / min(speeds)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if ends(middle)[-1] == len(weights) else (middle, high)
    stops = ends(high)
    stops[-1] = len(weights)
    return tuple(bisect_right(stops, i) for i in range(len(weights)))


def spread(graph: OpGraph, ordered: Sequence[Unit], devices: Sequence[int]) -> tuple[int, ...]:
    """A device per unit -> a device per op; pinned ops are where they are pinned."""
    placement = [0] * len(graph)
    for unit, d in zip(ordered, devices, strict=True):
        for v in unit:
            placement[v] = d
    return graph.pinned(placement)


def ranks(order: Sequence[int]) -> tuple[float, ...]:
    """Priorities: the ops in this order."""
    rank = [0.0] * len(order)
    for i, v in enumerate(order):
        rank[v] = float(i)
    return tuple(rank)


def depth_first_order(graph: OpGraph) -> tuple[int, ...]:
    """Op positions in a topological order that follows each branch as far as it goes before it takes up the next."""
    missing = [len(i) for i in graph.inputs]
    stack = [v for v in reversed(range(len(graph))) if missing[v] == 0]
    order: list[int] = []
    while stack:
        v = stack.pop()
        order.append(v)
        released = []
        for t in graph.outputs[v]:
            for w in graph.tensors[t].readers:
                missing[w] -= 1
                if missing[w] == 0:
                    released.append(w)
        stack += reversed(released)
    return tuple(order)


def least_memory_order(graph: OpGraph) -> tuple[int, ...]:
    """Op positions in a topological order: next comes, of the ready ops, the one after which the fewest bytes are held."""
    unread = [len(t.readers) for t in graph.tensors]
    missing = [len(p) for p in graph.predecessors]
    made = [sum(graph.tensors[t].bytes for t in outputs) for outputs in graph.outputs]

    def growth(v: int) -> float:
        return made[v] - sum(graph.tensors[t].bytes for t in graph.inputs[v] if unread[t] == 1)

    known = {v: growth(v) for v in range(len(graph)) if not missing[v]}
    heap = [(bytes_, v) for v, bytes_ in known.items()]
    heapq.heapify(heap)
    order: list[int] = []
    while heap:
        bytes_, v = heapq.heappop(heap)
        if known.get(v) != bytes_:
            continue
        del known[v]
        order.append(v)
        changed = []
        for t in graph.inputs[v]:
            unread[t] -= 1
            if unread[t] == 1:
                changed += [w for w in graph.tensors[t].readers if w in known]
        for w in graph.successors[v]:
            missing[w] -= 1
            if not missing[w]:
                changed.append(w)
        for w in changed:
            known[w] = growth(w)
            heapq.heappush(heap, (known[w], w))
    return tuple(order)
