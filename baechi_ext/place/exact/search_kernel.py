"""The exhaustive search, compiled: every placement, and for each every order in which the simulator could start its ops.

A plan is a placement and priorities. The simulator never idles on purpose, so priorities only choose among the ops that are ready on an
idle device; the search simulates and branches there. Both levels cut what cannot end before the best plan known.
"""

from baechi_ext.place.exact.bound_kernel import hopeless, placement_bound, urgency
from baechi_ext.place.exact.records_kernel import DEPTH, DONE, FOUND, LEVEL, NODES, PAUSED, RELABELING, SLACK, Array, Record
from baechi_ext.place.exact.schedule_kernel import begin_schedule, step_schedule
from baechi_ext.simulate.jit import kernel, part


@kernel
def search(instance: Array, state: Array, steps: int) -> int:
    """Goes on for this many steps at most, or until a better plan is found: `s.actual`, and its order in `s.sequence[LEVEL]`."""
    p, s = instance[0], state[0]
    while steps > 0:
        steps -= 1
        s.cursor[NODES] += 1
        if s.cursor[LEVEL] >= 0:
            if step_schedule(p, s):
                return FOUND
        elif s.cursor[DEPTH] < 0:
            return DONE
        else:
            _step_placement(p, s)
    return PAUSED


@part
def _step_placement(p: Record, s: Record) -> None:
    """Gives the next device to the unit in hand, or the next order of labels to a full placement."""
    u = s.cursor[DEPTH]
    if u == p.units:
        s.cursor[RELABELING] += 1
        if s.cursor[RELABELING] == p.exchanges or (s.cursor[RELABELING] > 0 and not _label_matters(p, s)):
            s.cursor[DEPTH] -= 1
        elif _relabel(p, s):
            begin_schedule(p, s)
        return
    d = s.choice[u] + 1
    while d < p.devices and ((p.pin[u] >= 0 and d != p.pin[u]) or not _opens_in_turn(p, s, u, d)):
        d += 1
    s.choice[u] = d if d < p.devices else -1
    for i in range(p.members_from[u], p.members_from[u + 1]):
        s.placement[p.members[i]] = s.choice[u]
    if s.choice[u] < 0:
        s.cursor[DEPTH] -= 1
    elif _may_fit(p, s, d) and not hopeless(s, placement_bound(p, s)):
        s.cursor[DEPTH] += 1
        s.cursor[RELABELING] = -1


@part
def _opens_in_turn(p: Record, s: Record, u: int, d: int) -> bool:
    """False for a device that could be exchanged with an earlier one while neither holds anything: only the first of them is tried."""
    for e in range(p.twin[d], d):
        if p.twin[e] == p.twin[d] and not _used(s, u, e):
            return _used(s, u, d)
    return True


@part
def _used(s: Record, u: int, d: int) -> bool:
    found = False
    for w in range(u):
        found |= s.choice[w] == d
    return found


@part
def _label_matters(p: Record, s: Record) -> bool:
    """True if two transfers from one op to two devices tie, so that the devices' order decides."""
    if p.parallel:
        return False
    for v in range(p.ops):
        home, count = s.placement[v], 0
        for i in range(p.outputs_from[v], p.outputs_from[v + 1]):
            t = p.outputs[i]
            for d in range(p.devices):
                path_us = urgency(p, t, d, s.placement)
                if d != home and path_us >= 0 and p.transfer_us[home, d, t] > 0:
                    for j in range(count):
                        if s.jobs[0, j] == path_us and s.jobs[1, j] != d:
                            return True
                    s.jobs[0, count], s.jobs[1, count] = path_us, d
                    count += 1
    return False


@part
def _relabel(p: Record, s: Record) -> bool:
    """Sets the actual placement; False where another relabeling gives the same one."""
    exchange = s.cursor[RELABELING]
    for d in range(p.devices):
        for e in range(p.twin[d], d):  # of those alike that hold nothing one order is enough
            alike = p.twin[e] == p.twin[d] and p.labels[exchange, e] > p.labels[exchange, d]
            if alike and not _used(s, p.units, d) and not _used(s, p.units, e):
                return False
    for v in range(p.ops):
        s.actual[v] = p.labels[exchange, s.placement[v]]
    return True


@part
def _may_fit(p: Record, s: Record, d: int) -> bool:
    """False where the persistent bytes placed on a device and, beside them, the neediest op leave no doubt that it overflows."""
    held = neediest = 0.0
    for v in range(p.ops):
        if s.placement[v] == d:
            held += p.persistent_bytes[v]
            neediest = max(neediest, p.live_bytes[v])
    return (held + neediest) * (1 - SLACK) <= p.memory_bytes[d]
