"""Heads raised by what has to share an op's device, or else be sent; the proof is in relaxation.py (7)."""

import heapq

import numpy as np
from numpy.typing import NDArray

from baechi_ext.simulate.jit import allocating_part
from baechi_ext.simulate.one_machine_kernel import one_machine

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@allocating_part
def nearby(order: Ints, edges: tuple[Ints, Ints, Floats], work: Floats, cell: Ints, most: int) -> Floats:
    """For each op, a time before which it cannot start: its nearest ancestors, up to `most`, precede it on its device or are sent to it.

    `order` is topological; `edges` are, op by op, those it follows, where these begin, and the least time to send what it reads.
    """
    before, before_from, lag = edges
    n = len(order)
    rank = np.empty(n, np.int64)
    for i in range(n):
        rank[order[i]] = i
    head, near, far = np.zeros(n), np.zeros(n), np.zeros(n)
    seen = np.full(n, -1)
    found = np.empty(most, np.int64)
    latest = np.empty(most)
    heap = [(0.0, 0)]
    heap.pop()
    for v in order:
        for j in range(before_from[v], before_from[v + 1]):
            u = before[j]
            head[v] = max(head[v], head[u] + work[u])
            if seen[u] != v:
                seen[u], near[u], far[u] = v, 0.0, lag[j]
                heapq.heappush(heap, (-float(rank[u]), u))
            far[u] = np.inf if cell[u] == cell[v] else max(far[u], lag[j])
        count = 0
        while len(heap) > 0:
            _, u = heapq.heappop(heap)
            if count == most or head[u] + work[u] + far[u] <= head[v]:
                continue
            found[count], latest[count] = u, head[u] + work[u] + far[u]
            count += 1
            for j in range(before_from[u], before_from[u + 1]):
                a = before[j]
                if seen[a] != v:
                    seen[a], near[a], far[a] = v, 0.0, 0.0
                    heapq.heappush(heap, (-float(rank[a]), a))
                near[a] = max(near[a], work[u] + near[u])
                far[a] = np.inf if cell[a] == cell[v] else max(far[a], work[u] + min(lag[j] + near[u], far[u]))
        if count > 0:
            head[v] = max(head[v], _earliest(found[:count], latest[:count], head, work, near))
    return head


@allocating_part
def _earliest(ops: Ints, latest: Floats, head: Floats, work: Floats, near: Floats) -> float:
    """The least time that is not before any of the ops has ended on the same device, or is at least its `latest`."""
    by_latest = np.argsort(-latest, kind="mergesort")
    low, high = 0, len(ops)  # of this many ops that share the device
    while low < high:
        middle = (low + high) // 2
        if _serial(ops[by_latest[:middle]], head, work, near) >= latest[by_latest[middle]]:
            high = middle
        else:
            low = middle + 1
    found = _serial(ops[by_latest[:low]], head, work, near)
    return found if low == 0 else min(found, latest[by_latest[low - 1]])


@allocating_part
def _serial(ops: Ints, head: Floats, work: Floats, near: Floats) -> float:
    """The least time from 0 to what follows the ops, where one machine does them."""
    return one_machine(ops[np.argsort(head[ops], kind="mergesort")], head, work, near)
