"""The compiled loop of the list scheduler (`list_scheduler` says what it does): one event-driven run over arrays of records."""

from baechi_ext.place.list_state_kernel import (
    NEVER,
    NONE,
    OUT,
    PARKED,
    QUEUED,
    STARTABLE,
    WAITING,
    Groups,
    State,
    first_key,
    first_of,
    holds,
    put,
)
from baechi_ext.simulate.arrays import Problem
from baechi_ext.simulate.jit import inlined, kernel, part

_ROUNDED_DOWN = 1 - 1e-9
"""Sums of the same times in another order differ by less."""


@kernel
def run(p: Problem, g: Groups, s: State) -> None:
    """Places and orders all ops: `s.ops` says where and in which order. Where that takes too many looks, only the first of them.

    It is given up, too, if `enough` have not started after `judged_looks`.
    """
    total = s.totals[0]
    for v in range(len(s.ops)):
        if p.ops[v].pin >= 0 and s.ops[v].device == NONE:
            _assign(g, s, v, p.ops[v].pin)
    for v in range(len(s.ops)):
        if s.ops[v].missing == 0:
            _release(p, s, v)
    now = 0.0
    while True:
        _end_ops(p, g, s, now)
        _dispatch(p, g, s, now)
        then = _next_event_us(s)
        if then == NEVER and _force(p, g, s, now):
            then = _next_event_us(s)
        if total.looks > total.usual_looks:
            total.queues = True
        if total.looks > total.judged_looks:
            if total.judged_looks == total.most_looks or total.started < total.enough:
                return
            total.judged_looks = total.most_looks
        if then < NEVER:
            now = then
        elif total.started < len(s.ops) and total.compares_speeds:
            total.compares_speeds = False
        else:
            return


@inlined
def _next_event_us(s: State) -> float:
    then = NEVER
    for d in range(len(s.devices)):
        then = min(then, s.devices[d].alarm_us, s.devices[d].next_us)
    return then


@inlined
def _end_ops(p: Problem, g: Groups, s: State, now: float) -> None:
    """Ends what ends now, by end and position; then their devices may stay awake for favourite children."""
    for d in range(len(s.devices)):
        s.devices[d].ended = NONE
    while True:
        home = NONE
        for d in range(len(s.devices)):
            v = s.devices[d].running
            if v != NONE and s.devices[d].next_us <= now:
                first_us = s.devices[home].next_us if home != NONE else NEVER
                if s.devices[d].next_us < first_us or (s.devices[d].next_us == first_us and v < s.devices[home].running):
                    home = d
        if home == NONE:
            break
        v = s.devices[home].running
        s.devices[home].running = NONE
        s.devices[home].ended = v
        s.devices[home].changed = True
        _end(p, s, v, home)
    for d in range(len(s.devices)):
        v = s.devices[d].ended
        if v != NONE and g.ops[v].favourite_child != NONE:
            _stay_awake(p, s, v, g.ops[v].favourite_child)


@inlined
def _end(p: Problem, s: State, v: int, home: int) -> None:
    s.ops[v].done = True
    s.devices[home].room += p.ops[v].working_bytes
    for i in range(p.ops[v].inputs_from, p.ops[v + 1].inputs_from):
        t = p.lists[i]
        s.unread[t] -= 1
        if s.unread[t] == 0:
            for e in range(len(s.devices)):
                is_home = e == s.ops[p.tensors[t].producer].device
                if is_home or s.copies[t * len(s.devices) + e].arrival_us < NEVER:
                    s.devices[e].room += p.tensors[t].home_bytes if is_home else p.tensors[t].bytes
                    _unpark(p, s, e)
    _unpark(p, s, home)
    for i in range(p.ops[v].outputs_from, p.ops[v + 1].outputs_from):
        t = p.lists[i]
        for j in range(p.tensors[t].readers_from, p.tensors[t + 1].readers_from):
            if s.ops[p.lists[j]].device != NONE:
                s.devices[s.ops[p.lists[j]].device].reads = True
        for e in range(len(s.devices)):
            if s.devices[e].reads:
                s.devices[e].reads = False
                _send(p, s, t, e)
        for j in range(p.tensors[t].readers_from, p.tensors[t + 1].readers_from):
            w = p.lists[j]
            s.ops[w].missing -= 1
            if s.ops[w].missing == 0:
                _release(p, s, w)


@part
def _stay_awake(p: Problem, s: State, v: int, child: int) -> None:
    """The device of v, which just ended, stays awake for a favourite child that is ready and can start nowhere earlier."""
    d, op = s.ops[v].device, s.ops[child]
    if op.missing > 0 or op.begun or (op.device != NONE and op.device != d):
        return
    here = max(_data_ready(p, s, child, d)[0], s.devices[d].free_us)
    for e in range(len(s.devices)):
        if here > max(_data_ready(p, s, child, e)[0], s.devices[e].free_us):
            return
    s.devices[d].awake_for = child


@inlined
def _dispatch(p: Problem, g: Groups, s: State, now: float) -> None:
    """Commits the best proposal of the idle devices until none of them has one.

    At most instants all but one device are as they were when they had none: those are not asked again.
    """
    k = len(s.devices)
    for d in range(k):
        s.devices[d].idle = s.devices[d].running == NONE
        s.devices[d].alarm_us = NEVER
        s.devices[d].changed |= s.devices[d].next_us <= now
    while True:
        best = (NEVER, 0.0, 0.0, k, k)
        for d in range(k):
            if s.devices[d].idle and s.devices[d].changed:
                v = _propose(p, g, s, d, now)
                s.devices[d].next_us = _next_look_us(s, d)
                s.devices[d].changed = holds(s, d, STARTABLE) or s.devices[d].awake_for != NONE
                if v != NONE:
                    schedule_us = max(_data_ready(p, s, v, d)[0], s.devices[d].free_us)
                    load_us = (s.devices[d].load_us + g.ops[v].group_us) / p.devices[d].speed
                    proposal = (schedule_us, -p.ops[v].tail_us, load_us, d, v)
                    if proposal < best:
                        best = proposal
        if best[3] == k:
            break
        _start(p, g, s, best[4], best[3], now)
        s.devices[best[3]].idle = False


@inlined
def _propose(p: Problem, g: Groups, s: State, d: int, now: float) -> int:
    """The op that idle device d would start now, or -1."""
    while _next_look_us(s, d) <= now:
        waits = holds(s, d, WAITING) and first_key(s, d, WAITING) <= now
        _settle(p, g, s, first_of(s, d, WAITING if waits else QUEUED), d, now)
    while holds(s, d, STARTABLE) and not _settle(p, g, s, first_of(s, d, STARTABLE), d, now):
        pass
    first = first_of(s, d, STARTABLE) if holds(s, d, STARTABLE) else NONE
    if first != NONE and _better_elsewhere(p, g, s, first, d, now):
        first = NONE
    favourite = s.devices[d].awake_for
    if favourite == NONE or first == favourite:
        return first
    op = s.ops[favourite]
    taken = op.begun or (op.device != NONE and op.device != d)
    if taken or not _fits(p, g, s, favourite, d) or _better_elsewhere(p, g, s, favourite, d, now):
        s.devices[d].awake_for = NONE
        return first
    if first != NONE and _urgent(p, g, s, first, now):
        return first
    arrives_us = _data_ready(p, s, favourite, d)[0]
    if arrives_us <= now:
        return favourite
    s.devices[d].alarm_us = min(s.devices[d].alarm_us, arrives_us)
    return NONE


@part
def _next_look_us(s: State, d: int) -> float:
    """The time at which an op that waits for device d may be able to start there."""
    then = NEVER
    if holds(s, d, WAITING):
        then = first_key(s, d, WAITING)
    if holds(s, d, QUEUED):
        then = min(then, s.devices[d].in_free_us + first_key(s, d, QUEUED))
    return then


@inlined
def _settle(p: Problem, g: Groups, s: State, v: int, d: int, now: float) -> bool:
    """Puts v into the queue of device d where it belongs now; whether it may start there.

    One that the device's incoming channel alone keeps from starting need not be looked at again each time the channel takes something else.
    """
    op = s.ops[v]
    if op.begun or op.device != NONE:
        may_start = not op.begun and op.device == d
        put(p, s, v, d, STARTABLE if may_start else OUT, 0.0)
        return may_start
    data_us, transfer_us = _data_ready(p, s, v, d)
    detour_us = _detour_us(s, v, transfer_us)
    if data_us + detour_us > now:
        channel_us = (transfer_us + detour_us) * _ROUNDED_DOWN
        queued = s.totals[0].queues and not p.rules[0].parallel and s.devices[d].in_free_us + channel_us > now
        put(p, s, v, d, QUEUED if queued else WAITING, channel_us if queued else data_us + detour_us)
        return False
    if _fits(p, g, s, v, d):
        put(p, s, v, d, STARTABLE, 0.0)
        return True
    put(p, s, v, d, PARKED, _needed_bytes(p, g, s, v, d))
    if s.ops[v].parked >= len(s.devices):
        put(p, s, v, len(s.devices), WAITING, 0.0)
    return False


@part
def _urgent(p: Problem, g: Groups, s: State, v: int, now: float) -> bool:
    """True if v could start on every device that holds it, so that waiting can't spare it a transfer."""
    for d in range(len(s.devices)):
        if (s.ops[v].device == NONE or s.ops[v].device == d) and _fits(p, g, s, v, d) and _data_ready(p, s, v, d)[0] > now:
            return False
    return True


@part
def _better_elsewhere(p: Problem, g: Groups, s: State, v: int, d: int, now: float) -> bool:
    """True if a faster device is expected to end the unplaced op v earlier, behind its share of all work that is ready."""
    total, speed = s.totals[0], p.devices[d].speed
    if not total.compares_speeds or s.ops[v].device != NONE:
        return False
    work_us = p.ops[v].compute_us
    end_us = now + work_us / speed
    queue_us = (total.ready_us - work_us) / total.speed
    for e in range(len(s.devices)):
        faster = p.devices[e].speed
        if (
            faster > speed
            and max(s.devices[e].free_us, now) + queue_us + work_us / faster < end_us
            and _data_ready(p, s, v, e)[0] + work_us / faster < end_us
            and _fits(p, g, s, v, e)
        ):
            return True
    return False


@part
def _force(p: Problem, g: Groups, s: State, now: float) -> bool:
    """Starts an op that fits nowhere on the device whose limit it exceeds least; False where no op is left."""
    k = len(s.devices)
    while holds(s, k, WAITING):
        v = first_of(s, k, WAITING)
        put(p, s, v, k, OUT, 0.0)
        if not s.ops[v].begun and s.ops[v].device == NONE:
            least, d = NEVER, k
            for e in range(k):
                excess = _needed_bytes(p, g, s, v, e) - s.devices[e].room
                if excess < least:
                    least, d = excess, e
            _start(p, g, s, v, d, max(now, _data_ready(p, s, v, d)[0]))
            return True
    return False


@part
def _eligible_us(p: Problem, s: State, v: int, d: int) -> float:
    """The time from which d may take the unplaced op v."""
    data_us, transfer_us = _data_ready(p, s, v, d)
    return data_us + _detour_us(s, v, transfer_us)


@inlined
def _detour_us(s: State, v: int, transfer_us: float) -> float:
    """The time for which a device waits before it takes v, for the transfers that v is spared elsewhere."""
    return s.totals[0].reluctance * max(0.0, transfer_us - s.ops[v].least_transfer_us)


@part
def _data_ready(p: Problem, s: State, v: int, d: int) -> tuple[float, float]:
    """The time at which the inputs of v are, or could be, on device d, and the transfer time that still has to be spent on that."""
    s.totals[0].looks += 1 + p.ops[v + 1].inputs_from - p.ops[v].inputs_from
    k, latest, spent = len(s.devices), 0.0, 0.0
    incoming = s.devices[d].in_free_us
    for i in range(p.ops[v].inputs_from, p.ops[v + 1].inputs_from):
        t = p.lists[i]
        source = s.ops[p.tensors[t].producer].device
        at = s.ops[p.tensors[t].producer].end_us
        if source != d:
            if s.copies[t * k + d].arrival_us < NEVER:
                at = s.copies[t * k + d].arrival_us
            else:
                transfer_us = _transfer_us(p, t, source, d)
                spent += transfer_us
                if p.rules[0].parallel or transfer_us == 0.0:
                    at += transfer_us
                else:
                    at = incoming = max(at, incoming, s.devices[source].out_free_us) + transfer_us
        latest = max(latest, at)
    return latest, spent


@inlined
def _transfer_us(p: Problem, t: int, source: int, target: int) -> float:
    link = p.links[source, target]
    return (link.latency_us + link.send_us) + p.tensors[t].bytes * (link.us_per_byte + link.send_us_per_byte)


@part
def _fits(p: Problem, g: Groups, s: State, v: int, d: int) -> bool:
    return not s.totals[0].limited or s.ops[v].device == d or _needed_bytes(p, g, s, v, d) <= s.devices[d].room


@part
def _needed_bytes(p: Problem, g: Groups, s: State, v: int, d: int) -> float:
    copies = 0.0
    for i in range(p.ops[v].inputs_from, p.ops[v + 1].inputs_from):
        t = p.lists[i]
        if s.ops[p.tensors[t].producer].device != d and s.copies[t * len(s.devices) + d].arrival_us == NEVER:
            copies += p.tensors[t].bytes
    return copies + g.ops[v].group_bytes + g.ops[v].output_bytes + p.ops[v].working_bytes


@part
def _release(p: Problem, s: State, v: int) -> None:
    """All inputs of v have been produced: it waits at its device, or at all of them."""
    s.totals[0].ready_us += p.ops[v].compute_us
    _offer(p, s, v)


@part
def _offer(p: Problem, s: State, v: int) -> None:
    d = s.ops[v].device
    if d != NONE:
        put(p, s, v, d, WAITING, _data_ready(p, s, v, d)[0])
        return
    least = NEVER
    for e in range(len(s.devices)):
        s.devices[e].offered_us, s.devices[e].transfer_us = _data_ready(p, s, v, e)
        least = min(least, s.devices[e].transfer_us)
    s.ops[v].least_transfer_us = least
    for e in range(len(s.devices)):
        put(p, s, v, e, WAITING, s.devices[e].offered_us + _detour_us(s, v, s.devices[e].transfer_us))


@part
def _send(p: Problem, s: State, t: int, d: int) -> bool:
    """Enters the transfer of the finished tensor t to device d; False where it is there or on its way."""
    k, producer = len(s.devices), p.tensors[t].producer
    source = s.ops[producer].device
    if source == d or s.copies[t * k + d].arrival_us < NEVER:
        return False
    at = s.ops[producer].end_us
    transfer_us = _transfer_us(p, t, source, d)
    if p.rules[0].parallel or transfer_us == 0.0:
        at += transfer_us
    else:
        at = max(at, s.devices[d].in_free_us, s.devices[source].out_free_us) + transfer_us
        s.devices[d].in_free_us = s.devices[source].out_free_us = at
        s.devices[d].changed = True
    s.copies[t * k + d].arrival_us = at
    s.devices[d].room -= p.tensors[t].bytes
    return True


@part
def _reconsider(p: Problem, s: State, v: int, d: int) -> None:
    """Lets device d take the unplaced op v earlier, now that less is to be moved for that."""
    token = s.tokens[d * len(s.ops) + v]
    if token.queue != STARTABLE:
        at = _eligible_us(p, s, v, d)
        if token.queue != WAITING or at < token.first:
            put(p, s, v, d, WAITING, at)


@part
def _unpark(p: Problem, s: State, d: int) -> None:
    while holds(s, d, PARKED) and first_key(s, d, PARKED) <= s.devices[d].room:
        v = first_of(s, d, PARKED)
        if not s.ops[v].begun and s.ops[v].device == NONE:
            put(p, s, v, d, WAITING, _eligible_us(p, s, v, d))
        else:
            put(p, s, v, d, OUT, 0.0)


@part
def _assign(g: Groups, s: State, v: int, d: int) -> None:
    for i in range(g.ops[v].members_from, g.ops[v].members_to):
        s.ops[g.members[i]].device = d
    s.devices[d].load_us += g.ops[v].group_us
    s.devices[d].room -= g.ops[v].group_bytes


@part
def _place(p: Problem, g: Groups, s: State, v: int, d: int) -> None:
    """Gives v and the other ops of its colocation group device d."""
    _assign(g, s, v, d)
    for i in range(g.ops[v].members_from, g.ops[v].members_to):
        w = g.members[i]
        for j in range(p.ops[w].inputs_from, p.ops[w + 1].inputs_from):
            t = p.lists[j]
            if s.ops[p.tensors[t].producer].done:
                s.copies[t * len(s.devices) + d].new = _send(p, s, t, d)
        if w != v and s.ops[w].missing == 0:
            _offer(p, s, w)
    for i in range(g.ops[v].members_from, g.ops[v].members_to):
        _reconsider_readers(p, s, g.members[i], d)


@part
def _reconsider_readers(p: Problem, s: State, v: int, d: int) -> None:
    """Reconsiders, once, all ops that read what has just been sent to d for v."""
    start = s.totals[0].started + 1
    for i in range(p.ops[v].inputs_from, p.ops[v + 1].inputs_from):
        t = p.lists[i]
        copy = s.copies[t * len(s.devices) + d]
        if copy.new:
            copy.new = False
            for j in range(p.tensors[t].readers_from, p.tensors[t + 1].readers_from):
                op = s.ops[p.lists[j]]
                if op.device == NONE and op.missing == 0 and op.reconsidered != start:
                    op.reconsidered = start
                    _reconsider(p, s, p.lists[j], d)


@part
def _start(p: Problem, g: Groups, s: State, v: int, d: int, now: float) -> None:
    total = s.totals[0]
    total.ready_us -= p.ops[v].compute_us
    duration_us = p.ops[v].compute_us / p.devices[d].speed
    if p.rules[0].charges:
        duration_us += _receiving_us(p, s, v, d)
    if s.ops[v].device == NONE:
        _place(p, g, s, v, d)
    s.ops[v].begun = True
    s.ops[total.started].started = v
    total.started += 1
    s.devices[d].running = v
    s.devices[d].awake_for = NONE
    s.ops[v].end_us = s.devices[d].free_us = s.devices[d].next_us = now + duration_us
    s.devices[d].room -= g.ops[v].output_bytes + p.ops[v].working_bytes


@part
def _receiving_us(p: Problem, s: State, v: int, d: int) -> float:
    """The time of device d itself for taking in those inputs of v that none of its ops has read before."""
    total = 0.0
    for i in range(p.ops[v].inputs_from, p.ops[v + 1].inputs_from):
        t = p.lists[i]
        source, copy = s.ops[p.tensors[t].producer].device, s.copies[t * len(s.devices) + d]
        if source != d and not copy.taken_in:
            copy.taken_in = True
            link = p.links[source, d]
            total += link.receive_us + p.tensors[t].bytes * link.receive_us_per_byte
    return total
