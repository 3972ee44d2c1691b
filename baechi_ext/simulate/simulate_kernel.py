"""The simulator, compiled: event for event what `engine` does, with the memory of each device kept while time passes.

Ties are broken as there, by the same keys. Memory needs no list of intervals: what starts and what ends at one instant only changes
what is held from this instant on, so a device's peak is the most it holds between two instants.
"""

import numpy as np

from baechi_ext.simulate.arrays import Problem, Records, State
from baechi_ext.simulate.jit import inlined, kernel


@kernel
def run(p: Problem, s: State) -> float:
    """Simulates the plan in `s`; returns its makespan in microseconds and leaves all else in `s`.

    Infinite, with peaks of memory up to then, as soon as it is sure to exceed `until_us` of the totals.
    """
    n, k = len(s.placement), len(s.devices)
    totals = s.totals[0]
    _reset(p, s)
    now = 0.0
    while True:
        while totals.events > 0 and s.events[0].first == now:
            item = s.events[0].item
            totals.events -= 1
            _pop(s.events, 0, totals.events)
            if item < n:
                _end_op(p, s, item, now)
            else:
                _end_transfer(p, s, item - n, now)
        if totals.requests > 0:
            _start_transfers(p, s, now)
        for d in range(k):
            device = s.devices[d]
            if device.ready > 0 and not device.running:
                v = s.ready[device.ready_from].item
                device.ready -= 1
                _pop(s.ready, device.ready_from, device.ready)
                _start_op(p, s, v, now)
        if totals.events == 0 or totals.hopeless:
            break
        now = s.events[0].first
    for d in range(k):
        s.devices[d].peak_bytes = max(s.devices[d].peak_bytes, s.devices[d].held_bytes)
    return np.inf if totals.hopeless else now


@inlined
def _reset(p: Problem, s: State) -> None:
    n = len(s.placement)
    totals = s.totals[0]
    totals.events = totals.requests = totals.started = totals.transfers = totals.sent = 0
    totals.hopeless = False
    for pair in range(len(s.queues)):
        s.queues[pair].first = -1
    for d in range(len(s.devices)):
        device = s.devices[d]
        device.busy_us = device.left_us = device.held_bytes = device.held_since_us = device.peak_us = 0.0
        device.ready = device.waiting = device.readers = 0
        device.running = device.sending = device.receiving = False
    for v in range(n):
        device = s.devices[s.placement[v]]
        device.ready += 1
        device.held_bytes += p.ops[v].persistent_bytes
        device.left_us += p.ops[v].compute_us
    ready_from = 0
    for d in range(len(s.devices)):
        device = s.devices[d]
        device.peak_bytes = device.held_bytes
        device.ready_from = ready_from
        ready_from += device.ready
        device.ready = 0
    for v in range(n):
        s.ops[v].missing = p.ops[v + 1].inputs_from - p.ops[v].inputs_from
        if s.ops[v].missing == 0:
            _enqueue(p, s, v, 0.0)


@inlined
def _hold(device: Records, size: float, now: float) -> None:
    """The device holds so many bytes more, or less, from now on."""
    if device.held_since_us != now:
        if device.held_bytes > device.peak_bytes:
            device.peak_bytes, device.peak_us = device.held_bytes, device.held_since_us
        device.held_since_us = now
    device.held_bytes += size


# Heaps


@inlined
def _push(heap: Records, base: int, size: int, first: float, second: float, item: int) -> None:
    """Adds an entry to the heap of `size` entries that begins at `base`."""
    i = size
    while i > 0:
        parent = (i - 1) >> 1
        above = heap[base + parent]
        if _is_before(above, first, second, item):
            break
        here = heap[base + i]
        here.first, here.second, here.item = above.first, above.second, above.item
        i = parent
    here = heap[base + i]
    here.first, here.second, here.item = first, second, item


@inlined
def _pop(heap: Records, base: int, size: int) -> None:
    """Removes the first entry; `size` are left."""
    last = heap[base + size]
    first, second, item = last.first, last.second, last.item
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        below = heap[base + child]
        if child + 1 < size:
            right = heap[base + child + 1]
            if _is_before(right, below.first, below.second, below.item):
                child, below = child + 1, right
        if not _is_before(below, first, second, item):
            break
        here = heap[base + i]
        here.first, here.second, here.item = below.first, below.second, below.item
        i = child
    here = heap[base + i]
    here.first, here.second, here.item = first, second, item


@inlined
def _is_before(entry: Records, first: float, second: float, item: int) -> bool:
    if entry.first != first:
        return entry.first < first
    if entry.second != second:
        return entry.second < second
    return entry.item < item


# Ops


@inlined
def _enqueue(p: Problem, s: State, v: int, now: float) -> None:
    device = s.devices[s.placement[v]]
    size = device.ready
    device.ready += 1
    if s.totals[0].has_priority:
        _push(s.ready, device.ready_from, size, s.priority[v], now, v)
    else:
        _push(s.ready, device.ready_from, size, now, -p.ops[v].tail_us, v)


@inlined
def _start_op(p: Problem, s: State, v: int, now: float) -> None:
    op, d, totals = p.ops[v], s.placement[v], s.totals[0]
    device = s.devices[d]
    duration = op.compute_us / p.devices[d].speed
    if now + max(device.left_us / p.devices[d].speed, op.tail_us / p.rules[0].fastest) > totals.until_us:
        totals.hopeless = True
    device.left_us -= op.compute_us
    if p.rules[0].charges:
        duration = _with_device_charges(p, s, v, duration)
    device.running = True
    device.busy_us += duration
    s.ops[v].start_us = now
    s.ops[totals.started].started = v
    totals.started += 1
    size = op.working_bytes
    for i in range(op.outputs_from, p.ops[v + 1].outputs_from):
        size += p.tensors[p.lists[i]].bytes
    _hold(device, size, now)
    _push(s.events, 0, totals.events, now + duration, float(v) - len(s.placement), v)
    totals.events += 1


@inlined
def _with_device_charges(p: Problem, s: State, v: int, duration: float) -> float:
    k, d = len(s.devices), s.placement[v]
    for i in range(p.ops[v].inputs_from, p.ops[v + 1].inputs_from):
        t = p.lists[i]
        source = s.placement[p.tensors[t].producer]
        copy = s.copies[t * k + d]
        if source != d and not copy.taken_in:
            copy.taken_in = True
            link = p.links[source, d]
            duration += link.receive_us + p.tensors[t].bytes * link.receive_us_per_byte
    sending = 0.0
    for i in range(p.ops[v].outputs_from, p.ops[v + 1].outputs_from):
        t = p.lists[i]
        for j in range(_find_targets(p, s, t)):
            target = s.devices[j].target
            link = p.links[d, target]
            sending += link.send_us + p.tensors[t].bytes * link.send_us_per_byte
            s.devices[target].readers = 0
        s.devices[d].readers = 0
    return duration + sending


@inlined
def _end_op(p: Problem, s: State, v: int, now: float) -> None:
    k, d = len(s.devices), s.placement[v]
    device = s.devices[d]
    device.running = False
    s.ops[v].end_us = now
    freed = p.ops[v].working_bytes
    for i in range(p.ops[v].inputs_from, p.ops[v + 1].inputs_from):
        t = p.lists[i]
        copy = s.copies[t * k + d]
        copy.unread -= 1
        if copy.unread == 0:
            freed += p.tensors[t].bytes
    _hold(device, -freed, now)
    for i in range(p.ops[v].outputs_from, p.ops[v + 1].outputs_from):
        t = p.lists[i]
        count = _find_targets(p, s, t)
        s.copies[t * k + d].unread = device.readers + count
        if device.readers + count == 0:
            _hold(device, -p.tensors[t].bytes, now)
        if device.readers > 0:
            device.readers = 0
            _arrive(p, s, t, d, now)
        for j in range(count):
            _request(p, s, t, s.devices[j].target, now)


@inlined
def _find_targets(p: Problem, s: State, t: int) -> int:
    """How many devices besides its own tensor t goes to: the `target` of the first so many devices, in order.

    Each device's `readers` counts the readers there and `urgency_us` is the longest path of one. The caller sets `readers` of
    these devices and of the producer's back to 0.
    """
    home, count = s.placement[p.tensors[t].producer], 0
    for i in range(p.tensors[t].readers_from, p.tensors[t + 1].readers_from):
        w = p.lists[i]
        d, tail_us = s.placement[w], p.ops[w].tail_us
        device = s.devices[d]
        device.readers += 1
        if device.readers > 1:
            device.urgency_us = max(device.urgency_us, tail_us)
            continue
        device.urgency_us = tail_us
        if d != home:
            j = count
            while j > 0 and s.devices[j - 1].target > d:
                s.devices[j].target = s.devices[j - 1].target
                j -= 1
            s.devices[j].target = d
            count += 1
    return count


@inlined
def _arrive(p: Problem, s: State, t: int, d: int, now: float) -> None:
    for i in range(p.tensors[t].readers_from, p.tensors[t + 1].readers_from):
        w = p.lists[i]
        if s.placement[w] == d:
            s.ops[w].missing -= 1
            if s.ops[w].missing == 0:
                _enqueue(p, s, w, now)


# Transfers


@inlined
def _request(p: Problem, s: State, t: int, target: int, now: float) -> None:
    k, v, x = len(s.devices), p.tensors[t].producer, s.totals[0].transfers
    s.totals[0].transfers += 1
    source, transfer, copy = s.placement[v], s.transfers[x], s.copies[t * k + target]
    copy.unread = s.devices[target].readers
    copy.taken_in = False
    s.devices[target].readers = 0
    link = p.links[source, target]
    duration = link.latency_us + p.tensors[t].bytes * link.us_per_byte
    transfer.tensor, transfer.target, transfer.request_us = t, target, now
    transfer.key = (float(v) * k + target) * p.rules[0].names + p.tensors[t].name_rank
    transfer.arrived_us = duration
    if duration == 0:
        _send(p, s, x, now)
        _deliver(p, s, x, now)
    elif p.rules[0].parallel:
        _send(p, s, x, now)
        _push(s.events, 0, s.totals[0].events, transfer.arrived_us, transfer.key, len(s.placement) + x)
        s.totals[0].events += 1
    else:
        transfer.urgency_us = s.devices[target].urgency_us
        _wait(s.transfers, s.queues[source * k + target], x)
        s.devices[source].waiting += 1
        s.totals[0].requests += 1


@inlined
def _send(p: Problem, s: State, x: int, now: float) -> None:
    """Transfer x, whose duration stands in `arrived_us`, starts."""
    transfer = s.transfers[x]
    transfer.sent_us = now
    transfer.arrived_us = now + transfer.arrived_us
    s.transfers[s.totals[0].sent].sent = x
    s.totals[0].sent += 1
    _hold(s.devices[transfer.target], p.tensors[transfer.tensor].bytes, now)


@inlined
def _end_transfer(p: Problem, s: State, x: int, now: float) -> None:
    if not p.rules[0].parallel:
        source = s.placement[p.tensors[s.transfers[x].tensor].producer]
        s.devices[source].sending = s.devices[s.transfers[x].target].receiving = False
    _deliver(p, s, x, now)


@inlined
def _deliver(p: Problem, s: State, x: int, now: float) -> None:
    k, t = len(s.devices), s.transfers[x].tensor
    source = s.placement[p.tensors[t].producer]
    copy = s.copies[t * k + source]
    copy.unread -= 1
    if copy.unread == 0:
        _hold(s.devices[source], -p.tensors[t].bytes, now)
    _arrive(p, s, t, s.transfers[x].target, now)


@inlined
def _start_transfers(p: Problem, s: State, now: float) -> None:
    while True:
        pair = _first_free_pair(s.transfers, s.queues, s.devices)
        if pair < 0:
            return
        source, target = s.devices[pair // len(s.devices)], s.devices[pair % len(s.devices)]
        x = _leave(s.transfers, s.queues[pair])
        source.waiting -= 1
        s.totals[0].requests -= 1
        source.sending = target.receiving = True
        _send(p, s, x, now)
        _push(s.events, 0, s.totals[0].events, s.transfers[x].arrived_us, s.transfers[x].key, len(s.placement) + x)
        s.totals[0].events += 1


@inlined
def _first_free_pair(transfers: Records, queues: Records, devices: Records) -> int:
    """The source and target (source * devices + target) of the first transfer whose channels are free, or -1."""
    best, first, k = -1, -1, len(devices)
    for source in range(k):
        if devices[source].waiting > 0 and not devices[source].sending:
            for target in range(k):
                pair = source * k + target
                if queues[pair].first >= 0 and not devices[target].receiving:
                    x = transfers[queues[pair].first].root
                    if best < 0 or _precedes(transfers[x], transfers[first]):
                        best, first = pair, x
    return best


@inlined
def _wait(transfers: Records, queue: Records, x: int) -> None:
    """Transfer x, which was requested last of all, joins a queue."""
    transfer = transfers[x]
    transfer.left = transfer.right = transfer.next = -1
    transfer.root = x
    if queue.first < 0:
        queue.first = queue.last = x
        return
    last = transfers[queue.last]
    if last.request_us == transfer.request_us:
        last.root = _merge(transfers, last.root, x)
    else:
        last.next = queue.last = x


@inlined
def _leave(transfers: Records, queue: Records) -> int:
    """Takes the first transfer out of a queue."""
    first = transfers[queue.first]
    x = first.root
    first.root = _merge(transfers, transfers[x].left, transfers[x].right)
    if first.root < 0:
        queue.first = first.next
    return x


@inlined
def _precedes(x: Records, y: Records) -> bool:
    if x.request_us != y.request_us:
        return x.request_us < y.request_us
    if x.urgency_us != y.urgency_us:
        return x.urgency_us > y.urgency_us
    return x.key < y.key


@inlined
def _merge(transfers: Records, x: int, y: int) -> int:
    """The root of two skew heaps (Sleator and Tarjan, SIAM Journal on Computing 15, 1986) of waiting transfers, made one."""
    if x < 0:
        return y
    if y < 0:
        return x
    if _precedes(transfers[y], transfers[x]):
        x, y = y, x
    root = x
    while True:
        right = transfers[x].right
        transfers[x].right = transfers[x].left
        if right < 0:
            transfers[x].left = y
            return root
        if _precedes(transfers[y], transfers[right]):
            right, y = y, right
        transfers[x].left = right
        x = right
