"""All schedules of one placement: the simulator, with a branch wherever a device has a choice among ready ops."""

import numpy as np

from baechi_ext.place.exact.bound_kernel import hopeless, schedule_bound, sending, urgency
from baechi_ext.place.exact.records_kernel import ABSENT, FLYING, LEVEL, PRESENT, SLACK, WAITING, Record
from baechi_ext.simulate.jit import part

_CHOOSE, _ENDED = range(2)


@part
def begin_schedule(p: Record, s: Record) -> None:
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
    if _advance(p, s, 0) == _CHOOSE and not hopeless(s, schedule_bound(p, s, 0)):
        return
    s.candidates[0] = 1 if s.started[0] == p.ops else 0
    s.candidate[0, 0] = -1


@part
def step_schedule(p: Record, s: Record) -> bool:
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
        if not _overflows(p, s, at + 1, s.now[at + 1]) and not hopeless(s, schedule_bound(p, s, at + 1)):
            s.tried[at + 1] = 0
            s.cursor[LEVEL] += 1
    elif _is_better(p, s, at + 1):
        s.candidates[at + 1] = s.tried[at + 1] = 0
        s.cursor[LEVEL] += 1
        return True
    return False


@part
def _is_better(p: Record, s: Record, at: int) -> bool:
    makespan = 0.0
    for v in range(p.ops):
        makespan = max(makespan, s.end[at, v])
    return not hopeless(s, makespan) and not _overflows(p, s, at, np.inf)


@part
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


@part
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


@part
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


@part
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
        duration += sending(p, s.actual, v)
    s.start[at, v] = s.now[at]
    s.end[at, v] = s.now[at] + duration
    s.running[at, d] = v
    s.sequence[at, v] = s.started[at]
    s.started[at] += 1


@part
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
                    if e != d and urgency(p, p.outputs[i], e, s.actual) >= 0:
                        _request(p, s, at, p.outputs[i], e)


@part
def _arrive(p: Record, s: Record, at: int, t: int, d: int) -> None:
    for i in range(p.readers_from[t], p.readers_from[t + 1]):
        if s.actual[p.readers[i]] == d:
            s.missing[at, p.readers[i]] -= 1


@part
def _request(p: Record, s: Record, at: int, t: int, d: int) -> None:
    x, duration = t * p.devices + d, p.transfer_us[s.actual[p.producer[t]], d, t]
    s.copy_from[at, x] = s.now[at]
    s.copy_until[at, x] = s.now[at] + duration
    if duration == 0:
        s.copy_state[at, x] = PRESENT
        _arrive(p, s, at, t, d)
    else:
        s.copy_state[at, x] = FLYING if p.parallel else WAITING


@part
def _start_transfers(p: Record, s: Record, at: int) -> None:
    """Starts the transfers that can start. While one waits, `copy_from` is when it was requested."""
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


@part
def _goes_first(p: Record, s: Record, at: int, x: int, y: int) -> bool:
    """Earliest requested, longest path of a reader there, producer, device, tensor name."""
    k = p.devices
    if s.copy_from[at, x] != s.copy_from[at, y]:
        return s.copy_from[at, x] < s.copy_from[at, y]
    a, b = urgency(p, x // k, x % k, s.actual), urgency(p, y // k, y % k, s.actual)
    if a != b:
        return a > b
    u, v = p.producer[x // k], p.producer[y // k]
    if u != v:
        return u < v
    if x % k != y % k:
        return x % k < y % k
    return p.name_rank[x // k] < p.name_rank[y // k]


@part
def _overflows(p: Record, s: Record, at: int, until: float) -> bool:
    """True if a device has held more than its memory before `until`: at this instant an op that takes no time may still let go of some."""
    if not p.limited:
        return False
    k = p.devices
    for v in range(p.ops):
        if 0 <= s.start[at, v] < until and _held(p, s, at, s.actual[v], s.start[at, v]) * (1 - SLACK) > p.memory_bytes[s.actual[v]]:
            return True
    for x in range(p.tensors * p.devices):
        if s.copy_state[at, x] < FLYING or s.copy_from[at, x] >= until:
            continue
        if _held(p, s, at, x % k, s.copy_from[at, x]) * (1 - SLACK) > p.memory_bytes[x % k]:
            return True
    return False


@part
def _held(p: Record, s: Record, at: int, d: int, when: float) -> float:
    """The bytes that a device holds at an instant of the schedule so far; what has no end yet lasts."""
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
            total += p.home_bytes[t] if home == d else p.tensor_bytes[t]
    return total
