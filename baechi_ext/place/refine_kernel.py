"""Simulated annealing over placements and priorities, compiled (Kirkpatrick, Gelatt and Vecchi, Science 220, 1983).

A plan costs its makespan and, for every byte over a device's limit, a weight that grows while the search stays over the limits and
shrinks while it keeps them. Whenever a plan is accepted its priorities become the ranks of its ops in the order of their starts:
the same timeline, and a move in the order is then a rank between two others.

Moves: a block of ops (a unit, one of the clusters of units, or a region: what grows from a unit along tensors on its device) to a
device, any or a neighbour's; an exchange of two units or of two regions; an op of the critical path to where its input comes from, or
before the op that holds it up; an op earlier on its device; a unit off a device that is too full.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from baechi_ext.simulate.arrays import Floats, Ints, Problem, Records, State
from baechi_ext.simulate.jit import kernel, part
from baechi_ext.simulate.simulate_kernel import run

SETTINGS = np.dtype(
    [(name, "f8") for name in ("from_temperature", "to_temperature", "weight", "heaviest", "target_us", "excess_bytes", "makespan_us")]
    + [(name, "f8") for name in ("best_excess_bytes", "best_makespan_us", "path_share", "order_share")]
    + [(name, "i8") for name in ("steps", "done", "levels", "logged", "path")]
    + [("random", "u8"), ("stop", "?"), ("path_is_old", "?")],
    align=True,
)
OP = np.dtype([("start_us", "f8"), ("end_us", "f8"), ("before", "i4"), ("rank", "i4")], align=True)
CHANGE = np.dtype([("priority", "f8"), ("op", "i4"), ("device", "i4")], align=True)

_REGIONS, _LARGEST_REGION = 0.7, 0.5
"""The share of moves between devices that are of regions, and the largest region in parts of a device's share of the ops."""


class Search(NamedTuple):
    """One chain: the plan it is at, the best it saw, and what it may move. The plan in trial is in the simulation's State."""

    unit: Ints
    """The unit of each op: what shares its device."""
    blocks_from: Ints
    """By level, the first of its blocks; level 0 has the units."""
    block_from: Ints
    """By block, the first of its `members`."""
    members: Ints
    ops: Records
    """The timeline of the plan it is at; `before` is the op before it on its device, or -1."""
    order: Ints
    """Ops by rank: in the order of their starts."""
    path: Ints
    """A critical path, from its end."""
    peaks: Floats
    peaks_us: Floats
    """By device, since when it held that much."""
    persistent: Floats
    """By device, the persistent bytes of the plan in trial: what it exceeds limits by at least."""
    log: Records
    """The changes made by the move in trial."""
    placement: Ints
    """The best plan."""
    priority: Floats
    settings: Records
    """One record."""


@kernel
def anneal(p: Problem, s: State, q: Search) -> None:
    """Runs the steps that the settings ask for, from the plan in `s`, or until `stop` or a valid plan that meets `target_us`."""
    q_ = q.settings[0]
    allowed = np.inf
    over = under = 0
    for step in range(q_.steps + 1):
        if q_.stop or (q_.best_excess_bytes == 0 and q_.best_makespan_us <= q_.target_us):
            break
        q_.logged = 0
        if step > 0:
            _move(p, s, q, step)
            temperature = q_.from_temperature * (q_.to_temperature / q_.from_temperature) ** (step / q_.steps)
            allowed = q_.makespan_us + q_.weight * q_.excess_bytes - temperature * np.log(_random(q) + 1e-300)
            if q_.logged == 0:
                continue
            if q_.target_us + q_.weight * _least_excess(p, q) > allowed:
                _undo(p, s, q)
                continue
        s.totals[0].until_us = allowed
        makespan_us = run(p, s)
        excess = _excess(p, s)
        q_.done += 1
        if makespan_us + q_.weight * excess <= allowed:
            q_.makespan_us, q_.excess_bytes = makespan_us, excess
            _accept(p, s, q)
        else:
            _undo(p, s, q)
        over, under = (over + 1, 0) if q_.excess_bytes > 0 else (0, under + 1)
        if over == 100:
            q_.weight, over = min(q_.weight * 1.3, q_.heaviest), 0
        elif under == 100:
            q_.weight, under = q_.weight / 1.2, 0


@part
def _excess(p: Problem, s: State) -> float:
    excess = 0.0
    for d in range(len(s.devices)):
        excess += max(0.0, s.devices[d].peak_bytes - p.devices[d].memory_bytes)
    return excess


@part
def _least_excess(p: Problem, q: Search) -> float:
    excess = 0.0
    for d in range(len(q.persistent)):
        excess += max(0.0, q.persistent[d] - p.devices[d].memory_bytes)
    return excess


@part
def _accept(p: Problem, s: State, q: Search) -> None:
    """The plan in trial is the one the chain is at."""
    q_ = q.settings[0]
    for d in range(len(s.devices)):
        s.devices[d].target = -1
        q.peaks[d], q.peaks_us[d] = s.devices[d].peak_bytes, s.devices[d].peak_us
        q.persistent[d] = 0.0
    for rank in range(len(q.order)):
        v = s.ops[rank].started
        device = s.devices[s.placement[v]]
        q.order[rank] = v
        op = q.ops[v]
        op.start_us, op.end_us, op.rank, op.before = s.ops[v].start_us, s.ops[v].end_us, rank, device.target
        device.target = v
        q.persistent[s.placement[v]] += p.ops[v].persistent_bytes
        s.priority[v] = rank
    s.totals[0].has_priority = True
    q_.path_is_old = True
    better = q_.makespan_us < q_.best_makespan_us if q_.excess_bytes == q_.best_excess_bytes else q_.excess_bytes < q_.best_excess_bytes
    if better:
        q_.best_excess_bytes, q_.best_makespan_us = q_.excess_bytes, q_.makespan_us
        for v in range(len(q.order)):
            q.placement[v], q.priority[v] = s.placement[v], s.priority[v]


@part
def _undo(p: Problem, s: State, q: Search) -> None:
    for i in range(q.settings[0].logged - 1, -1, -1):
        change = q.log[i]
        q.persistent[s.placement[change.op]] -= p.ops[change.op].persistent_bytes
        q.persistent[change.device] += p.ops[change.op].persistent_bytes
        s.placement[change.op] = change.device
        s.priority[change.op] = change.priority


def make_search(problem: Problem, levels: Sequence[Sequence[Sequence[int]]]) -> Search:
    """A chain for a problem. `levels`: lists of blocks, each with every op in one of them; those of the first are the units."""
    n, k = len(problem.ops) - 1, len(problem.devices)
    unit = np.zeros(n, np.int32)
    for u, block in enumerate(levels[0]):
        unit[list(block)] = u
    blocks = [block for level in levels for block in level]
    settings = np.zeros(1, SETTINGS)
    settings["levels"] = len(levels)
    return Search(
        unit=unit,
        blocks_from=np.cumsum([0, *map(len, levels)], dtype=np.int32),
        block_from=np.cumsum([0, *map(len, blocks)], dtype=np.int32),
        members=np.array([v for block in blocks for v in block], np.int32),
        ops=np.zeros(n, OP),
        order=np.zeros(n, np.int32),
        path=np.zeros(n, np.int32),
        peaks=np.zeros(k, np.float64),
        peaks_us=np.zeros(k, np.float64),
        persistent=np.zeros(k, np.float64),
        log=np.zeros(2 * n, CHANGE),
        placement=np.zeros(n, np.int32),
        priority=np.zeros(n, np.float64),
        settings=settings,
    )


# Moves


@part
def _random(q: Search) -> float:
    """The next number in [0, 1) of xorshift64* (Vigna, ACM Trans. Mathematical Software 42, 2016)."""
    x = q.settings[0].random
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    q.settings[0].random = x
    return ((x * np.uint64(2685821657736338717)) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@part
def _below(q: Search, n: int) -> int:
    return int(_random(q) * n)


@part
def _move(p: Problem, s: State, q: Search, step: int) -> None:
    q_ = q.settings[0]
    choice = _random(q)
    k = len(s.devices)
    if choice < q_.path_share:
        _move_critical(p, s, q)
        return
    choice = _random(q)
    if k == 1 or choice < q_.order_share:
        _move_earlier(q, s, _below(q, len(q.order)), _few(q))
        return
    if q_.excess_bytes > 0 and _random(q) < 0.5:
        _relieve(p, s, q)
        return
    choice = _random(q)
    v = _below(q, len(q.order))
    region = _random(q) < _REGIONS
    if choice < 0.3:
        w = _below(q, len(q.order))
        d, e = s.placement[v], s.placement[w]
        if d != e and region:
            _move_region(p, s, q, v, e, step)
            _move_region(p, s, q, w, d, step)
        elif d != e:
            _move_block(p, s, q, q.unit[v], e)
            _move_block(p, s, q, q.unit[w], d)
        return
    block = q.unit[v] if region else _draw_block(q, v, step)
    v = q.members[q.block_from[block] + _below(q, q.block_from[block + 1] - q.block_from[block])]
    w = _neighbour(p, q, v) if choice < 0.8 else -1
    target = s.placement[w] if w >= 0 else s.placement[v]
    if target == s.placement[v]:
        target = (s.placement[v] + 1 + _below(q, k - 1)) % k
    if region:
        _move_region(p, s, q, v, target, step)
    else:
        _move_block(p, s, q, block, target)


@part
def _draw_block(q: Search, v: int, step: int) -> int:
    """The unit of v, or a block of another level: only of the first ones towards the end of a round."""
    q_ = q.settings[0]
    levels = 1 + int((q_.levels - 1) * (1 - step / q_.steps) + 0.999)
    level = _below(q, levels)
    return q.blocks_from[level] + _below(q, q.blocks_from[level + 1] - q.blocks_from[level]) if level > 0 else q.unit[v]


@part
def _move_region(p: Problem, s: State, q: Search, v: int, target: int, step: int) -> None:
    """The unit of v and others of its device that it is bound to, one by way of another; fewer and fewer towards the end of a round."""
    q_ = q.settings[0]
    source, first = s.placement[v], q_.logged
    most = max(2.0, _LARGEST_REGION * len(q.order) / len(s.devices))
    size = 1 + int(most ** (_random(q) * (1 - step / q_.steps)))
    _move_block(p, s, q, q.unit[v], target)
    for _ in range(2 * size):
        if q_.logged - first >= size:
            break
        w = _neighbour(p, q, q.log[first + _below(q, q_.logged - first)].op)
        if w >= 0 and s.placement[w] == source:
            _move_block(p, s, q, q.unit[w], target)


@part
def _move_block(p: Problem, s: State, q: Search, block: int, target: int) -> None:
    for i in range(q.block_from[block], q.block_from[block + 1]):
        v = q.members[i]
        if s.placement[v] != target and p.ops[v].pin < 0:
            _log(s, q, v)
            q.persistent[s.placement[v]] -= p.ops[v].persistent_bytes
            q.persistent[target] += p.ops[v].persistent_bytes
            s.placement[v] = target


@part
def _log(s: State, q: Search, v: int) -> None:
    i = q.settings[0].logged
    q.log[i].op, q.log[i].device, q.log[i].priority = v, s.placement[v], s.priority[v]
    q.settings[0].logged = i + 1


@part
def _neighbour(p: Problem, q: Search, v: int) -> int:
    """An op that v reads from or that reads from v, drawn at random; -1 where there is none."""
    inputs = p.ops[v + 1].inputs_from - p.ops[v].inputs_from
    outputs = p.ops[v + 1].outputs_from - p.ops[v].outputs_from
    if inputs + outputs == 0:
        return -1
    i = _below(q, inputs + outputs)
    if i < inputs:
        return p.tensors[p.lists[p.ops[v].inputs_from + i]].producer
    t = p.lists[p.ops[v].outputs_from + i - inputs]
    readers = p.tensors[t + 1].readers_from - p.tensors[t].readers_from
    return p.lists[p.tensors[t].readers_from + _below(q, readers)]


@part
def _few(q: Search) -> int:
    return 1 + int(-np.log(1.0 - _random(q)) * 3.0)


@part
def _move_earlier(q: Search, s: State, v: int, hops: int) -> None:
    """Op v gets a rank before the op that is so many places before it on its device, or before the first one there."""
    w = v
    for _ in range(hops):
        if q.ops[w].before < 0:
            break
        w = q.ops[w].before
    if w != v:
        _log(s, q, v)
        s.priority[v] = q.ops[w].rank - 0.5


@part
def _relieve(p: Problem, s: State, q: Search) -> None:
    """A unit leaves a device that is too full, perhaps in exchange for another."""
    n, k = len(q.order), len(s.devices)
    for _ in range(50):
        v = _below(q, n)
        d = s.placement[v]
        if q.peaks[d] > p.devices[d].memory_bytes:
            target = (d + 1 + _below(q, k - 1)) % k
            other = (d + 1 + _below(q, k - 1)) % k
            if p.devices[other].memory_bytes - q.peaks[other] > p.devices[target].memory_bytes - q.peaks[target]:
                target = other
            _move_block(p, s, q, q.unit[v], target)
            if _random(q) < 0.5:
                w = _below(q, n)
                if s.placement[w] == target and q.unit[w] != q.unit[v]:
                    _move_block(p, s, q, q.unit[w], d)
            return


# The critical path


@part
def _move_critical(p: Problem, s: State, q: Search) -> None:
    """Something that ends a wait on the critical path: the op before in the queue yields or goes, or input and reader meet."""
    q_ = q.settings[0]
    if q_.path_is_old:
        _find_path(p, s, q)
    v = q.path[_below(q, q_.path)]
    k, d, before = len(s.devices), s.placement[v], q.ops[v].before
    queued = before >= 0 and q.ops[before].end_us == q.ops[v].start_us
    source = _latest_source(p, q, s, v)
    choice = _random(q)
    if queued and choice < 0.4:
        _move_earlier(q, s, v, _few(q))
    elif k > 1 and source >= 0 and s.placement[source] != d and choice < 0.8:
        if _random(q) < 0.5:
            _move_block(p, s, q, q.unit[v], s.placement[source])
        else:
            _move_block(p, s, q, q.unit[source], d)
    elif k > 1:
        w = before if queued and choice < 0.7 else v
        _move_block(p, s, q, q.unit[w], (d + 1 + _below(q, k - 1)) % k)


@part
def _latest_source(p: Problem, q: Search, s: State, v: int) -> int:
    """The producer whose tensor could have come to v last, links as if they were free; -1 without inputs."""
    source, latest_us = -1, -1.0
    for i in range(p.ops[v].inputs_from, p.ops[v + 1].inputs_from):
        t = p.lists[i]
        u = p.tensors[t].producer
        at_us = q.ops[u].end_us
        if s.placement[u] != s.placement[v]:
            link = p.links[s.placement[u], s.placement[v]]
            at_us += link.latency_us + p.tensors[t].bytes * link.us_per_byte
        if at_us > latest_us:
            source, latest_us = u, at_us
    return source


@part
def _find_path(p: Problem, s: State, q: Search) -> None:
    """Ops that held one another up, from the last to end back to one that began at 0."""
    q_ = q.settings[0]
    v = q.order[0]
    for w in range(len(q.order)):
        if q.ops[w].end_us > q.ops[v].end_us or (q.ops[w].end_us == q.ops[v].end_us and q.ops[w].rank > q.ops[v].rank):
            v = w
    count = 0
    while v >= 0:
        q.path[count] = v
        count += 1
        before = q.ops[v].before
        v = before if before >= 0 and q.ops[before].end_us == q.ops[v].start_us else _latest_source(p, q, s, v)
    q_.path = count
    q_.path_is_old = False
