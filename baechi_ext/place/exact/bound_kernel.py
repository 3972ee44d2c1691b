"""Bounds for the exhaustive search: what no completion of a placement, or of a schedule, can beat."""

from baechi_ext.place.exact.records_kernel import ABSENT, TOLERANCE, WAITING, Array, Record
from baechi_ext.simulate.jit import part


@part
def hopeless(s: Record, bound_us: float) -> bool:
    return bound_us >= s.best_us * (1 - TOLERANCE)


@part
def urgency(p: Record, t: int, d: int, placement: Array) -> float:
    """The longest path to the end of the tensor's readers on a device; -1 where there are none."""
    found = -1.0
    for i in range(p.readers_from[t], p.readers_from[t + 1]):
        if placement[p.readers[i]] == d:
            found = max(found, p.tail_us[p.readers[i]])
    return found


@part
def placement_bound(p: Record, s: Record) -> float:
    """No schedule of a placement, some of it still open, ends earlier."""
    _lengths(p, s, s.placement)
    for rank in range(p.ops):
        v = p.order[rank]
        s.head[v] = 0.0
        for i in range(p.inputs_from[v], p.inputs_from[v + 1]):
            u = p.producer[p.inputs[i]]
            s.head[v] = max(s.head[v], s.head[u] + s.length[u] + _crossing(p, s.placement, p.inputs[i], v))
    _tails(p, s, s.placement)
    found = 0.0
    for v in range(p.ops):
        found = max(found, s.head[v] + s.length[v] + s.tail[v])
    if not hopeless(s, found):
        found = max(found, _all_devices(p, s))
    for d in range(p.devices):
        if not hopeless(s, found):
            found = max(found, _one_device(p, s, s.placement, d))
        if not p.parallel and not hopeless(s, found):
            found = max(found, _one_channel(p, s, s.placement, d, True), _one_channel(p, s, s.placement, d, False))
    return found


@part
def _lengths(p: Record, s: Record, placement: Array) -> None:
    """Works out the least time that each op holds its device."""
    for v in range(p.ops):
        here = placement[v]
        s.length[v] = p.least_us[v] if here < 0 else p.duration_us[v, here]
        if p.charges and here >= 0:
            s.length[v] += sending(p, placement, v)
            for i in range(p.inputs_from[v], p.inputs_from[v + 1]):
                t = p.inputs[i]
                home = placement[p.producer[t]]
                if home >= 0 and home != here and p.readers_from[t + 1] - p.readers_from[t] == 1:
                    s.length[v] += p.receive_us[home, here, t]


@part
def sending(p: Record, placement: Array, v: int) -> float:
    total = 0.0
    for i in range(p.outputs_from[v], p.outputs_from[v + 1]):
        for d in range(p.devices):
            if d != placement[v] and urgency(p, p.outputs[i], d, placement) >= 0:
                total += p.send_us[placement[v], d, p.outputs[i]]
    return total


@part
def _crossing(p: Record, placement: Array, t: int, reader: int) -> float:
    here, there = placement[p.producer[t]], placement[reader]
    return 0.0 if here < 0 or there < 0 or here == there else p.transfer_us[here, there, t]


@part
def _tails(p: Record, s: Record, placement: Array) -> None:
    for rank in range(p.ops - 1, -1, -1):
        v = p.order[rank]
        s.tail[v] = 0.0
        for i in range(p.outputs_from[v], p.outputs_from[v + 1]):
            t = p.outputs[i]
            for j in range(p.readers_from[t], p.readers_from[t + 1]):
                w = p.readers[j]
                s.tail[v] = max(s.tail[v], _crossing(p, placement, t, w) + s.length[w] + s.tail[w])


@part
def _add_job(s: Record, count: int, head: float, length: float, tail: float) -> int:
    """Inserts a job by its head; returns how many there are now."""
    i = count
    while i > 0 and s.jobs[0, i - 1] > head:
        s.jobs[0, i], s.jobs[1, i], s.jobs[2, i] = s.jobs[0, i - 1], s.jobs[1, i - 1], s.jobs[2, i - 1]
        i -= 1
    s.jobs[0, i], s.jobs[1, i], s.jobs[2, i] = head, length, tail
    return count + 1


@part
def _one_machine(s: Record, count: int) -> float:
    """The preemptive optimum of the jobs: the largest, over all tails q, of the jobs with tails of at least q in turn, and q."""
    found = 0.0
    for i in range(count):
        least = s.jobs[2, i]
        now = 0.0
        for j in range(count):
            if s.jobs[2, j] >= least:
                now = max(now, s.jobs[0, j]) + s.jobs[1, j]
        found = max(found, now + least)
    return found


@part
def _all_devices(p: Record, s: Record) -> float:
    count = 0
    for v in range(p.ops):
        count = _add_job(s, count, s.head[v], p.load_us[v], s.tail[v])
    return _one_machine(s, count)


@part
def _one_device(p: Record, s: Record, placement: Array, d: int) -> float:
    count = 0
    for v in range(p.ops):
        if placement[v] == d:
            count = _add_job(s, count, s.head[v], s.length[v], s.tail[v])
    return _one_machine(s, count)


@part
def _one_channel(p: Record, s: Record, placement: Array, d: int, outgoing: bool) -> float:
    """The transfers that one channel of device d has to carry."""
    count = 0
    for t in range(p.tensors):
        home = placement[p.producer[t]]
        if home < 0 or (home == d) != outgoing:
            continue
        for e in range(p.devices):
            there = e if outgoing else d
            if there == home or (not outgoing and e > 0):
                continue
            tail = -1.0
            for i in range(p.readers_from[t], p.readers_from[t + 1]):
                w = p.readers[i]
                if placement[w] == there:
                    tail = max(tail, s.length[w] + s.tail[w])
            if tail >= 0:
                u = p.producer[t]
                count = _add_job(s, count, s.head[u] + s.length[u], p.transfer_us[home, there, t], tail)
    return _one_machine(s, count)


@part
def schedule_bound(p: Record, s: Record, at: int) -> float:
    """No order of the ops that have not started ends earlier."""
    k = p.devices
    _lengths(p, s, s.actual)
    _tails(p, s, s.actual)
    found = 0.0
    for rank in range(p.ops):
        v = p.order[rank]
        if s.start[at, v] >= 0:
            found = max(found, s.end[at, v] + s.tail[v])
            continue
        d = s.actual[v]
        s.head[v] = s.now[at]
        if s.running[at, d] >= 0:
            s.head[v] = max(s.head[v], s.end[at, s.running[at, d]])
        for i in range(p.inputs_from[v], p.inputs_from[v + 1]):
            s.head[v] = max(s.head[v], _earliest_input(p, s, at, p.inputs[i], d))
        found = max(found, s.head[v] + s.length[v] + s.tail[v])
    for d in range(k):
        if hopeless(s, found):
            return found
        count = 0
        for v in range(p.ops):
            if s.actual[v] == d and s.start[at, v] < 0:
                count = _add_job(s, count, s.head[v], s.length[v], s.tail[v])
        found = max(found, _one_machine(s, count))
    return found


@part
def _earliest_input(p: Record, s: Record, at: int, t: int, d: int) -> float:
    u = p.producer[t]
    home = s.actual[u]
    ends = s.end[at, u] if s.start[at, u] >= 0 else s.head[u] + s.length[u]
    if home == d:
        return ends
    x = t * p.devices + d
    if s.copy_state[at, x] == ABSENT:
        return ends + p.transfer_us[home, d, t]
    if s.copy_state[at, x] == WAITING:
        return s.now[at] + p.transfer_us[home, d, t]
    return s.copy_until[at, x]
