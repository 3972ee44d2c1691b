"""What the annealing compiles: a simulation of one plan by the rules of docs/simulator.md, and the loop of random moves.

The simulation is written from the rules alone and shares no code with baechi_ext.simulate, so that each checks the other. It gives
the makespan, the peaks and the order of starts. Usage of memory is counted as it is taken and given back, and compared with the
peak when an instant is over.

One file, because what is compiled is kept beside it and made again only when this file changes. The parts of the simulation are
inlined: to hand over the arrays from call to call costs more than most parts do.
"""

import numpy as np
from numba import njit

from benchmarks.arrays import Best, Decision, Problem, Slice, State, Units

INFINITY = np.inf
LEAST_EXCESS = 1e-3
"""A plan that does not fit costs as much more as if it were this part of a limit further over it."""


@njit(cache=True, error_model="numpy", _nrt=False)
def run(p: Problem, s: State, plan: Decision) -> float:
    """The makespan in microseconds; `s.peak` then holds the peak of every device, `s.started` the order of starts."""
    _prepare(p, s, plan)
    for v in range(len(plan.device)):
        if s.missing[v] == 0:
            _make_ready(p, s, plan, v, 0.0)
    now, count = 0.0, 0
    while True:
        for d in range(len(p.speed)):
            if s.running[d] >= 0 and s.op_end[d] == now:
                _end_op(p, s, plan, d)
        _end_transfers(p, s, plan, now)
        if not p.parallel:
            _start_transfers(p, s, plan, now)
        for d in range(len(p.speed)):
            if s.running[d] < 0 and s.ready_count[d] > 0:
                s.started[count] = _start_op(p, s, plan, d, now)
                count += 1
        later = _next_instant(p, s)
        if later > now:
            for d in range(len(p.speed)):
                s.peak[d] = max(s.peak[d], s.used[d])
        if later == INFINITY:
            return now
        now = later


@njit(cache=True, inline="always")
def _prepare(p: Problem, s: State, plan: Decision) -> None:
    k = len(p.speed)
    s.unread[:] = 0
    if p.charged:
        s.taken_in[:] = False
    for array in (s.ready_at, s.ready_count, s.requests_at, s.requests_count, s.waiting):
        array[:] = 0
    s.used[:] = 0.0
    s.peak[:] = 0.0
    s.running[:] = -1
    s.sending[:] = -1
    s.receiving[:] = False
    for v in range(len(plan.device)):
        s.missing[v] = p.inputs_at[v + 1] - p.inputs_at[v]
        s.used[plan.device[v]] += p.persistent[v]
        s.ready_at[plan.device[v] + 1] += 1
    for t in range(len(p.producer)):
        home, row = plan.device[p.producer[t]], _row(p, t)
        for i in range(p.readers_at[t], p.readers_at[t + 1]):
            d = plan.device[p.readers[i]]
            c = _copy(p, row, t, d)
            if s.unread[c] == 0 and d != home:
                s.unread[_copy(p, row, t, home)] += 1
                s.requests_at[(0 if p.parallel else home * k + d) + 1] += 1
            s.unread[c] += 1
    for d in range(k):
        s.ready_at[d + 1] += s.ready_at[d]
    for i in range(len(s.requests_count)):
        s.requests_at[i + 1] += s.requests_at[i]


@njit(cache=True, inline="always")
def _row(p: Problem, t: int) -> int:
    return p.outputs_at[p.producer[t]]


@njit(cache=True, inline="always")
def _copy(p: Problem, row: int, t: int, d: int) -> int:
    """The number of tensor t's copy on device d; `row` is the first tensor of t's producer."""
    width = p.outputs_at[p.producer[t] + 1] - row
    return row * len(p.speed) + d * width + t - row


@njit(cache=True, inline="always")
def _tensor_and_device(p: Problem, c: int) -> tuple[int, int]:
    v = p.producer[c // len(p.speed)]
    row = p.outputs_at[v]
    width = p.outputs_at[v + 1] - row
    at = c - row * len(p.speed)
    return row + at % width, at // width


@njit(cache=True, inline="always")
def _make_ready(p: Problem, s: State, plan: Decision, v: int, now: float) -> None:
    d = plan.device[v]
    if plan.prioritised:
        s.key[v, 0], s.key[v, 1] = plan.priority[v], now
    else:
        s.key[v, 0], s.key[v, 1] = now, -p.tails_us[v]
    _push(s.ready, s.ready_at[d], s.ready_count[d], s.key, v)
    s.ready_count[d] += 1


@njit(cache=True, inline="always")
def _before(key: np.ndarray, a: int, b: int) -> bool:
    if key[a, 0] != key[b, 0]:
        return key[a, 0] < key[b, 0]
    if key[a, 1] != key[b, 1]:
        return key[a, 1] < key[b, 1]
    return a < b


@njit(cache=True, inline="always")
def _push(heap: np.ndarray, at: int, count: int, key: np.ndarray, item: int) -> None:
    i = count
    while i > 0:
        above = (i - 1) // 2
        if not _before(key, item, heap[at + above]):
            break
        heap[at + i] = heap[at + above]
        i = above
    heap[at + i] = item


@njit(cache=True, inline="always")
def _pop(heap: np.ndarray, at: int, count: int, key: np.ndarray) -> int:
    """The least of `count` items; the heap holds one less then."""
    least, item, i = heap[at], heap[at + count - 1], 0
    while 2 * i + 1 < count - 1:
        below = 2 * i + 1
        if below + 1 < count - 1 and _before(key, heap[at + below + 1], heap[at + below]):
            below += 1
        if not _before(key, heap[at + below], item):
            break
        heap[at + i] = heap[at + below]
        i = below
    heap[at + i] = item
    return least


@njit(cache=True, inline="always")
def _start_op(p: Problem, s: State, plan: Decision, d: int, now: float) -> int:
    v = _pop(s.ready, s.ready_at[d], s.ready_count[d], s.key)
    s.ready_count[d] -= 1
    duration = p.compute_us[v] / p.speed[d]
    if p.charged:
        duration += _charges(p, s, plan, v, d)
    s.running[d] = v
    s.op_end[d] = now + duration
    s.used[d] += p.extra[v]
    for t in range(p.outputs_at[v], p.outputs_at[v + 1]):
        s.used[d] += p.size[t]
    return v


@njit(cache=True, inline="always")
def _charges(p: Problem, s: State, plan: Decision, v: int, d: int) -> float:
    """What taking in its inputs, where it is the first on the device, and sending its outputs cost the op."""
    total = 0.0
    for i in range(p.inputs_at[v], p.inputs_at[v + 1]):
        t = p.inputs[i]
        home = plan.device[p.producer[t]]
        c = _copy(p, _row(p, t), t, d)
        if home != d and not s.taken_in[c]:
            s.taken_in[c] = True
            total += p.link[home, d, 4] + p.size[t] * p.link[home, d, 5]
    for t in range(p.outputs_at[v], p.outputs_at[v + 1]):
        for there in range(len(p.speed)):
            if there != d and s.unread[_copy(p, p.outputs_at[v], t, there)] > 0:
                total += p.link[d, there, 2] + p.size[t] * p.link[d, there, 3]
    return total


@njit(cache=True, inline="always")
def _end_op(p: Problem, s: State, plan: Decision, d: int) -> None:
    v, now = s.running[d], s.op_end[d]
    s.running[d] = -1
    s.used[d] -= p.extra[v]
    for i in range(p.inputs_at[v], p.inputs_at[v + 1]):
        t = p.inputs[i]
        _let_go(p, s, t, _copy(p, _row(p, t), t, d), d)
    row = p.outputs_at[v]
    for t in range(row, p.outputs_at[v + 1]):
        _arrive(p, s, plan, t, d, now)
        for there in range(len(p.speed)):
            c = _copy(p, row, t, there)
            if there != d and s.unread[c] > 0:
                duration = p.link[d, there, 0] + p.size[t] * p.link[d, there, 1]
                if duration == 0.0:
                    s.used[there] += p.size[t]
                    _let_go(p, s, t, _copy(p, row, t, d), d)
                    _arrive(p, s, plan, t, there, now)
                elif p.parallel:
                    s.used[there] += p.size[t]
                    _request(s, c, 0, now + duration, 0.0)
                else:
                    s.waiting[d] += 1
                    _request(s, c, d * len(p.speed) + there, now, -_urgency(p, plan, t, there))


@njit(cache=True, inline="always")
def _let_go(p: Problem, s: State, t: int, c: int, d: int) -> None:
    """One that needed the copy on device d has ended."""
    s.unread[c] -= 1
    if s.unread[c] == 0:
        s.used[d] -= p.size[t]


@njit(cache=True, inline="always")
def _request(s: State, c: int, queue: int, first: float, second: float) -> None:
    s.request_key[c, 0], s.request_key[c, 1] = first, second
    _push(s.requests, s.requests_at[queue], s.requests_count[queue], s.request_key, c)
    s.requests_count[queue] += 1


@njit(cache=True, inline="always")
def _urgency(p: Problem, plan: Decision, t: int, d: int) -> float:
    longest = 0.0
    for i in range(p.readers_at[t], p.readers_at[t + 1]):
        if plan.device[p.readers[i]] == d:
            longest = max(longest, p.tails_us[p.readers[i]])
    return longest


@njit(cache=True, inline="always")
def _arrive(p: Problem, s: State, plan: Decision, t: int, d: int, now: float) -> None:
    for i in range(p.readers_at[t], p.readers_at[t + 1]):
        w = p.readers[i]
        if plan.device[w] == d:
            s.missing[w] -= 1
            if s.missing[w] == 0:
                _make_ready(p, s, plan, w, now)


@njit(cache=True, inline="always")
def _end_transfers(p: Problem, s: State, plan: Decision, now: float) -> None:
    """All transfers that end now have arrived, and their channels are free."""
    if p.parallel:
        while s.requests_count[0] > 0 and s.request_key[s.requests[0], 0] == now:
            c = _pop(s.requests, 0, s.requests_count[0], s.request_key)
            s.requests_count[0] -= 1
            _end_transfer(p, s, plan, c, now)
        return
    for d in range(len(p.speed)):
        if s.sending[d] >= 0 and s.send_end[d] == now:
            c = s.sending[d]
            s.sending[d] = -1
            s.receiving[_tensor_and_device(p, c)[1]] = False
            _end_transfer(p, s, plan, c, now)


@njit(cache=True, inline="always")
def _end_transfer(p: Problem, s: State, plan: Decision, c: int, now: float) -> None:
    t, there = _tensor_and_device(p, c)
    home = plan.device[p.producer[t]]
    _let_go(p, s, t, _copy(p, _row(p, t), t, home), home)
    _arrive(p, s, plan, t, there, now)


@njit(cache=True, inline="always")
def _start_transfers(p: Problem, s: State, plan: Decision, now: float) -> None:
    k = len(p.speed)
    while True:
        best = -1
        for i in range(k):
            if s.sending[i] >= 0 or s.waiting[i] == 0:
                continue
            for j in range(k):
                queue = i * k + j
                if s.requests_count[queue] > 0 and not s.receiving[j]:
                    c = s.requests[s.requests_at[queue]]
                    if best < 0 or _before(s.request_key, c, best):
                        best = c
        if best < 0:
            return
        t, there = _tensor_and_device(p, best)
        home = plan.device[p.producer[t]]
        queue = home * k + there
        _pop(s.requests, s.requests_at[queue], s.requests_count[queue], s.request_key)
        s.requests_count[queue] -= 1
        s.waiting[home] -= 1
        s.sending[home] = best
        s.send_end[home] = now + (p.link[home, there, 0] + p.size[t] * p.link[home, there, 1])
        s.receiving[there] = True
        s.used[there] += p.size[t]


@njit(cache=True, inline="always")
def _next_instant(p: Problem, s: State) -> float:
    later = INFINITY
    for d in range(len(p.speed)):
        if s.running[d] >= 0:
            later = min(later, s.op_end[d])
        if s.sending[d] >= 0:
            later = min(later, s.send_end[d])
    if p.parallel and s.requests_count[0] > 0:
        later = min(later, s.request_key[s.requests[0], 0])
    return later


@njit(cache=True)
def earliest_end(p: Problem, unit_of: np.ndarray, order: np.ndarray) -> np.ndarray:
    """List scheduling: ops in the given topological order, each where it ends first if no transfer waits for another."""
    k = len(p.speed)
    device, home = np.full(len(order), -1), np.full(len(order), -1)
    end, free = np.zeros(len(order)), np.zeros(k)
    for v in order:
        best, soonest = -1, np.inf
        for d in range(k):
            if home[unit_of[v]] not in (-1, d):
                continue
            ready = free[d]
            for i in range(p.inputs_at[v], p.inputs_at[v + 1]):
                t = p.inputs[i]
                there = device[p.producer[t]]
                ready = max(ready, end[p.producer[t]] + (0.0 if there == d else p.link[there, d, 0] + p.size[t] * p.link[there, d, 1]))
            if ready + p.compute_us[v] / p.speed[d] < soonest:
                best, soonest = d, ready + p.compute_us[v] / p.speed[d]
        device[v] = home[unit_of[v]] = best
        end[v] = free[best] = soonest
    return device


@njit(cache=True)
def seed_lots(seed: int) -> None:
    np.random.seed(seed)


@njit(cache=True)
def cost_of(p: Problem, s: State, plan: Decision, units: Units, penalty: float) -> tuple[float, bool]:
    """The makespan, more for bytes over the limits, and whether the plan fits."""
    makespan_us = run(p, s, plan)
    excess = 0.0
    for d in range(len(p.speed)):
        if s.peak[d] > units.limit[d]:
            excess += LEAST_EXCESS + (s.peak[d] - units.limit[d]) / max(1.0, units.limit[d])
    return makespan_us * (1.0 + penalty * excess), excess == 0.0


@njit(cache=True)
def _random_move(p: Problem, plan: Decision, units: Units) -> tuple[int, int, float]:
    """(unit, its device, 0) after moving it, or (-1, op, its priority) after changing that."""
    k = len(p.speed)
    if k > 1 and np.random.random() < 0.5:
        u = np.random.randint(len(units.at) - 1)
        before = plan.device[units.ops[units.at[u]]]
        _move(plan, units, u, (before + 1 + np.random.randint(k - 1)) % k)
        return u, before, 0.0
    v = np.random.randint(len(plan.device))
    was = plan.priority[v]
    far = len(plan.device) ** -np.random.random()
    plan.priority[v] += far * (2.0 * np.random.random() - 1.0)
    return -1, v, was


@njit(cache=True)
def _move(plan: Decision, units: Units, u: int, d: int) -> None:
    for i in range(units.at[u], units.at[u + 1]):
        plan.device[units.ops[i]] = d


@njit(cache=True)
def _undo(plan: Decision, units: Units, move: tuple[int, int, float]) -> None:
    if move[0] >= 0:
        _move(plan, units, move[0], move[1])
    else:
        plan.priority[move[1]] = move[2]


@njit(cache=True)
def mean_change(p: Problem, s: State, plan: Decision, units: Units, cut: Slice) -> float:
    """How much a random move changes the cost, where it does at all; tries `cut.count`."""
    cost, total, count = cost_of(p, s, plan, units, cut.penalty)[0], 0.0, 0
    for _ in range(cut.count):
        move = _random_move(p, plan, units)
        change = abs(cost_of(p, s, plan, units, cut.penalty)[0] - cost)
        total += change
        count += change > 0.0
        _undo(plan, units, move)
    return total / max(1, count)


@njit(cache=True)
def anneal(p: Problem, s: State, plan: Decision, units: Units, best: Best, cut: Slice) -> None:
    """Some random moves at one temperature."""
    current, _ = cost_of(p, s, plan, units, cut.penalty)
    for _ in range(cut.count):
        move = _random_move(p, plan, units)
        cost, fits = cost_of(p, s, plan, units, cut.penalty)
        worse = cost - current
        if worse > 0.0 and np.random.random() >= np.exp(-worse / max(cut.temperature, 1e-300)):
            _undo(plan, units, move)
            continue
        current = cost
        if keep(best, plan, cost, fits):
            best.priority[:] = plan.priority


@njit(cache=True)
def keep(best: Best, plan: Decision, cost: float, fits: bool) -> bool:
    """Whether the plan is better than the best so far; if so, its devices and its cost are kept."""
    over = 0.0 if fits else 1.0
    if over > best.cost[0] or (over == best.cost[0] and cost >= best.cost[1]):
        return False
    best.cost[0], best.cost[1] = over, cost
    best.device[:] = plan.device
    return True
