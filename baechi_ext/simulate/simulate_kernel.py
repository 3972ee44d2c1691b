"""The simulator, compiled: the rules of docs/simulator.md, with the memory of each device kept while time passes.

A device runs one op at a time; an idle one starts the best ready op (smallest priority, then earliest ready; without priorities earliest
ready, then longest compute-only path to the end); a tensor is sent once per destination, when its producer ends; all events of one
instant are handled before any decision of that instant. Memory needs no list of intervals: what starts and what ends at one instant only
changes what is held from this instant on, so a device's peak is the most it holds between two instants.

What takes the time is branches that no processor foresees. So the inner loops choose among values, read before they are chosen,
where the compiler needs no branch for it, and indices have no sign where they are loaded.
"""

import numpy as np

from baechi_ext.simulate.arrays import Problem, Record, Records, State
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
        if totals.opened > 0:
            _start_transfers(p, s, now)
        first, end = totals.concerned_from, totals.concerned_to
        totals.concerned_from, totals.concerned_to = k, 0
        for d in range(first, end):
            device = s.devices[d]
            if (device.ready > 0) & (not device.running):
                v = s.ready[device.ready_from].item
                device.ready -= 1
                _pop(s.ready, device.ready_from, device.ready)
                _start_op(p, s, v, now)
        if totals.events == 0 or totals.hopeless:
            break
        now = s.events[0].first
    for d in range(k):
        s.devices[d].peak_bytes = max(s.devices[d].peak_bytes, s.devices[d].held_bytes)
    return np.inf if totals.hopeless else max(now, _host_us(p, s))


@inlined
def _host_us(p: Problem, s: State) -> float:
    """Time that the step takes the host."""
    host_us = p.rules[0].issue_us
    if p.rules[0].hosted:
        for source in range(len(s.devices)):
            for target in range(len(s.devices)):
                host_us += s.queues[source * len(s.devices) + target].issued * p.links[source, target].issue_us
    return host_us


@inlined
def _reset(p: Problem, s: State) -> None:
    n = len(s.placement)
    totals = s.totals[0]
    totals.events = totals.opened = totals.started = totals.transfers = totals.sent = 0
    totals.hopeless = False
    totals.concerned_from, totals.concerned_to = len(s.devices), 0
    for pair in range(len(s.queues)):
        s.queues[pair].request_us = np.inf
        s.queues[pair].issued = 0
    for channel in range(len(s.channels)):
        s.channels[channel].busy = False
    for d in range(len(s.devices)):
        device = s.devices[d]
        device.busy_us = device.left_us = device.held_bytes = device.held_since_us = device.peak_us = 0.0
        device.ready = device.waiting = device.readers = 0
        device.running = False
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
def _hold(device: Record, size: float, now: float) -> None:
    """The device holds this many bytes more, or less, from now on."""
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
    last.first = last.second = np.inf  # stands for a second child that is not there
    i, child = 0, 1
    while child < size:
        left, right = heap[base + child], heap[base + child + 1]
        left_first, left_second, right_first, right_second = left.first, left.second, right.first, right.second
        equal = right_first == left_first
        is_right = (right_first < left_first) | (equal & (right_second < left_second))
        if equal & (right_second == left_second):
            is_right = right.item < left.item
        child += 1 if is_right else 0
        below = heap[base + child]
        if not _is_before(below, first, second, item):
            break
        here = heap[base + i]
        here.first, here.second, here.item = below.first, below.second, below.item
        i, child = child, 2 * child + 1
    here = heap[base + i]
    here.first, here.second, here.item = first, second, item


@inlined
def _is_before(entry: Record, first: float, second: float, item: int) -> bool:
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
    _concern(s, s.placement[v])
    if s.totals[0].has_priority:
        _push(s.ready, device.ready_from, size, s.priority[v], now, v)
    else:
        _push(s.ready, device.ready_from, size, now, -p.ops[v].tail_us, v)


@inlined
def _concern(s: State, d: int) -> None:
    """An op may start on device d at this instant."""
    totals = s.totals[0]
    first, end = totals.concerned_from, totals.concerned_to
    totals.concerned_from = d if d < first else first
    totals.concerned_to = d + 1 if d >= end else end


@inlined
def _start_op(p: Problem, s: State, v: int, now: float) -> None:
    op, d, totals = p.ops[v], s.placement[v], s.totals[0]
    device = s.devices[d]
    duration = op.compute_us / p.devices[d].speed
    if now + max(device.left_us / p.devices[d].speed, op.least_us) > totals.until_us:
        totals.hopeless = True
    device.left_us -= op.compute_us
    if p.rules[0].charges:
        duration = _with_device_charges(p, s, v, duration)
    device.running = True
    device.busy_us += duration
    s.ops[v].start_us = now
    s.ops[totals.started].started = v
    totals.started += 1
    _hold(device, op.starting_bytes, now)
    _push(s.events, 0, totals.events, now + duration, 0.0, v)
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
            duration += 0.0 if copy.free else link.receive_us + p.tensors[t].bytes * link.receive_us_per_byte
    sending = 0.0
    for i in range(p.ops[v].outputs_from, p.ops[v + 1].outputs_from):
        t = p.lists[i]
        for j in range(_find_targets(p, s, t)):
            target = s.devices[j].target
            link = p.links[d, target]
            sending += 0.0 if s.copies[t * k + target].free else link.send_us + p.tensors[t].bytes * link.send_us_per_byte
            s.devices[target].readers = 0
        s.devices[d].readers = 0
    return duration + sending


@inlined
def _end_op(p: Problem, s: State, v: int, now: float) -> None:
    k, d = len(s.devices), s.placement[v]
    device = s.devices[d]
    device.running = False
    _concern(s, d)
    s.ops[v].end_us = now
    freed = p.ops[v].working_bytes
    for i in range(p.ops[v].inputs_from, p.ops[v + 1].inputs_from):
        t = p.lists[i]
        copy = s.copies[t * k + d]
        tensor, unread = p.tensors[t], copy.unread - 1
        size = tensor.home_bytes if s.placement[tensor.producer] == d else tensor.bytes
        copy.unread = unread
        freed += size if unread == 0 else 0.0
    _hold(device, -freed, now)
    for i in range(p.ops[v].outputs_from, p.ops[v + 1].outputs_from):
        t = p.lists[i]
        count = _find_targets(p, s, t)
        s.copies[t * k + d].unread = device.readers + count
        if device.readers + count == 0:
            _hold(device, -p.tensors[t].home_bytes, now)
        if device.readers > 0:
            device.readers = 0
            _arrive(p, s, t, d, now)
        for j in range(count):
            _request(p, s, t, s.devices[j].target, now)
    if device.waiting > 0 and not s.channels[d].busy:
        _open(s, d)


@inlined
def _find_targets(p: Problem, s: State, t: int) -> int:
    """The number of devices besides its own that tensor t goes to: they are the first entries of `target`, in order.

    Each device's `readers` counts the readers there and `urgency` is the least of theirs. The caller sets `readers` of
    these devices and of the producer's back to 0.
    """
    home, count = s.placement[p.tensors[t].producer], 0
    for i in range(p.tensors[t].readers_from, p.tensors[t + 1].readers_from):
        w = p.lists[i]
        d, urgency = s.placement[w], p.ops[w].urgency
        device = s.devices[d]
        is_first, most = device.readers == 0, device.urgency
        device.readers += 1
        device.urgency = urgency if is_first | (urgency < most) else most
        if is_first & (d != home):
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
        is_here = s.placement[w] == d
        missing = s.ops[w].missing - (1 if is_here else 0)
        s.ops[w].missing = missing
        if is_here & (missing == 0):
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
    if p.rules[0].hosted and not copy.free:
        s.queues[source * k + target].issued += 1
    duration = 0.0 if copy.free else link.latency_us + p.tensors[t].bytes * link.us_per_byte
    transfer.tensor, transfer.source, transfer.target, transfer.request_us = t, source, target, now
    rank = float(s.devices[target].urgency) * len(s.placement) + v
    transfer.turn = (rank * k + target) * p.rules[0].names + p.tensors[t].name_rank
    transfer.arrived_us = duration
    if duration == 0:
        _send(p, s, x, now)
        _deliver(p, s, x, now)
    elif p.rules[0].parallel:
        _send(p, s, x, now)
        _push(s.events, 0, s.totals[0].events, transfer.arrived_us, 0.0, len(s.placement) + x)
        s.totals[0].events += 1
    else:
        _wait(s.transfers, s.queues[source * k + target], x)
        s.devices[source].waiting += 1


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
        _open(s, s.transfers[x].source)
        _open(s, len(s.devices) + s.transfers[x].target)
    _deliver(p, s, x, now)


@inlined
def _deliver(p: Problem, s: State, x: int, now: float) -> None:
    k, t, source = len(s.devices), s.transfers[x].tensor, s.transfers[x].source
    copy = s.copies[t * k + source]
    copy.unread -= 1
    if copy.unread == 0:
        _hold(s.devices[source], -p.tensors[t].home_bytes, now)
    _arrive(p, s, t, s.transfers[x].target, now)


@inlined
def _open(s: State, channel: int) -> None:
    """A transfer that holds this channel may start at this instant."""
    s.channels[channel].busy = False
    s.channels[s.totals[0].opened].opened = channel
    s.totals[0].opened += 1


@inlined
def _start_transfers(p: Problem, s: State, now: float) -> None:
    k, totals = len(s.devices), s.totals[0]
    while True:
        pair = _first_free_pair(s)
        if pair < 0:
            break
        x = _leave(s.transfers, s.queues[pair])
        source, target = s.transfers[x].source, s.transfers[x].target
        s.devices[source].waiting -= 1
        s.channels[source].busy = s.channels[k + target].busy = True
        _send(p, s, x, now)
        _push(s.events, 0, totals.events, s.transfers[x].arrived_us, 0.0, len(s.placement) + x)
        totals.events += 1
    totals.opened = 0


@inlined
def _first_free_pair(s: State) -> int:
    """The source and target (source * devices + target) of the first transfer whose channels are free, or -1.

    One of its channels has been opened at this instant: else it would have started before.
    """
    k, best, best_us, best_turn = len(s.devices), -1, np.inf, 0.0
    for i in range(s.totals[0].opened):
        channel = s.channels[i].opened
        if s.channels[channel].busy:
            continue
        pair, step, other = (channel * k, 1, k) if channel < k else (channel - k, k, 0)
        for j in range(k):
            queue = s.queues[pair]
            request_us, turn, busy = queue.request_us, queue.turn, s.channels[other + j].busy
            request_us = np.inf if busy else request_us
            earlier = (request_us < best_us) | ((request_us == best_us) & (turn < best_turn))
            best_us = request_us if earlier else best_us
            best_turn = turn if earlier else best_turn
            best = pair if earlier else best
            pair += step
    return best


@inlined
def _wait(transfers: Records, queue: Record, x: int) -> None:
    """Transfer x, which was requested last of all, joins a queue."""
    transfer = transfers[x]
    transfer.left = transfer.right = transfer.next = -1
    transfer.root = x
    if queue.request_us == np.inf:
        queue.first = queue.last = x
        _show(queue, transfer)
        return
    last = transfers[queue.last]
    if last.request_us == transfer.request_us:
        last.root = _merge(transfers, last.root, x)
        _show(queue, transfers[transfers[queue.first].root])
    else:
        last.next = queue.last = x


@inlined
def _leave(transfers: Records, queue: Record) -> int:
    """Takes the first transfer out of a queue."""
    first = transfers[queue.first]
    x = first.root
    first.root = _merge(transfers, transfers[x].left, transfers[x].right)
    if first.root < 0:
        queue.first = first.next
    if queue.first < 0:
        queue.request_us = np.inf
    else:
        _show(queue, transfers[transfers[queue.first].root])
    return x


@inlined
def _show(queue: Record, first: Record) -> None:
    """The queue shows what its first transfer is compared by."""
    queue.request_us, queue.turn = first.request_us, first.turn


@inlined
def _precedes(x: Record, y: Record) -> bool:
    if x.request_us != y.request_us:
        return x.request_us < y.request_us
    return x.turn < y.turn


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
