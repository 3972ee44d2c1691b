"""The state of the compiled list scheduler, and its queues: a heap of ops for each device and reason to wait."""

from typing import NamedTuple

import numpy as np

from baechi_ext.simulate.arrays import Ints, Problem, Records, record
from baechi_ext.simulate.jit import inlined, part

NEVER = np.inf
NONE = -1
OUT, WAITING, STARTABLE, PARKED, QUEUED = 0, 1, 2, 3, 4
"""The queue that an op is in on a device. QUEUED: for the device's incoming channel, by how long the op's inputs take it."""
_KINDS = 4

GROUPED_OP = record("group_us group_bytes output_bytes", "members_from members_to favourite_child")
_OP_STATE = record("end_us least_transfer_us", "device missing parked started reconsidered", "begun done")
_COPY = record("arrival_us", "", "taken_in new")
_TOKEN = record("first", "queue position")
_DEVICE_STATE = record(
    "free_us out_free_us in_free_us load_us room alarm_us next_us offered_us transfer_us", "running awake_for ended", "idle reads changed"
)
_TOTALS = record("ready_us speed reluctance looks usual_looks judged_looks most_looks enough", "started", "compares_speeds limited queues")


class Groups(NamedTuple):
    """The ops' colocation groups and favourite children: all that the scheduler knows beside the simulator's `Problem`."""

    ops: Records
    """`group_us`, `group_bytes`: compute time and persistent bytes of the op's whole group; `favourite_child` -1: none."""
    members: Ints
    """The ops by group."""


class State(NamedTuple):
    """All that one run writes."""

    ops: Records
    """`parked`: on how many devices it is; entry i of `started`: the op that was started as number i. `device` -1: not placed.
    `reconsidered`: the number, from 1, of the start that brought something to a device for it last."""
    unread: Ints
    """Per tensor, its readers that have not ended."""
    copies: Records
    """By tensor and device. `new`: sent because an op that reads it was just placed there."""
    tokens: Records
    """By device and op: the queue that the op is in there, and by what it is sorted. One row more for the ops that are stuck."""
    queues: Ints
    """Heaps of ops: by device those that wait for a time, may start, wait for room, for the channel; at the end those that fit nowhere."""
    sizes: Ints
    """The sizes of the queues."""
    devices: Records
    """`alarm_us`: when an awaited favourite child can start. `next_us`: when the op that runs ends; on an idle device, when one that waits
    for it may be able to start there. `changed`: it may have another proposal than when it was asked last. `offered_us`, `transfer_us`: of
    the op in hand."""
    totals: Records
    """One record. `looks`: at how many ops and inputs the scheduler looked for when they are on a device; after `most_looks` it ends.
    `queues`: ops may wait for the channel, which never changes a schedule but that of colocation groups; there it begins late."""


def make_state(p: Problem, reluctance: float) -> State:
    """The state before a run."""
    n, tensors, k = len(p.ops) - 1, len(p.tensors) - 1, len(p.devices)
    s = State(
        ops=np.zeros(n, _OP_STATE),
        unread=np.diff(p.tensors["readers_from"]),
        copies=np.zeros(tensors * k, _COPY),
        tokens=np.zeros((k + 1) * n, _TOKEN),
        queues=np.zeros((_KINDS * k + 1) * n, np.int32),
        sizes=np.zeros(_KINDS * k + 1, np.int32),
        devices=np.zeros(k, _DEVICE_STATE),
        totals=np.zeros(1, _TOTALS),
    )
    s.ops["device"] = s.devices["running"] = s.devices["awake_for"] = NONE
    s.ops["missing"] = np.diff(p.ops["inputs_from"])
    s.copies["arrival_us"] = s.devices["alarm_us"] = s.devices["next_us"] = NEVER
    s.devices["changed"] = True
    s.devices["room"] = p.devices["memory_bytes"]
    s.totals["reluctance"] = reluctance
    s.totals["usual_looks"] = s.totals["judged_looks"] = s.totals["most_looks"] = NEVER
    s.totals["speed"] = p.devices["speed"].sum()
    s.totals["compares_speeds"] = len(set(p.devices["speed"].tolist())) > 1
    s.totals["queues"] = True
    s.totals["limited"] = np.isfinite(p.devices["memory_bytes"]).any()
    return s


@part
def put(p: Problem, s: State, v: int, d: int, queue: int, first: float) -> None:
    """Moves v to this queue of device d, sorted by `first`, then the longest path to the end."""
    n = len(s.ops)
    token = s.tokens[d * n + v]
    if token.queue == queue and token.first == first:
        return
    if token.queue != OUT:
        _take_out(p, s, v, d)
    token.queue, token.first = queue, first
    if d < len(s.devices):
        s.devices[d].changed = True
    if queue == PARKED:
        s.ops[v].parked += 1
    if queue != OUT:
        q = _KINDS * d + queue - 1
        s.sizes[q] += 1
        _sift(p, s, d, v, s.sizes[q] - 1)


@inlined
def _take_out(p: Problem, s: State, v: int, d: int) -> None:
    n = len(s.ops)
    token = s.tokens[d * n + v]
    if token.queue == PARKED:
        s.ops[v].parked -= 1
    q = _KINDS * d + token.queue - 1
    s.sizes[q] -= 1
    last = s.queues[q * n + s.sizes[q]]
    if last != v:
        _sift(p, s, d, last, token.position)


@inlined
def _sift(p: Problem, s: State, d: int, v: int, i: int) -> None:
    """Puts v where it belongs in its heap, from place i up or down."""
    n = len(s.ops)
    q = _KINDS * d + s.tokens[d * n + v].queue - 1
    base, size = q * n, s.sizes[q]
    while i > 0 and _precedes(p, s, d, v, s.queues[base + (i - 1) // 2]):
        parent = s.queues[base + (i - 1) // 2]
        s.queues[base + i] = parent
        s.tokens[d * n + parent].position = i
        i = (i - 1) // 2
    while 2 * i + 1 < size:
        j = 2 * i + 1
        if j + 1 < size and _precedes(p, s, d, s.queues[base + j + 1], s.queues[base + j]):
            j += 1
        child = s.queues[base + j]
        if not _precedes(p, s, d, child, v):
            break
        s.queues[base + i] = child
        s.tokens[d * n + child].position = i
        i = j
    s.queues[base + i] = v
    s.tokens[d * n + v].position = i


@inlined
def _precedes(p: Problem, s: State, d: int, v: int, w: int) -> bool:
    a, b = s.tokens[d * len(s.ops) + v].first, s.tokens[d * len(s.ops) + w].first
    if a != b:
        return a < b
    a, b = p.ops[v].tail_us, p.ops[w].tail_us
    return a > b if a != b else v < w


@inlined
def holds(s: State, d: int, queue: int) -> bool:
    """True if the queue is not empty."""
    return s.sizes[_KINDS * d + queue - 1] > 0


@inlined
def first_of(s: State, d: int, queue: int) -> int:
    return s.queues[(_KINDS * d + queue - 1) * len(s.ops)]


@inlined
def first_key(s: State, d: int, queue: int) -> float:
    return s.tokens[d * len(s.ops) + first_of(s, d, queue)].first
