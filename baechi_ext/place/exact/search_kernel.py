"""The exhaustive search, compiled: every placement, and for each every order in which the simulator could start its ops.

A plan is a placement and priorities. The simulator never idles on purpose, so priorities only choose among the ops that are ready on an
idle device; the search simulates and branches there. Both levels cut what cannot end before the best plan known.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baechi_ext.simulate.jit import kernel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Instance(NamedTuple):
    """A graph on a cluster. `things[things_from[i] : things_from[i + 1]]` are the things of i."""

    order: Ints
    inputs: Ints
    inputs_from: Ints
    outputs: Ints
    outputs_from: Ints
    readers: Ints
    readers_from: Ints
    producer: Ints
    name_rank: Ints
    members: Ints
    members_from: Ints
    """Ops of units, in the order in which units are placed."""
    duration_us: Floats
    """By op and device."""
    least_us: Floats
    load_us: Floats
    """Each op's time at the speed of all devices together."""
    tail_us: Floats
    transfer_us: Floats
    """By source, target and tensor; so are the next two."""
    send_us: Floats
    receive_us: Floats
    tensor_bytes: Floats
    persistent_bytes: Floats
    working_bytes: Floats
    live_bytes: Floats
    memory_bytes: Floats
    twin: Ints
    """For each device, the first that can be exchanged with it."""
    relabelings: Ints
    """Exchanges of such devices, as permutations; the first changes nothing."""
    parallel: bool
    limited: bool
    charges: bool


class Search(NamedTuple):
    """Where the search stands. Rows are levels: a level more for each choice among ready ops."""

    cursor: Ints
    best_us: Floats
    placement: Ints
    """-1: not placed yet."""
    actual: Ints
    """The placement, relabeled."""
    choice: Ints
    # Of the schedule, by level.
    now: Floats
    device: Ints
    start: Floats
    end: Floats
    missing: Ints
    sequence: Ints
    started: Ints
    running: Ints
    sending: Flags
    receiving: Flags
    copy_state: Ints
    copy_from: Floats
    copy_until: Floats
    taken: Flags
    candidate: Ints
    candidates: Ints
    tried: Ints
    # Scratch.
    head: Floats
    length: Floats
    tail: Floats
    jobs: Floats
    urgency: Floats


DEPTH, LEVEL, RELABELING, NODES = range(4)
"""Indices of `Search.cursor`. LEVEL is -1 while units are placed."""
DONE, PAUSED, FOUND = range(3)
"""What `search` returns."""
ABSENT, WAITING, FLYING, PRESENT = range(4)
_CHOOSE, _ENDED = range(2)
TOLERANCE = 1e-9
_SLACK = 1e-12
"""Sums of sizes that are not whole may be off by so much, relative to a limit; what is found is judged again outside."""


@kernel
def search(p: Instance, s: Search, steps: int) -> int:
    """Goes on for so many steps at most, or until a better plan is found: `s.actual`, and its order in `s.sequence[LEVEL]`."""
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
def _hopeless(s: Search, bound_us: float) -> bool:
    return bound_us >= s.best_us[0] * (1 - TOLERANCE)


@kernel
def _step_placement(p: Instance, s: Search) -> None:
    """Gives the next device to the unit in hand, or the next order of labels to a full placement."""
    u = s.cursor[DEPTH]
    if u == len(s.choice):
        s.cursor[RELABELING] += 1
        if s.cursor[RELABELING] == len(p.relabelings) or (s.cursor[RELABELING] > 0 and not _label_matters(p, s)):
            s.cursor[DEPTH] -= 1
        elif _relabel(p, s):
            _begin_schedule(p, s)
        return
    d = s.choice[u] + 1
    while d < len(p.memory_bytes) and not _opens_in_turn(p, s, u, d):
        d += 1
    s.choice[u] = d if d < len(p.memory_bytes) else -1
    for i in range(p.members_from[u], p.members_from[u + 1]):
        s.placement[p.members[i]] = s.choice[u]
    if s.choice[u] < 0:
        s.cursor[DEPTH] -= 1
    elif _may_fit(p, s, d) and not _hopeless(s, _placement_bound(p, s)):
        s.cursor[DEPTH] += 1
        s.cursor[RELABELING] = -1


@kernel
def _opens_in_turn(p: Instance, s: Search, u: int, d: int) -> bool:
    """Of devices that can be exchanged and hold nothing yet, only the first is tried."""
    for e in range(p.twin[d], d):
        if p.twin[e] == p.twin[d] and not _used(s, u, e):
            return _used(s, u, d)
    return True


@kernel
def _used(s: Search, u: int, d: int) -> bool:
    for w in range(u):
        if s.choice[w] == d:
            return True
    return False


@kernel
def _label_matters(p: Instance, s: Search) -> bool:
    """Whether two transfers from one op tie, so that the devices' order decides."""
    if p.parallel:
        return False
    for v in range(len(p.order)):
        s.urgency[:] = -1.0
        for i in range(p.outputs_from[v], p.outputs_from[v + 1]):
            t = p.outputs[i]
            for d in range(len(p.memory_bytes)):
                urgency = _urgency(p, t, d, s.placement)
                if d != s.placement[v] and urgency >= 0 and p.transfer_us[s.placement[v], d, t] > 0:
                    for e in range(len(p.memory_bytes)):
                        if e != d and s.urgency[e] == urgency:
                            return True
                    s.urgency[d] = urgency
    return False


@kernel
def _urgency(p: Instance, t: int, d: int, placement: Ints) -> float:
    """The longest path to the end of the tensor's readers on a device; -1 where there are none."""
    found = -1.0
    for i in range(p.readers_from[t], p.readers_from[t + 1]):
        if placement[p.readers[i]] == d:
            found = max(found, p.tail_us[p.readers[i]])
    return found


@kernel
def _relabel(p: Instance, s: Search) -> bool:
    """Sets the actual placement; False where another relabeling gives the same one."""
    labels = p.relabelings[s.cursor[RELABELING]]
    last = -1
    for d in range(len(labels)):
        if not _used(s, len(s.choice), d):
            if labels[d] < last:
                return False
            last = labels[d]
    for v in range(len(s.placement)):
        s.actual[v] = labels[s.placement[v]]
    return True


@kernel
def _may_fit(p: Instance, s: Search, d: int) -> bool:
    """Whether the persistent bytes placed on a device and, beside them, the neediest op leave no doubt that it overflows."""
    held = neediest = 0.0
    for v in range(len(s.placement)):
        if s.placement[v] == d:
            held += p.persistent_bytes[v]
            neediest = max(neediest, p.live_bytes[v])
    return (held + neediest) * (1 - _SLACK) <= p.memory_bytes[d]


# Bounds


@kernel
def _placement_bound(p: Instance, s: Search) -> float:
    """No schedule of a placement, some of it still open, ends earlier."""
    _lengths(p, s, s.placement)
    for v in p.order:
        s.head[v] = 0.0
        for i in range(p.inputs_from[v], p.inputs_from[v + 1]):
            u = p.producer[p.inputs[i]]
            s.head[v] = max(s.head[v], s.head[u] + s.length[u] + _crossing(p, s.placement, p.inputs[i], v))
    _tails(p, s, s.placement)
    found = 0.0
    for v in range(len(p.order)):
        found = max(found, s.head[v] + s.length[v] + s.tail[v])
    if not _hopeless(s, found):
        found = max(found, _all_devices(p, s))
    for d in range(len(p.memory_bytes)):
        if not _hopeless(s, found):
            found = max(found, _one_device(p, s, s.placement, d))
        if not p.parallel and not _hopeless(s, found):
            found = max(found, _one_channel(p, s, s.placement, d, True), _one_channel(p, s, s.placement, d, False))
    return found


@kernel
def _lengths(p: Instance, s: Search, placement: Ints) -> None:
    """How long each op holds its device at the least."""
    for v in range(len(p.order)):
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
def _sending(p: Instance, placement: Ints, v: int) -> float:
    total = 0.0
    for i in range(p.outputs_from[v], p.outputs_from[v + 1]):
        for d in range(len(p.memory_bytes)):
            if d != placement[v] and _urgency(p, p.outputs[i], d, placement) >= 0:
                total += p.send_us[placement[v], d, p.outputs[i]]
    return total


@kernel
def _crossing(p: Instance, placement: Ints, t: int, reader: int) -> float:
    here, there = placement[p.producer[t]], placement[reader]
    return 0.0 if here < 0 or there < 0 or here == there else p.transfer_us[here, there, t]


@kernel
def _tails(p: Instance, s: Search, placement: Ints) -> None:
    for v in p.order[::-1]:
        s.tail[v] = 0.0
        for i in range(p.outputs_from[v], p.outputs_from[v + 1]):
            t = p.outputs[i]
            for j in range(p.readers_from[t], p.readers_from[t + 1]):
                w = p.readers[j]
                s.tail[v] = max(s.tail[v], _crossing(p, placement, t, w) + s.length[w] + s.tail[w])


@kernel
def _add_job(s: Search, count: int, head: float, length: float, tail: float) -> int:
    """Inserts a job by its head; returns how many there are now."""
    i = count
    while i > 0 and s.jobs[0, i - 1] > head:
        s.jobs[:, i] = s.jobs[:, i - 1]
        i -= 1
    s.jobs[0, i], s.jobs[1, i], s.jobs[2, i] = head, length, tail
    return count + 1


@kernel
def _one_machine(s: Search, count: int) -> float:
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
def _all_devices(p: Instance, s: Search) -> float:
    count = 0
    for v in range(len(p.order)):
        count = _add_job(s, count, s.head[v], p.load_us[v], s.tail[v])
    return _one_machine(s, count)


@kernel
def _one_device(p: Instance, s: Search, placement: Ints, d: int) -> float:
    count = 0
    for v in range(len(p.order)):
        if placement[v] == d:
            count = _add_job(s, count, s.head[v], s.length[v], s.tail[v])
    return _one_machine(s, count)


@kernel
def _one_channel(p: Instance, s: Search, placement: Ints, d: int, outgoing: bool) -> float:
    """The transfers that one channel of device d has to carry."""
    count = 0
    for t in range(len(p.producer)):
        home = placement[p.producer[t]]
        if home < 0 or (home == d) != outgoing:
            continue
        for e in range(len(p.memory_bytes)):
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
def _begin_schedule(p: Instance, s: Search) -> None:
    s.now[0] = 0.0
    s.device[0] = s.started[0] = 0
    s.start[0, :] = s.end[0, :] = -1.0
    s.running[0, :] = -1
    s.sending[0, :] = s.receiving[0, :] = False
    s.copy_state[0, :] = ABSENT
    s.taken[0, :] = False
    for v in range(len(p.order)):
        s.missing[0, v] = p.inputs_from[v + 1] - p.inputs_from[v]
    s.cursor[LEVEL] = 0
    s.candidates[0] = s.tried[0] = 0
    # A level of its own, so that the first choice is made like all others.
    if _advance(p, s, 0) == _CHOOSE and not _hopeless(s, _schedule_bound(p, s, 0)):
        return
    s.candidates[0] = 1 if s.started[0] == len(p.order) else 0
    s.candidate[0, 0] = -1


@kernel
def _step_schedule(p: Instance, s: Search) -> bool:
    """Tries the next of the ready ops at the deepest level; True where that gives a better plan."""
    at = s.cursor[LEVEL]
    if s.tried[at] == s.candidates[at]:
        s.cursor[LEVEL] -= 1
        return False
    v = s.candidate[at, s.tried[at]]
    s.tried[at] += 1
    if v < 0:
        return _is_better(p, s, at)
    _copy_level(s, at)
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
def _is_better(p: Instance, s: Search, at: int) -> bool:
    makespan = 0.0
    for end in s.end[at]:
        makespan = max(makespan, end)
    return not _hopeless(s, makespan) and not _overflows(p, s, at)


@kernel
def _copy_level(s: Search, at: int) -> None:
    to = at + 1
    s.now[to], s.device[to], s.started[to] = s.now[at], s.device[at], s.started[at]
    s.start[to, :] = s.start[at, :]
    s.end[to, :] = s.end[at, :]
    s.missing[to, :] = s.missing[at, :]
    s.sequence[to, :] = s.sequence[at, :]
    s.running[to, :] = s.running[at, :]
    s.sending[to, :] = s.sending[at, :]
    s.receiving[to, :] = s.receiving[at, :]
    s.copy_state[to, :] = s.copy_state[at, :]
    s.copy_from[to, :] = s.copy_from[at, :]
    s.copy_until[to, :] = s.copy_until[at, :]
    s.taken[to, :] = s.taken[at, :]


@kernel
def _advance(p: Instance, s: Search, at: int) -> int:
    """Simulates until a device has a choice among ready ops, or to the end."""
    k = len(p.memory_bytes)
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
        for x in range(s.copy_state.shape[1]):
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
def _find_candidates(p: Instance, s: Search, at: int, d: int) -> None:
    """The ready ops of a device, the longest path to the end first."""
    count = 0
    for v in range(len(p.order)):
        if s.actual[v] == d and s.missing[at, v] == 0 and s.start[at, v] < 0:
            i = count
            while i > 0 and p.tail_us[s.candidate[at, i - 1]] < p.tail_us[v]:
                s.candidate[at, i] = s.candidate[at, i - 1]
                i -= 1
            s.candidate[at, i] = v
            count += 1
    s.candidates[at] = count


@kernel
def _start(p: Instance, s: Search, at: int, v: int) -> None:
    d = s.actual[v]
    duration = p.duration_us[v, d]
    if p.charges:
        for i in range(p.inputs_from[v], p.inputs_from[v + 1]):
            t = p.inputs[i]
            home, x = s.actual[p.producer[t]], t * len(p.memory_bytes) + d
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
def _handle_ends(p: Instance, s: Search, at: int) -> None:
    k = len(p.memory_bytes)
    for x in range(s.copy_state.shape[1]):
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
def _arrive(p: Instance, s: Search, at: int, t: int, d: int) -> None:
    for i in range(p.readers_from[t], p.readers_from[t + 1]):
        if s.actual[p.readers[i]] == d:
            s.missing[at, p.readers[i]] -= 1


@kernel
def _request(p: Instance, s: Search, at: int, t: int, d: int) -> None:
    x, duration = t * len(p.memory_bytes) + d, p.transfer_us[s.actual[p.producer[t]], d, t]
    s.copy_from[at, x] = s.now[at]
    s.copy_until[at, x] = s.now[at] + duration
    if duration == 0:
        s.copy_state[at, x] = PRESENT
        _arrive(p, s, at, t, d)
    else:
        s.copy_state[at, x] = FLYING if p.parallel else WAITING


@kernel
def _start_transfers(p: Instance, s: Search, at: int) -> None:
    """While a transfer waits, `copy_from` is when it was requested."""
    k = len(p.memory_bytes)
    while True:
        best = -1
        for x in range(s.copy_state.shape[1]):
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
def _goes_first(p: Instance, s: Search, at: int, x: int, y: int) -> bool:
    """Earliest requested, longest path of a reader there, producer, device, tensor name."""
    k = len(p.memory_bytes)
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
def _schedule_bound(p: Instance, s: Search, at: int) -> float:
    """No order of the ops that have not started ends earlier."""
    k = len(p.memory_bytes)
    _lengths(p, s, s.actual)
    _tails(p, s, s.actual)
    found = 0.0
    for v in p.order:
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
        for v in range(len(p.order)):
            if s.actual[v] == d and s.start[at, v] < 0:
                count = _add_job(s, count, s.head[v], s.length[v], s.tail[v])
        found = max(found, _one_machine(s, count))
    return found


@kernel
def _earliest_input(p: Instance, s: Search, at: int, t: int, d: int) -> float:
    u = p.producer[t]
    home = s.actual[u]
    ends = s.end[at, u] if s.start[at, u] >= 0 else s.head[u] + s.length[u]
    if home == d:
        return ends
    x = t * len(p.memory_bytes) + d
    if s.copy_state[at, x] == ABSENT:
        return ends + p.transfer_us[home, d, t]
    if s.copy_state[at, x] == WAITING:
        return s.now[at] + p.transfer_us[home, d, t]
    return s.copy_until[at, x]


@kernel
def _overflows(p: Instance, s: Search, at: int) -> bool:
    """Whether a device has held more than its memory, as far as the schedule goes."""
    if not p.limited:
        return False
    k = len(p.memory_bytes)
    for v in range(len(p.order)):
        if s.start[at, v] >= 0 and _held(p, s, at, s.actual[v], s.start[at, v]) * (1 - _SLACK) > p.memory_bytes[s.actual[v]]:
            return True
    for x in range(s.copy_state.shape[1]):
        if s.copy_state[at, x] >= FLYING and _held(p, s, at, x % k, s.copy_from[at, x]) * (1 - _SLACK) > p.memory_bytes[x % k]:
            return True
    return False


@kernel
def _held(p: Instance, s: Search, at: int, d: int, when: float) -> float:
    """What a device holds at an instant of the schedule so far; what has no end yet lasts."""
    k = len(p.memory_bytes)
    total = 0.0
    for v in range(len(p.order)):
        if s.actual[v] == d:
            total += p.persistent_bytes[v]
            if 0 <= s.start[at, v] <= when < s.end[at, v]:
                total += p.working_bytes[v]
    for t in range(len(p.producer)):
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
