"""The arithmetic of the lower bound; what each part proves is said in relaxation.py.

A head is a time before which an op cannot start, a tail a time that has to follow its end. A cell is a set of ops that share a device.
"""

import heapq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baechi_ext.simulate.jit import allocating_kernel, allocating_part

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


_CROWDS = 64
"""Larger crowds hardly differ from the sum of all over the number of places."""


_MOST_NEAR, _FEWEST_NEAR, _NEAR_OPS = 256, 16, 160_000
"""The relatives of an op that are considered: at most the first, and what comes to the last for all ops; none where that is fewer than
the second, as so few raise no bound by more than a hair."""


_THRESHOLDS = 8
"""So many times by which relatives may be sent are tried."""


class Relaxed(NamedTuple):
    """A graph and a cluster as the bound sees them."""

    # Of ops.
    compute_us: Floats
    persistent_bytes: Floats
    live_bytes: Floats
    cell: Ints
    """Colocation groups and ops without one, numbered from 0; in topological order of `order`."""
    order: Ints
    before: Ints
    before_from: Ints
    before_lag_us: Floats
    after: Ints
    after_from: Ints
    after_lag_us: Floats
    """Beside each op before or after: the least time from the end of one to the start of the other on two devices."""
    # Of edges: (source, target), and the least time from the source's start to the target's end on two devices.
    source: Ints
    target: Ints
    crossing_us: Floats
    # Of devices: each speed that no device with as much memory exceeds, fastest first.
    kind_speed: Floats
    kind_bytes: Floats
    total_speed: float
    num_devices: int
    rounding: float


class View(NamedTuple):
    """Heads, tails and times of ops under an assumption about cells."""

    head: Floats
    tail: Floats
    work: Floats
    """The op's time on the fastest device that can hold its cell."""


@allocating_kernel
def bound(p: Relaxed, fold_ops: int, deep_ops: int) -> float:
    """The largest of all bounds: work is folded in graphs of up to `fold_ops` ops, again under each assumption up to `deep_ops`."""
    n = len(p.order)
    head, tail = np.zeros(n), np.zeros(n)
    most = min(_MOST_NEAR, _NEAR_OPS // n)
    if p.num_devices > 1 and most >= _FEWEST_NEAR:
        work, _ = times(p, p.cell)
        head = nearby(p, p.order, (p.before, p.before_from, p.before_lag_us), work, most)
        tail = nearby(p, p.order[::-1], (p.after, p.after_from, p.after_lag_us), work, most)
    view, _ = look(p, p.cell, head, tail, n <= fold_ops)
    low = value(p, p.cell, view)
    if not np.isfinite(low):
        return longest(view)
    high = low
    for e in range(len(p.source)):
        high = max(high, view.head[p.source[e]] + p.crossing_us[e] + view.tail[p.target[e]])
    deep = n <= deep_ops
    for _ in range(60):
        inside = between(p, view, low, high)
        if high <= low * (1 + p.rounding) or (len(inside) == 0 and not deep):
            break
        middle = (low + high) / 2 if deep else median(inside)
        reached = refute(p, view, middle, deep)
        if reached > middle:
            low = max(low, min(reached, high))
        else:
            high = middle
    return max(low, min(refute(p, view, low, deep), high))


@allocating_part
def between(p: Relaxed, view: View, low: float, high: float) -> Floats:
    """The times, strictly between two others, that crossing an edge implies."""
    found = np.empty(len(p.source))
    count = 0
    for e in range(len(p.source)):
        cost = view.head[p.source[e]] + p.crossing_us[e] + view.tail[p.target[e]]
        if low < cost < high:
            found[count] = cost
            count += 1
    return found[:count]


@allocating_part
def refute(p: Relaxed, view: View, limit: float, deep: bool) -> float:
    """A time up to which the reasons hold for which no step ends within `limit`; `limit` itself, or less, where there are none.

    An edge that takes longer to cross than there is time joins the cells of its ends; so there are fewer and longer ones.
    """
    parent = np.arange(len(p.cell))
    nearest = np.inf
    head, tail = view.head, view.tail
    while True:
        joined = False
        for e in range(len(p.source)):
            cost = head[p.source[e]] + p.crossing_us[e] + tail[p.target[e]]
            if cost > limit * (1 + p.rounding):
                a, b = root(parent, p.cell[p.source[e]]), root(parent, p.cell[p.target[e]])
                if a != b:
                    parent[max(a, b)] = min(a, b)
                    nearest = min(nearest, cost)
                    joined = True
        if not joined:
            return limit
        cell = np.empty_like(p.cell)
        for v in range(len(cell)):
            cell[v] = root(parent, p.cell[v])
        seen, fits = look(p, cell, head, tail, deep)
        reached = value(p, cell, seen) if fits else np.inf
        if reached > limit:
            return min(reached, nearest)
        if not deep:
            return limit
        head, tail = seen.head, seen.tail


@allocating_part
def root(parent: Ints, c: int) -> int:
    while parent[c] != c:
        parent[c] = parent[parent[c]]
        c = parent[c]
    return c


@allocating_part
def look(p: Relaxed, cell: Ints, head: Floats, tail: Floats, fold: bool) -> tuple[View, bool]:
    """Heads and tails at least as large as those given, and whether each cell fits on some device."""
    work, fits = times(p, cell)
    load = p.compute_us / p.total_speed
    head = chain(p.order, p.before, p.before_from, work, head)
    tail = chain(p.order[::-1], p.after, p.after_from, work, tail)
    if fold:
        by_head = p.order[np.argsort(head[p.order], kind="mergesort")]
        head = folded(by_head, (p.before, p.before_from), head, work, load, cell)
        backwards = p.order[::-1]
        by_tail = backwards[np.argsort(tail[backwards], kind="mergesort")]
        tail = folded(by_tail, (p.after, p.after_from), tail, work, load, cell)
    return View(head, tail, work), fits


@allocating_part
def times(p: Relaxed, cell: Ints) -> tuple[Floats, bool]:
    """Each op's time on the fastest device that can hold its cell (the fastest of all where none can, and then False)."""
    n = len(cell)
    size = np.zeros(n + 1)
    live = np.zeros(n + 1)
    for v in range(n):
        size[cell[v]] += p.persistent_bytes[v]
        live[cell[v]] = max(live[cell[v]], p.live_bytes[v])
    work = np.empty(n)
    fits = True
    for v in range(n):
        needed = (size[cell[v]] + live[cell[v]]) * (1 - p.rounding)
        speed = p.kind_speed[0]
        if needed > p.kind_bytes[-1]:
            fits = False
        else:
            i = 0
            while needed > p.kind_bytes[i]:
                i += 1
            speed = p.kind_speed[i]
        work[v] = p.compute_us[v] / speed
    return work, fits


@allocating_part
def chain(order: Ints, before: Ints, before_from: Ints, work: Floats, least: Floats) -> Floats:
    """For each op, the longest chain that ends where it starts; at least `least`."""
    head = least.copy()
    for v in order:
        for i in range(before_from[v], before_from[v + 1]):
            u = before[i]
            head[v] = max(head[v], head[u] + work[u])
    return head


@allocating_part
def folded(order: Ints, edges: tuple[Ints, Ints], head: Floats, work: Floats, load: Floats, cell: Ints) -> Floats:
    """Heads raised by all that has to be done before: the work of all ancestors, by all devices; that of each cell, by one device.

    `order` is topological and ascending in `head`.
    """
    before, before_from = edges
    n = len(order)
    rank = np.empty(n, np.int64)
    for i in range(n):
        rank[order[i]] = i
    ancestor = np.zeros((n, n), np.bool_)
    busy_until = np.zeros(n + 1)
    raised = head.copy()
    for i in range(n):
        v = order[i]
        for j in range(before_from[v], before_from[v + 1]):
            u = before[j]
            for k in range(rank[u]):
                ancestor[i, k] |= ancestor[rank[u], k]
            ancestor[i, rank[u]] = True
            raised[v] = max(raised[v], raised[u] + work[u])
        done = 0.0
        for j in range(i):
            if ancestor[i, j]:
                u = order[j]
                done = max(done, head[u]) + load[u]
                busy_until[cell[u]] = max(busy_until[cell[u]], head[u]) + work[u]
                raised[v] = max(raised[v], busy_until[cell[u]])
        raised[v] = max(raised[v], done)
        for j in range(i):
            if ancestor[i, j]:
                busy_until[cell[order[j]]] = 0.0
    return raised


@allocating_part
def longest(view: View) -> float:
    """The longest chain."""
    found = 0.0
    for v in range(len(view.work)):
        found = max(found, view.head[v] + view.work[v] + view.tail[v])
    return found


@allocating_part
def value(p: Relaxed, cell: Ints, view: View) -> float:
    """The time of the step if cells are what shares a device; infinite where they do not fit into memory."""
    n = len(cell)
    by_head = np.argsort(view.head, kind="mergesort")
    found = max(longest(view), one_machine(by_head, view.head, p.compute_us / p.total_speed, view.tail))
    # By cell, heads ascending.
    first = np.zeros(n + 2, np.int64)
    for v in range(n):
        first[cell[v] + 1] += 1
    for c in range(n + 1):
        first[c + 1] += first[c]
    members = np.empty(n, np.int64)
    filled = first.copy()
    for v in by_head:
        members[filled[cell[v]]] = v
        filled[cell[v]] += 1
    sums = np.zeros(n)
    sizes = np.zeros(n)
    count = 0
    for c in range(n):
        inside = members[first[c] : first[c + 1]]
        if len(inside) > 0:
            for v in inside:
                sums[count] += p.compute_us[v] / p.kind_speed[0]
                sizes[count] += p.persistent_bytes[v]
            count += 1
        if len(inside) > 1:
            found = max(found, one_machine(inside, view.head, view.work, view.tail))
    if crowded(sizes[:count], p.num_devices) > p.kind_bytes[-1] * (1 + p.rounding):
        return np.inf
    return max(found, crowded(sums[:count], p.num_devices))


@allocating_part
def crowded(sizes: Floats, places: int) -> float:
    """A lower bound on what the fullest of this many equal places holds: of j * places + 1 items, j + 1 stand in one place."""
    ordered = ascending(sizes)[::-1]
    found = 0.0
    j = 1
    while j <= _CROWDS and j * places < len(ordered):
        smallest = ordered[j * places - j : j * places + 1].sum()
        found = max(found, smallest)
        j += 1
    return found


@allocating_part
def ascending(values: Floats) -> Floats:
    """Sorted by what sorts heads and tails already: `np.sort` and `np.median` are seconds more to compile."""
    return values[np.argsort(values, kind="mergesort")]


@allocating_part
def median(values: Floats) -> float:
    ordered, half = ascending(values), len(values) // 2
    return ordered[half] if len(values) % 2 == 1 else (ordered[half - 1] + ordered[half]) / 2


# Near relatives; relaxation.py (7) and (8)


@allocating_part
def nearby(p: Relaxed, order: Ints, edges: tuple[Ints, Ints, Floats], work: Floats, most: int) -> Floats:
    """For each op, a time before which it cannot start: its nearest ancestors, up to `most`, precede it on its device or are sent to it.

    `order` is topological; `edges` are, op by op, those it follows, where these begin, and the least time to send what it reads.
    """
    before, before_from, lag = edges
    n, cell = len(order), p.cell
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
            if count == most:
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
            head[v] = max(head[v], _shared_out(p, found[:count], head, far))
            late = np.flatnonzero(latest[:count] > head[v])
            if len(late) > 0:
                head[v] = max(head[v], _earliest(found[late], latest[late], head, work, near))
    return head


@allocating_part
def _shared_out(p: Relaxed, ops: Ints, head: Floats, far: Floats) -> float:
    """The least time before which one device and, until `far` before it, all others can have done the ops, and any part of them."""
    by_head, by_far = ops[np.argsort(-head[ops], kind="mergesort")], ops[np.argsort(far[ops], kind="mergesort")]
    share, found = p.kind_speed[0] / p.total_speed, 0.0
    for i in range(0, len(ops), max(1, len(ops) // _THRESHOLDS)):
        least, alone = far[by_far[i]], 0.0
        for u in by_head:
            if far[u] >= least:
                alone += p.compute_us[u] / p.kind_speed[0]
                found = max(found, head[u] + min(alone, share * alone + (1 - share) * least))
    return found


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


# One machine


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
