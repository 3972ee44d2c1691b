"""The exhaustive search, compiled: every placement, and for each every order in which the simulator could start its ops.

A plan is a placement and priorities. The simulator never idles on purpose, so priorities only choose among the ops that are ready on an
idle device; the search simulates and branches there. Both levels cut what cannot end before the best plan known.
"""

import numpy as np

from baechi_ext.simulate.jit import kernel

Record = np.void
Array = np.ndarray

OPS, DEVICES, TENSORS, EDGES, EXCHANGES = 48, 8, 96, 768, 120
"""The largest instance that can be searched. Records of fixed shape compile many times as fast as tuples of arrays."""
_COPIES, _LEVELS = TENSORS * DEVICES, OPS + 2

INSTANCE = np.dtype(
    [
        ("ops", np.int64),
        ("devices", np.int64),
        ("tensors", np.int64),
        ("units", np.int64),
        ("exchanges", np.int64),
        ("parallel", np.bool_),
        ("limited", np.bool_),
        ("charges", np.bool_),
        # `things[things_from[i] : things_from[i + 1]]` are the things of i.
        ("order", np.int64, OPS),
        ("inputs", np.int64, EDGES),
        ("inputs_from", np.int64, OPS + 1),
        ("outputs", np.int64, TENSORS),
        ("outputs_from", np.int64, OPS + 1),
        ("readers", np.int64, EDGES),
        ("readers_from", np.int64, TENSORS + 1),
        ("producer", np.int64, TENSORS),
        ("name_rank", np.int64, TENSORS),
        # Ops of units, in the order in which units are placed.
        ("members", np.int64, OPS),
        ("members_from", np.int64, OPS + 1),
        ("duration_us", np.float64, (OPS, DEVICES)),
        ("least_us", np.float64, OPS),
        # Each op's time at the speed of all devices together.
        ("load_us", np.float64, OPS),
        ("tail_us", np.float64, OPS),
        # By source, target and tensor.
        ("transfer_us", np.float64, (DEVICES, DEVICES, TENSORS)),
        ("send_us", np.float64, (DEVICES, DEVICES, TENSORS)),
        ("receive_us", np.float64, (DEVICES, DEVICES, TENSORS)),
        ("tensor_bytes", np.float64, TENSORS),
        ("persistent_bytes", np.float64, OPS),
        ("working_bytes", np.float64, OPS),
        ("live_bytes", np.float64, OPS),
        ("memory_bytes", np.float64, DEVICES),
        # For each device, the first that can be exchanged with it; and all exchanges, the first of which changes nothing.
        ("twin", np.int64, DEVICES),
        ("labels", np.int64, (EXCHANGES, DEVICES)),
    ]
)
"""A graph on a cluster."""

SEARCH = np.dtype(
    [
        ("cursor", np.int64, 4),
        ("best_us", np.float64),
        # -1: not placed yet. The actual placement has its devices exchanged.
        ("placement", np.int64, OPS),
        ("actual", np.int64, OPS),
        ("choice", np.int64, OPS),
        # Of the schedule, by level: one more for each choice among ready ops.
        ("now", np.float64, _LEVELS),
        ("device", np.int64, _LEVELS),
        ("start", np.float64, (_LEVELS, OPS)),
        ("end", np.float64, (_LEVELS, OPS)),
        ("missing", np.int64, (_LEVELS, OPS)),
        ("sequence", np.int64, (_LEVELS, OPS)),
        ("started", np.int64, _LEVELS),
        ("running", np.int64, (_LEVELS, DEVICES)),
        ("sending", np.int64, (_LEVELS, DEVICES)),
        ("receiving", np.int64, (_LEVELS, DEVICES)),
        ("copy_state", np.int64, (_LEVELS, _COPIES)),
        ("copy_from", np.float64, (_LEVELS, _COPIES)),
        ("copy_until", np.float64, (_LEVELS, _COPIES)),
        ("taken", np.int64, (_LEVELS, _COPIES)),
        ("candidate", np.int64, (_LEVELS, OPS)),
        ("candidates", np.int64, _LEVELS),
        ("tried", np.int64, _LEVELS),
        # Scratch.
        ("head", np.float64, OPS),
        ("length", np.float64, OPS),
        ("tail", np.float64, OPS),
        ("jobs", np.float64, (3, _COPIES)),
        ("urgency", np.float64, DEVICES),
    ]
)
"""Where the search stands."""

DEPTH, LEVEL, RELABELING, NODES = range(4)
"""Indices of the cursor. LEVEL is -1 while units are placed."""
DONE, PAUSED, FOUND = range(3)
"""What `search` returns."""
ABSENT, WAITING, FLYING, PRESENT = range(4)
_CHOOSE, _ENDED = range(2)
TOLERANCE = 1e-9
_SLACK = 1e-12
"""Sums of sizes that are not whole may be off by so much, relative to a limit; what is found is judged again outside."""


@kernel
def search(instance: Array, state: Array, steps: int) -> int:
    """Goes on for so many steps at most, or until a better plan is found: `s.actual`, and its order in `s.sequence[LEVEL]`."""
    p, s = instance[0], state[0]
    while steps > 0:
        steps -= 1
        s.cursor[NODES] += 1
        if s.cursor[LEVEL] >= 0:
            if _step_schedule(p, s):
                return FOUND
        elif s.cursor[DEPTH] < 0:
            return DONE
        else:
            _step_placement(p, s)
    return PAUSED


@kernel
def _hopeless(s: Record, bound_us: float) -> bool:
    return bound_us >= s.best_us * (1 - TOLERANCE)


@kernel
def _step_placement(p: Record, s: Record) -> None:
    """Gives the next device to the unit in hand, or the next order of labels to a full placement."""
    u = s.cursor[DEPTH]
    if u == p.units:
        s.cursor[RELABELING] += 1
        if s.cursor[RELABELING] == p.exchanges or (s.cursor[RELABELING] > 0 and not _label_matters(p, s)):
            s.cursor[DEPTH] -= 1
        elif _relabel(p, s):
            _begin_schedule(p, s)
        return
    d = s.choice[u] + 1
    while d < p.devices and not _opens_in_turn(p, s, u, d):
        d += 1
    s.choice[u] = d if d < p.devices else -1
    for i in range(p.members_from[u], p.members_from[u + 1]):
        s.placement[p.members[i]] = s.choice[u]
    if s.choice[u] < 0:
        s.cursor[DEPTH] -= 1
    elif _may_fit(p, s, d) and not _hopeless(s, _placement_bound(p, s)):
        s.cursor[DEPTH] += 1
        s.cursor[RELABELING] = -1


@kernel
def _opens_in_turn(p: Record, s: Record, u: int, d: int) -> bool:
    """Of devices that can be exchanged and hold nothing yet, only the first is tried."""
    for e in range(p.twin[d], d):
        if p.twin[e] == p.twin[d] and not _used(s, u, e):
            return _used(s, u, d)
    return True


@kernel
def _used(s: Record, u: int, d: int) -> bool:
    found = False
    for w in range(u):
        found |= s.choice[w] == d
    return found


@kernel
def _label_matters(p: Record, s: Record) -> bool:
    """Whether two transfers from one op tie, so that the devices' order decides."""
    if p.parallel:
        return False
    for v in range(p.ops):
        for d in range(p.devices):
            s.urgency[d] = -1.0
        for i in range(p.outputs_from[v], p.outputs_from[v + 1]):
            t = p.outputs[i]
            for d in range(p.devices):
                urgency = _urgency(p, t, d, s.placement)
                if d != s.placement[v] and urgency >= 0 and p.transfer_us[s.placement[v], d, t] > 0:
                    for e in range(p.devices):
                        if e != d and s.urgency[e] == urgency:
                            return True
                    s.urgency[d] = urgency
    return False


@kernel
def _urgency(p: Record, t: int, d: int, placement: Array) -> float:
    """The longest path to the end of the tensor's readers on a device; -1 where there are none."""
    found = -1.0
    for i in range(p.readers_from[t], p.readers_from[t + 1]):
        if placement[p.readers[i]] == d:
            found = max(found, p.tail_us[p.readers[i]])
    return found


@kernel
def _relabel(p: Record, s: Record) -> bool:
    """Sets the actual placement; False where another relabeling gives the same one."""
    exchange = s.cursor[RELABELING]
    last = -1
    for d in range(p.devices):
        if not _used(s, p.units, d):
            if p.labels[exchange, d] < last:
                return False
            last = p.labels[exchange, d]
    for v in range(p.ops):
        s.actual[v] = p.labels[exchange, s.placement[v]]
    return True


@kernel
def _may_fit(p: Record, s: Record, d: int) -> bool:
    """Whether the persistent bytes placed on a device and, beside them, the neediest op leave no doubt that it overflows."""
    held = neediest = 0.0
    for v in range(p.ops):
        if s.placement[v] == d:
            held += p.persistent_bytes[v]
            neediest = max(neediest, p.live_bytes[v])
    return (held + neediest) * (1 - _SLACK) <= p.memory_bytes[d]


# Bounds


@kernel
def _placement_bound(p: Record, s: Record) -> float:
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
    if not _hopeless(s, found):
        found = max(found, _all_devices(p, s))
    for d in range(p.devices):
        if not _hopeless(s, found):
            found = max(found, _one_device(p, s, s.placement, d))
        if not p.parallel and not _hopeless(s, found):
            found = max(found, _one_channel(p, s, s.placement, d, True), _one_channel(p, s, s.placement, d, False))
    return found


@kernel
def _lengths(p: Record, s: Record, placement: Array) -> None:
    """How long each op holds its device at the least."""
    for v in range(p.ops):
        here = placement[v]
        s.length[v] = p.least_us[v] if here < 0 else p.duration_us[v, here]
        if p.charges and here >= 0:
            s.length[v] += _sending(p, placement, v)
            for i in range(p.inputs_from[v], p.inputs_from[v + 1]):
                t = p.inputs[i]
                home = placement[p.producer[t]]
                if home >= 0 and home != here and p.readers_from[t + 1] - p.readers_from[t] == 1:
                    s.length[v] += p.receive_us[home, here, t]


@kernel
def _sending(p: Record, placement: Array, v: int) -> float:
    total = 0.0
    for i in range(p.outputs_from[v], p.outputs_from[v + 1]):
        for d in range(p.devices):
            if d != placement[v] and _urgency(p, p.outputs[i], d, placement) >= 0:
                total += p.send_us[placement[v], d, p.outputs[i]]
    return total


@kernel
def _crossing(p: Record, placement: Array, t: int, reader: int) -> float:
    here, there = placement[p.producer[t]], placement[reader]
    return 0.0 if here < 0 or there < 0 or here == there else p.transfer_us[here, there, t]


@kernel
def _tails(p: Record, s: Record, placement: Array) -> None:
    for rank in range(p.ops - 1, -1, -1):
        v = p.order[rank]
        s.tail[v] = 0.0
        for i in range(p.outputs_from[v], p.outputs_from[v + 1]):
            t = p.outputs[i]
            for j in range(p.readers_from[t], p.readers_from[t + 1]):
                w = p.readers[j]
                s.tail[v] = max(s.tail[v], _crossing(p, placement, t, w) + s.length[w] + s.tail[w])


@kernel
def _add_job(s: Record, count: int, head: float, length: float, tail: float) -> int:
    """Inserts a job by its head; returns how many there are now."""
    i = count
    while i > 0 and s.jobs[0, i - 1] > head:
        s.jobs[0, i], s.jobs[1, i], s.jobs[2, i] = s.jobs[0, i - 1], s.jobs[1, i - 1], s.jobs[2, i - 1]
        i -= 1
    s.jobs[0, i], s.jobs[1, i], s.jobs[2, i] = head, length, tail
    return count + 1


@kernel
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


@kernel
def _all_devices(p: Record, s: Record) -> float:
    count = 0
    for v in range(p.ops):
        count = _add_job(s, count, s.head[v], p.load_us[v], s.tail[v])
    return _one_machine(s, count)


@kernel
def _one_device(p: Record, s: Record, placement: Array, d: int) -> float:
    count = 0
    for v in range(p.ops):
        if placement[v] == d:
            count = _add_job(s, count, s.head[v], s.length[v], s.tail[v])
    return _one_machine(s, count)


@kernel
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


# Schedules


@kernel
def _begin_schedule(p: Record, s: Record) -> None:
    s.now[0] = 0.0
    s.device[0] = s.started[0] = 0
    for d in range(p.devices):
        s.running[0, d] = -1
        s.sending[0, d] = s.receiving[0, d] = False
    for x in range(p.tensors * p.devices):
        s.copy_state[0, x] = ABSENT
        s.taken[0, x] = False
    for v in range(p.ops):
        s.start[0, v] = s.end[0, v] = -1.0
        s.missing[0, v] = p.inputs_from[v + 1] - p.inputs_from[v]
    s.cursor[LEVEL] = 0
    s.candidates[0] = s.tried[0] = 0
    # A level of its own, so that the first choice is made like all others.
    if _advance(p, s, 0) == _CHOOSE and not _hopeless(s, _schedule_bound(p, s, 0)):
        return
    s.candidates[0] = 1 if s.started[0] == p.ops else 0
    s.candidate[0, 0] = -1


@kernel
def _step_schedule(p: Record, s: Record) -> bool:
    """Tries the next of the ready ops at the deepest level; True where that gives a better plan."""
    at = s.cursor[LEVEL]
    if s.tried[at] == s.candidates[at]:
        s.cursor[LEVEL] -= 1
        return False
    v = s.candidate[at, s.tried[at]]
    s.tried[at] += 1
    if v < 0:
        return _is_better(p, s, at)
    _copy_level(p, s, at)
    _start(p, s, at + 1, v)
    s.device[at + 1] += 1
    if _advance(p, s, at + 1) == _CHOOSE:
        if not _overflows(p, s, at + 1) and not _hopeless(s, _schedule_bound(p, s, at + 1)):
            s.tried[at + 1] = 0
            s.cursor[LEVEL] += 1
    elif _is_better(p, s, at + 1):
        s.candidates[at + 1] = s.tried[at + 1] = 0
        s.cursor[LEVEL] += 1
        return True
    return False


@kernel
def _is_better(p: Record, s: Record, at: int) -> bool:
    makespan = 0.0
    for v in range(p.ops):
        makespan = max(makespan, s.end[at, v])
    return not _hopeless(s, makespan) and not _overflows(p, s, at)


@kernel
def _copy_level(p: Record, s: Record, at: int) -> None:
    to = at + 1
    s.now[to], s.device[to], s.started[to] = s.now[at], s.device[at], s.started[at]
    for v in range(p.ops):
        s.start[to, v], s.end[to, v] = s.start[at, v], s.end[at, v]
        s.missing[to, v], s.sequence[to, v] = s.missing[at, v], s.sequence[at, v]
    for d in range(p.devices):
        s.running[to, d] = s.running[at, d]
        s.sending[to, d], s.receiving[to, d] = s.sending[at, d], s.receiving[at, d]
    for x in range(p.tensors * p.devices):
        s.copy_state[to, x], s.taken[to, x] = s.copy_state[at, x], s.taken[at, x]
        s.copy_from[to, x], s.copy_until[to, x] = s.copy_from[at, x], s.copy_until[at, x]


@kernel
def _advance(p: Record, s: Record, at: int) -> int:
    """Simulates until a device has a choice among ready ops, or to the end."""
    k = p.devices
    while True:
        while s.device[at] < k:
            d = s.device[at]
            if s.running[at, d] < 0:
                _find_candidates(p, s, at, d)
                if s.candidates[at] > 1:
                    return _CHOOSE
                if s.candidates[at] == 1:
                    _start(p, s, at, s.candidate[at, 0])
            s.device[at] += 1
        now = np.inf
        for d in range(k):
            if s.running[at, d] >= 0:
                now = min(now, s.end[at, s.running[at, d]])
        for x in range(p.tensors * p.devices):
            if s.copy_state[at, x] == FLYING:
                now = min(now, s.copy_until[at, x])
        if now == np.inf:
            return _ENDED
        s.now[at] = now
        _handle_ends(p, s, at)
        if not p.parallel:
            _start_transfers(p, s, at)
        s.device[at] = 0


@kernel
def _find_candidates(p: Record, s: Record, at: int, d: int) -> None:
    """The ready ops of a device, the longest path to the end first."""
    count = 0
    for v in range(p.ops):
        if s.actual[v] == d and s.missing[at, v] == 0 and s.start[at, v] < 0:
            i = count
            while i > 0 and p.tail_us[s.candidate[at, i - 1]] < p.tail_us[v]:
                s.candidate[at, i] = s.candidate[at, i - 1]
                i -= 1
            s.candidate[at, i] = v
            count += 1
    s.candidates[at] = count


@kernel
def _start(p: Record, s: Record, at: int, v: int) -> None:
    d = s.actual[v]
    duration = p.duration_us[v, d]
    if p.charges:
        for i in range(p.inputs_from[v], p.inputs_from[v + 1]):
            t = p.inputs[i]
            home, x = s.actual[p.producer[t]], t * p.devices + d
            if home != d and not s.taken[at, x]:
                s.taken[at, x] = True
                duration += p.receive_us[home, d, t]
        duration += _sending(p, s.actual, v)
    s.start[at, v] = s.now[at]
    s.end[at, v] = s.now[at] + duration
    s.running[at, d] = v
    s.sequence[at, v] = s.started[at]
    s.started[at] += 1


@kernel
def _handle_ends(p: Record, s: Record, at: int) -> None:
    k = p.devices
    for x in range(p.tensors * p.devices):
        if s.copy_state[at, x] == FLYING and s.copy_until[at, x] == s.now[at]:
            t, d = x // k, x % k
            if not p.parallel:
                s.sending[at, s.actual[p.producer[t]]] = s.receiving[at, d] = False
            s.copy_state[at, x] = PRESENT
            _arrive(p, s, at, t, d)
    for d in range(k):
        v = s.running[at, d]
        if v >= 0 and s.end[at, v] == s.now[at]:
            s.running[at, d] = -1
            for i in range(p.outputs_from[v], p.outputs_from[v + 1]):
                _arrive(p, s, at, p.outputs[i], d)
                for e in range(k):
                    if e != d and _urgency(p, p.outputs[i], e, s.actual) >= 0:
                        _request(p, s, at, p.outputs[i], e)


@kernel
def _arrive(p: Record, s: Record, at: int, t: int, d: int) -> None:
    for i in range(p.readers_from[t], p.readers_from[t + 1]):
        if s.actual[p.readers[i]] == d:
            s.missing[at, p.readers[i]] -= 1


@kernel
def _request(p: Record, s: Record, at: int, t: int, d: int) -> None:
    x, duration = t * p.devices + d, p.transfer_us[s.actual[p.producer[t]], d, t]
    s.copy_from[at, x] = s.now[at]
    s.copy_until[at, x] = s.now[at] + duration
    if duration == 0:
        s.copy_state[at, x] = PRESENT
        _arrive(p, s, at, t, d)
    else:
        s.copy_state[at, x] = FLYING if p.parallel else WAITING


@kernel
def _start_transfers(p: Record, s: Record, at: int) -> None:
    """While a transfer waits, `copy_from` is when it was requested."""
    k = p.devices
    while True:
        best = -1
        for x in range(p.tensors * p.devices):
            if s.copy_state[at, x] == WAITING and not s.receiving[at, x % k]:
                home = s.actual[p.producer[x // k]]
                if not s.sending[at, home] and (best < 0 or _goes_first(p, s, at, x, best)):
                    best = x
        if best < 0:
            return
        t, d = best // k, best % k
        home = s.actual[p.producer[t]]
        s.sending[at, home] = s.receiving[at, d] = True
        s.copy_state[at, best] = FLYING
        s.copy_from[at, best] = s.now[at]
        s.copy_until[at, best] = s.now[at] + p.transfer_us[home, d, t]


@kernel
def _goes_first(p: Record, s: Record, at: int, x: int, y: int) -> bool:
    """Earliest requested, longest path of a reader there, producer, device, tensor name."""
    k = p.devices
    if s.copy_from[at, x] != s.copy_from[at, y]:
        return s.copy_from[at, x] < s.copy_from[at, y]
    a, b = _urgency(p, x // k, x % k, s.actual), _urgency(p, y // k, y % k, s.actual)
    if a != b:
        return a > b
    u, v = p.producer[x // k], p.producer[y // k]
    if u != v:
        return u < v
    if x % k != y % k:
        return x % k < y % k
    return p.name_rank[x // k] < p.name_rank[y // k]


@kernel
def _schedule_bound(p: Record, s: Record, at: int) -> float:
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
        if _hopeless(s, found):
            return found
        count = 0
        for v in range(p.ops):
            if s.actual[v] == d and s.start[at, v] < 0:
                count = _add_job(s, count, s.head[v], s.length[v], s.tail[v])
        found = max(found, _one_machine(s, count))
    return found


@kernel
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


@kernel
def _overflows(p: Record, s: Record, at: int) -> bool:
    """Whether a device has held more than its memory, as far as the schedule goes."""
    if not p.limited:
        return False
    k = p.devices
    for v in range(p.ops):
        if s.start[at, v] >= 0 and _held(p, s, at, s.actual[v], s.start[at, v]) * (1 - _SLACK) > p.memory_bytes[s.actual[v]]:
            return True
    for x in range(p.tensors * p.devices):
        if s.copy_state[at, x] >= FLYING and _held(p, s, at, x % k, s.copy_from[at, x]) * (1 - _SLACK) > p.memory_bytes[x % k]:
            return True
    return False


@kernel
def _held(p: Record, s: Record, at: int, d: int, when: float) -> float:
    """What a device holds at an instant of the schedule so far; what has no end yet lasts."""
    k = p.devices
    total = 0.0
    for v in range(p.ops):
        if s.actual[v] == d:
            total += p.persistent_bytes[v]
            if 0 <= s.start[at, v] <= when < s.end[at, v]:
                total += p.working_bytes[v]
    for t in range(p.tensors):
        u = p.producer[t]
        home = s.actual[u]
        x = t * k + d
        since, until = s.start[at, u], s.end[at, u]
        if home != d:
            if s.copy_state[at, x] < FLYING:
                continue
            since, until = s.copy_from[at, x], 0.0
        if since < 0 or since > when:
            continue
        for i in range(p.readers_from[t], p.readers_from[t + 1]):
            w = p.readers[i]
            if s.actual[w] == d:
                until = np.inf if s.start[at, w] < 0 else max(until, s.end[at, w])
            elif home == d:
                y = t * k + s.actual[w]
                until = np.inf if s.copy_state[at, y] < FLYING else max(until, s.copy_until[at, y])
        if when < until:
            total += p.tensor_bytes[t]
    return total
