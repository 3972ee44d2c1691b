"""A graph on a cluster, and the state of its simulation, as arrays of records: what kernels work on.

They are few because every call of a kernel's function passes all of them, and each makes the calls slower to compile and to run.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph

Records = NDArray[np.void]
Record = Any
"""One of them, with the fields of their dtype."""
Ints = NDArray[np.int32]
Indices = NDArray[np.uint32]
"""Without a sign, so that no kernel asks whether to count from the end."""
Floats = NDArray[np.float64]


def record(floats: str, ints: str = "", flags: str = "", indices: str = "") -> np.dtype:
    """A record of numbers by their names, 8-byte floats, 4-byte integers, truth values and 4-byte integers without a sign."""
    kinds = [(name, kind) for kind, names in (("f8", floats), ("i4", ints), ("u4", indices), ("?", flags)) for name in names.split()]
    return np.dtype(kinds, align=True)


# The *_from of ops and tensors are offsets into `Problem.lists`, up to that of the next record.
_OP = record("compute_us tail_us least_us persistent_bytes working_bytes starting_bytes", "inputs_from outputs_from urgency pin")
_TENSOR = record("bytes home_bytes", "name_rank readers_from", indices="producer")
_DEVICE = record("speed memory_bytes")
_LINK = record("latency_us us_per_byte issue_us send_us send_us_per_byte receive_us receive_us_per_byte")
_RULES = record("names issue_us", "", "charges parallel hosted")

_OP_STATE = record("start_us end_us", "missing started")
_ENTRY = record("first second", indices="item")
_TRANSFER = record("request_us turn sent_us arrived_us", "left right root next sent", indices="tensor source target")
_QUEUE = record("request_us turn", "first last issued")
_CHANNEL = record("", flags="busy", indices="opened")
_COPY = record("", "unread", "taken_in free")
_DEVICE_STATE = record(
    "busy_us left_us held_bytes held_since_us peak_bytes peak_us", "ready_from ready waiting target readers urgency", "running"
)
_TOTALS = record("until_us", "events opened started transfers sent concerned_from concerned_to", "has_priority hopeless")


class Problem(NamedTuple):
    """A costed graph and a cluster. Never written to, so that threads may share it."""

    ops: Records
    """`tail_us`: the longest compute-only path to the end; `least_us`: the same on the fastest device; `urgency`: the op's rank by it,
    the longest first. `working_bytes`: held while the op runs, its tensors left out; `starting_bytes`: its tensors as well.
    `pin`: the device that it has to be on, or -1."""
    tensors: Records
    """`home_bytes`: what it takes where it is made, beside persistent bytes. `name_rank`: by name among the tensors of its producer."""
    lists: Indices
    """The ops' inputs and outputs, the tensors' readers."""
    devices: Records
    """`memory_bytes` is infinite where there is no limit."""
    links: Records
    """By source and target."""
    rules: Records
    """One record. `names`: the most tensors of one op; `charges`: whether links take time from devices; `issue_us`: time that all ops take
    the host; `hosted`: whether transfers take it time, too."""


class State(NamedTuple):
    """The plan to simulate, and all that one simulation writes."""

    placement: Indices
    priority: Floats
    """Counts where `totals` has `has_priority`."""
    ops: Records
    """Entry i of `started`: the op that was started as number i."""
    ready: Records
    """The ready ops: a heap for each device, from its `ready_from` on."""
    events: Records
    """A heap by time. An item is an op that ends, or the number of ops plus a transfer that arrives."""
    transfers: Records
    """In the order of requests; entry i of `sent`: the transfer that started as number i. `turn`: which one goes first of those requested
    at one instant, a whole number (exact below 2**53: a million ops of up to 90 tensors each on a hundred devices). The others: see
    `queues`."""
    queues: Records
    """For each source and target, the transfers that wait for its channels: a chain of skew heaps (`left`, `right`), one for each
    instant of a request. The transfer that began a heap keeps its `root` and `next`, the beginner of the following one, or -1.
    `request_us` and `turn` are those of the first to go; the former is infinite where none waits. `issued`: the transfers that took the
    host time."""
    channels: Records
    """The outgoing one of each device, then the incoming ones. Entry i of `opened`: the channel that was opened as number i for
    transfers to start at this instant."""
    copies: Records
    """By tensor and device. `unread`: readers there that have not ended, on the producer's device with the transfers to others. `free`: the
    transfer to there takes no time of links and devices."""
    devices: Records
    """`left_us`: the compute of its ops that have not started. `peak_us`: since when it held `peak_bytes`. `target`, `readers` and
    `urgency` are of the tensor in hand: the devices it goes to, and by device its readers there."""
    totals: Records
    """One record. A simulation that can't end by `until_us` is given up and `hopeless`. An op may start at this instant on devices
    from `concerned_from` to before `concerned_to`."""


def make_problem(graph: OpGraph, cluster: Cluster) -> Problem:
    """The arrays of a graph and a cluster."""
    columns = graph.columns
    lists = (columns.inputs, columns.outputs, columns.readers)
    tensors = np.zeros(len(graph.tensors) + 1, _TENSOR)
    ops = np.zeros(len(graph) + 1, _OP)
    ops["inputs_from"] = columns.inputs.begins
    ops["outputs_from"] = len(columns.inputs.items) + columns.outputs.begins
    tensors["readers_from"] = len(columns.inputs.items) + len(columns.outputs.items) + columns.readers.begins
    _fill(
        tensors,
        bytes=columns.tensor_bytes,
        home_bytes=columns.home_bytes,
        producer=columns.producer,
        name_rank=columns.name_rank,
    )
    _fill(
        ops,
        compute_us=columns.compute_us,
        tail_us=graph.tails_us,
        persistent_bytes=columns.persistent_bytes,
        working_bytes=columns.working_bytes(),
    )
    ops["pin"] = -1
    ops["pin"][list(graph.pins)] = list(graph.pins.values())
    ops["starting_bytes"] = ops["working_bytes"]
    np.add.at(ops["starting_bytes"], tensors["producer"][:-1], tensors["home_bytes"][:-1])
    devices = np.zeros(len(cluster), _DEVICE)
    names = _LINK.names or ()
    _fill(devices, speed=[d.speed for d in cluster.devices], memory_bytes=cluster.rooms)
    table = [[tuple(getattr(link, name) for name in names) for link in row] for row in cluster.link_table()]
    links = np.array(table, _LINK)
    rules = np.zeros(1, _RULES)
    rules["names"] = max(map(len, graph.outputs), default=0)
    ops["urgency"] = np.unique(-ops["tail_us"], return_inverse=True)[1]
    ops["least_us"] = ops["tail_us"] / devices["speed"].max()
    rules["issue_us"] = graph.total_issue_us()
    rules["hosted"] = np.any(links["issue_us"])
    rules["charges"] = any(np.any(links[name]) for name in names[3:])
    rules["parallel"] = cluster.parallel_transfers
    items = np.concatenate([part.items for part in lists]).astype(np.uint32)
    return Problem(ops, tensors, items, devices, links, rules)


def make_state(problem: Problem) -> State:
    """Room for simulations of a problem, one at a time; all ops on device 0, without priorities."""
    n, tensors, k = len(problem.ops) - 1, len(problem.tensors) - 1, len(problem.devices)
    readings = len(problem.lists) - problem.tensors["readers_from"][0]
    totals = np.zeros(1, _TOTALS)
    totals["until_us"] = np.inf
    return State(
        placement=np.zeros(n, np.uint32),
        priority=np.zeros(n, np.float64),
        ops=np.zeros(n, _OP_STATE),
        ready=np.zeros(n, _ENTRY),
        events=np.zeros(k + readings, _ENTRY),
        transfers=np.zeros(readings, _TRANSFER),
        queues=np.zeros(k * k, _QUEUE),
        channels=np.zeros(2 * k, _CHANNEL),
        copies=np.zeros(tensors * k, _COPY),
        devices=np.zeros(k, _DEVICE_STATE),
        totals=totals,
    )


def _fill(records: Records, **columns: Sequence[float] | Floats | NDArray[np.int64]) -> None:
    for name, values in columns.items():
        records[name][: len(values)] = values
