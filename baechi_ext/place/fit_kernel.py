"""Search for a plan that keeps memory limits, compiled: the chain of `refine_kernel`, with the bytes over the limits for its cost.

A chain without moves in the order has the shortest path to the end run first in all its plans, so that tensors are soon read.
Moves begin where a device holds too much, with what it holds at the instant of its peak: a unit goes elsewhere, perhaps in exchange;
an op that began before that instant waits for others of its device, or one that reads what is held comes before others.
"""

import numpy as np

from baechi_ext.place.refine_kernel import (
    Search,
    _accept,
    _below,
    _excess,
    _least_excess,
    _log,
    _move_block,
    _move_earlier,
    _neighbour,
    _random,
    _undo,
)
from baechi_ext.simulate.arrays import Problem, State
from baechi_ext.simulate.jit import kernel, part
from baechi_ext.simulate.simulate_kernel import run

_DRAWS = 50
"""The draws for an op that is held at a peak, before none is taken."""


@kernel
def fit(p: Problem, s: State, q: Search) -> None:
    """Runs the steps that the settings ask for, from the plan in `s`, or until `stop` or a plan without excess.

    Temperatures are in bytes.
    """
    q_ = q.settings[0]
    allowed = np.inf
    s.totals[0].until_us = np.inf
    for step in range(q_.steps + 1):
        if q_.stop or q_.best_excess_bytes == 0:
            break
        q_.logged = 0
        if step > 0:
            _move(p, s, q, step)
            temperature = q_.from_temperature * (q_.to_temperature / q_.from_temperature) ** (step / q_.steps)
            allowed = q_.excess_bytes - temperature * np.log(_random(q) + 1e-300)
            if q_.logged == 0:
                continue
            if _least_excess(p, q) > allowed:
                _undo(p, s, q)
                continue
        makespan_us = run(p, s)
        excess = _excess(p, s)
        q_.done += 1
        if excess <= allowed:
            q_.makespan_us, q_.excess_bytes = makespan_us, excess
            _accept(p, s, q)
            if q_.order_share == 0:
                for v in range(len(q.order)):
                    s.priority[v] = p.ops[v].tail_us
        else:
            _undo(p, s, q)


@part
def _move(p: Problem, s: State, q: Search, step: int) -> None:
    q_ = q.settings[0]
    k, n = len(s.devices), len(q.order)
    v = _held_at_peak(p, s, q)
    choice = _random(q)
    if v < 0 or choice < 0.1:
        v = _below(q, n)
    if k == 1 or _random(q) < q_.order_share:
        if q.ops[v].start_us <= q.peaks_us[s.placement[v]]:
            _move_later(s, q, v)
        else:
            _move_earlier(q, s, v, _hops(q))
        return
    d = s.placement[v]
    block, choice = q.unit[v], _random(q)
    if choice < 0.2 and q_.levels > 1:
        level = 1 + _below(q, q_.levels - 1)
        block = q.blocks_from[level] + _below(q, q.blocks_from[level + 1] - q.blocks_from[level])
        d = s.placement[q.members[q.block_from[block]]]
    w = _neighbour(p, q, v) if _random(q) < 0.5 else -1
    target = s.placement[w] if w >= 0 else d
    if target == d:
        target = (d + 1 + _below(q, k - 1)) % k
    _move_block(p, s, q, block, target)
    if choice > 0.6:
        w = _below(q, n)
        if s.placement[w] == target and q.unit[w] != q.unit[v]:
            _move_block(p, s, q, q.unit[w], d)


@part
def _held_at_peak(p: Problem, s: State, q: Search) -> int:
    """An op, drawn at random, whose move could lower the peak of a device that is too full; -1 where none was found."""
    for _ in range(_DRAWS):
        v = _below(q, len(q.order))
        d = s.placement[v]
        if q.peaks[d] > p.devices[d].memory_bytes and _is_held(p, s, q, v, q.peaks_us[d]):
            return v
    return -1


@part
def _is_held(p: Problem, s: State, q: Search, v: int, at_us: float) -> bool:
    """True if the device of v holds something for v at that time: parameters, working memory, outputs, or copies of its inputs."""
    if p.ops[v].persistent_bytes > 0 and _random(q) < 0.5:
        return True
    if q.ops[v].start_us <= at_us:
        if at_us < q.ops[v].end_us:
            return True
        for i in range(p.ops[v].outputs_from, p.ops[v + 1].outputs_from):
            t = p.lists[i]
            for j in range(p.tensors[t].readers_from, p.tensors[t + 1].readers_from):
                w = p.lists[j]
                if q.ops[w].start_us > at_us or (q.ops[w].end_us > at_us and s.placement[w] == s.placement[v]):
                    return True
        return False
    for i in range(p.ops[v].inputs_from, p.ops[v + 1].inputs_from):  # noqa: SIM110 - kernels have no generators
        if q.ops[p.tensors[p.lists[i]].producer].end_us <= at_us:
            return True
    return False


@part
def _hops(q: Search) -> int:
    return 1 + int(-np.log(1.0 - _random(q)) * (3.0 if _random(q) < 0.7 else 20.0))


@part
def _move_later(s: State, q: Search, v: int) -> None:
    """Op v gets a rank after one of the ops after it on its device."""
    d, left = s.placement[v], _hops(q)
    w = v
    for rank in range(q.ops[v].rank + 1, len(q.order)):
        if s.placement[q.order[rank]] == d:
            w = q.order[rank]
            left -= 1
            if left == 0:
                break
    if w != v:
        _log(s, q, v)
        s.priority[v] = q.ops[w].rank + 0.5
