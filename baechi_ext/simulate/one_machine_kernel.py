"""Jackson's preemptive schedule of one machine, on which several parts of the bound rest."""

import heapq

import numpy as np
from numpy.typing import NDArray

from baechi_ext.simulate.jit import allocating_part

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@allocating_part
def one_machine(by_head: Ints, head: Floats, work: Floats, tail: Floats) -> float:
    """The optimum of one machine that may interrupt its ops: at any time the one with the longest tail of those there are."""
    heap = [(0.0, 0)]
    heap.pop()
    left = np.zeros(len(by_head))
    now = 0.0
    found = 0.0
    i = 0
    while i < len(by_head) or len(heap) > 0:
        if len(heap) == 0:
            now = max(now, head[by_head[i]])
        while i < len(by_head) and head[by_head[i]] <= now:
            left[i] = work[by_head[i]]
            heapq.heappush(heap, (-tail[by_head[i]], i))
            i += 1
        _, j = heap[0]
        if i < len(by_head) and now + left[j] > head[by_head[i]]:
            left[j] -= head[by_head[i]] - now
            now = head[by_head[i]]
        else:
            now += left[j]
            heapq.heappop(heap)
            found = max(found, now + tail[by_head[j]])
    return found
