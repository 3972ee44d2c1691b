"""A graph, a cluster and a plan as arrays, for the compiled annealing (benchmarks/kernel.py).

A copy is a tensor on a device. Tensors are numbered by producer, then by name, and copies so that their numbers sort as the
simulator breaks ties between transfers: by producer, by device, by tensor name.
"""

from typing import NamedTuple

import numpy as np

from baechi_ext.ir import Cluster, OpGraph


class Problem(NamedTuple):
    """A graph and a cluster as arrays; `*_at[i]` to `*_at[i + 1]` are the places of i in the array it is named for."""

    compute_us: np.ndarray
    tails_us: np.ndarray
    persistent: np.ndarray
    extra: np.ndarray
    """Temporary bytes, and what the outputs exceed the tensors by."""
    inputs_at: np.ndarray
    inputs: np.ndarray
    outputs_at: np.ndarray
    """The tensors of op v are outputs_at[v] to outputs_at[v + 1]."""
    producer: np.ndarray
    size: np.ndarray
    readers_at: np.ndarray
    readers: np.ndarray
    speed: np.ndarray
    link: np.ndarray
    """[source, target]: latency_us, us_per_byte, send_us, send_us_per_byte, receive_us, receive_us_per_byte."""
    parallel: bool
    charged: bool
    """Whether some link occupies the devices at its ends."""


class Decision(NamedTuple):
    """A plan: a device for every op and, where `prioritised`, a priority."""

    device: np.ndarray
    priority: np.ndarray
    prioritised: bool


class Units(NamedTuple):
    """The ops of unit u are ops[at[u]] to ops[at[u + 1]]; `limit` is each device's memory."""

    at: np.ndarray
    ops: np.ndarray
    limit: np.ndarray


class Best(NamedTuple):
    """The best plan so far; valid plans are better than all others. `cost` holds [0 where it is valid, else 1; its cost]."""

    device: np.ndarray
    priority: np.ndarray
    cost: np.ndarray


class Slice(NamedTuple):
    """A part of the annealing: so many moves at one temperature (microseconds) and one price of bytes over the limits."""

    temperature: float
    penalty: float
    count: int


class State(NamedTuple):
    """What a simulation writes; made once for many simulations."""

    missing: np.ndarray
    unread: np.ndarray
    """Per copy: its readers that have not ended; at home also its transfers that have not ended."""
    taken_in: np.ndarray
    key: np.ndarray
    """Per op: what the ready ops of a device are sorted by."""
    ready: np.ndarray
    """Heaps of ops, one for each device; a device's begins at ready_at and holds ready_count."""
    ready_at: np.ndarray
    ready_count: np.ndarray
    request_key: np.ndarray
    requests: np.ndarray
    """Heaps of copies, one for each pair of devices; with parallel transfers one heap of arrivals."""
    requests_at: np.ndarray
    requests_count: np.ndarray
    waiting: np.ndarray
    """Per sender: its requested transfers that have not started."""
    running: np.ndarray
    op_end: np.ndarray
    sending: np.ndarray
    send_end: np.ndarray
    receiving: np.ndarray
    used: np.ndarray
    peak: np.ndarray
    started: np.ndarray
    """Op positions in the order of their starts."""


def make_problem(graph: OpGraph, cluster: Cluster) -> Problem:
    """The arrays of a graph and a cluster."""
    number: dict[int, int] = {}
    outputs_at = [0]
    for outputs in graph.outputs:
        for t in sorted(outputs, key=lambda t: graph.tensors[t].name):
            number[t] = len(number)
        outputs_at.append(len(number))
    tensors = [graph.tensors[t] for t in number]
    ops = graph.ops
    beyond = [op.output_bytes - sum(graph.tensors[t].bytes for t in o) for op, o in zip(ops, graph.outputs, strict=True)]
    links = [[cluster.link(i, j) for j in range(len(cluster))] for i in range(len(cluster))]
    rows = [
        [(k.latency_us, k.us_per_byte, k.send_us, k.send_us_per_byte, k.receive_us, k.receive_us_per_byte) for k in row] for row in links
    ]
    link = np.array(rows, dtype=np.float64)
    compute_us = np.array([op.compute_us for op in ops], dtype=np.float64)
    return Problem(
        compute_us=compute_us,
        tails_us=_tails_us(graph, compute_us),
        persistent=np.array([op.persistent_bytes for op in ops], dtype=np.float64),
        extra=np.array([op.temporary_bytes + max(0, b) for op, b in zip(ops, beyond, strict=True)], dtype=np.float64),
        inputs_at=_offsets([len(i) for i in graph.inputs]),
        inputs=np.array([number[t] for i in graph.inputs for t in i], dtype=np.int64),
        outputs_at=np.array(outputs_at, dtype=np.int64),
        producer=np.array([t.producer for t in tensors], dtype=np.int64),
        size=np.array([t.bytes for t in tensors], dtype=np.float64),
        readers_at=_offsets([len(t.readers) for t in tensors]),
        readers=np.array([w for t in tensors for w in t.readers], dtype=np.int64),
        speed=np.array([d.speed for d in cluster.devices], dtype=np.float64),
        link=link,
        parallel=cluster.parallel_transfers,
        charged=bool(link[:, :, 2:].any()),
    )


def _offsets(counts: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _tails_us(graph: OpGraph, compute_us: np.ndarray) -> np.ndarray:
    tails = np.zeros(len(graph))
    for v in reversed(graph.order):
        tails[v] = compute_us[v] + max((tails[w] for w in graph.successors[v]), default=0.0)
    return tails


def make_state(p: Problem) -> State:
    """Room for simulations of `p`."""
    n, k = len(p.compute_us), len(p.speed)
    copies = len(p.producer) * k
    pairs = 1 if p.parallel else k * k
    return State(
        missing=np.zeros(n, np.int64),
        unread=np.zeros(copies, np.int64),
        taken_in=np.zeros(copies, np.bool_),
        key=np.zeros((n, 2)),
        ready=np.zeros(n, np.int64),
        ready_at=np.zeros(k + 1, np.int64),
        ready_count=np.zeros(k, np.int64),
        request_key=np.zeros((copies, 2)),
        requests=np.zeros(len(p.readers), np.int64),
        requests_at=np.zeros(pairs + 1, np.int64),
        requests_count=np.zeros(pairs, np.int64),
        waiting=np.zeros(k, np.int64),
        running=np.zeros(k, np.int64),
        op_end=np.zeros(k),
        sending=np.zeros(k, np.int64),
        send_end=np.zeros(k),
        receiving=np.zeros(k, np.bool_),
        used=np.zeros(k),
        peak=np.zeros(k),
        started=np.zeros(n, np.int64),
    )


def make_units(graph: OpGraph, cluster: Cluster) -> Units:
    units = [*graph.groups.values(), *((v,) for v, op in enumerate(graph.ops) if op.colocation is None)]
    limit = [np.inf if d.memory_bytes is None else float(d.memory_bytes) for d in cluster.devices]
    return Units(np.cumsum([0, *map(len, units)]), np.array([v for unit in units for v in unit], dtype=np.int64), np.array(limit))
