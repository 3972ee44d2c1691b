"""A relaxation of the simulator as a constraint program; its optimum is a bound, its schedules are candidates.

Variables, times in whole ticks (every time is rounded down, so that each simulated step, with its instants rounded down, is a solution):

    x[u, d]       unit u (a colocation group, or an op without one) is on device d
    s[v], e[v]    op v starts and ends
    y[t, i, d]    tensor t, produced on device i, is sent to device d, from r[t, d] on
    M             the step's end

minimize M where

    (1) one device for each unit                                    -> one_device_each
    (2) e[v] = s[v] + its time there, sending included              -> durations
    (3) ops of one device do not overlap                            -> one_op_at_a_time
    (4) y[t, i, d] where a reader of t is on d, and its producer on i -> copies
    (5) a reader starts after its inputs end, or arrive             -> precedence
    (6) transfers do not overlap on a channel                       -> channels
    (7) persistent bytes and the neediest op fit                    -> memory
    (8) M >= e[v], M >= the work of each device                     -> step_end

What is left out only relaxes: what receiving costs, the memory that depends on the order, and that the simulator never waits.
This module loads ortools; only the solver's own process does (see worker.py).
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph

_TICKS = 2**40  # about so many ticks make up the horizon, where times are not whole numbers anyway
_MOST_TRANSFERS = 20_000  # beyond it the channels are left out


@dataclass
class PlacingModel:
    """The program, and what reads its solutions."""

    model: Any
    ticks_per_us: float
    on: list[list[Any]]
    """By op and device."""
    start: list[Any]
    end: list[Any]
    makespan: Any
    sent: dict[tuple[int, int, int], Any] = field(default_factory=dict)
    send_start: dict[tuple[int, int], Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Times:
    """Ticks, rounded down."""

    graph: OpGraph
    cluster: Cluster
    ticks_per_us: float

    def ticks(self, us: float) -> int:
        # A product of floats may come out above the true one.
        value = us * self.ticks_per_us
        whole = round(value)
        return whole if whole == value and whole / self.ticks_per_us == us else max(0, math.floor(value * (1 - 1e-15)))

    def op(self, v: int, d: int) -> int:
        return self.ticks(self.graph.ops[v].compute_us / self.cluster.devices[d].speed)

    def transfer(self, t: int, i: int, d: int) -> int:
        return self.ticks(self.cluster.link(i, d).transfer_us(self.graph.tensors[t].bytes))

    def send(self, t: int, i: int, d: int) -> int:
        return self.ticks(self.cluster.link(i, d).sending_us(self.graph.tensors[t].bytes))


def placing_model(graph: OpGraph, cluster: Cluster, horizon_us: float) -> PlacingModel:
    """The program for steps of up to `horizon_us`."""
    from ortools.sat.python import cp_model

    n, k = len(graph), len(cluster)
    times = _Times(graph, cluster, ticks_per_us(graph, cluster, horizon_us))
    model = cp_model.CpModel()
    horizon = math.ceil(horizon_us * times.ticks_per_us) + 1
    on: list[list[Any]] = [[] for _ in range(n)]
    for u, members in enumerate(graph.units()):
        x = [model.new_bool_var(f"x{u},{d}") for d in range(k)]
        for v in members:
            on[v] = x
    start = [model.new_int_var(0, horizon, f"s{v}") for v in range(n)]
    end = [model.new_int_var(0, horizon, f"e{v}") for v in range(n)]
    m = PlacingModel(model, times.ticks_per_us, on, start, end, model.new_int_var(0, horizon, "M"))
    one_device_each(m, graph, cluster)
    copies(m, graph, cluster)
    durations(m, times)
    one_op_at_a_time(m, times)
    precedence(m, times, horizon)
    channels(m, times)
    memory(m, graph, cluster)
    step_end(m, times)
    model.minimize(m.makespan)
    return m


def ticks_per_us(graph: OpGraph, cluster: Cluster, horizon_us: float) -> float:
    """1, 2, 4, ... where that makes all times whole; else what makes the horizon as many ticks as are easily computed with."""
    times = [op.compute_us / d.speed for op in graph.ops for d in cluster.devices]
    links = {link for row in cluster.link_table() for link in row}
    times += [us for link in links for t in graph.tensors for us in (link.transfer_us(t.bytes), link.sending_us(t.bytes))]
    for ticks in (1, 2, 4, 8):
        if all((us * ticks).is_integer() for us in map(float, times)) and horizon_us * ticks < _TICKS:
            return float(ticks)
    return 2.0 ** math.floor(math.log2(_TICKS / horizon_us)) if horizon_us > 0 else 1.0


def one_device_each(m: PlacingModel, graph: OpGraph, cluster: Cluster) -> None:
    """(1), a pinned unit's among them; equal devices are taken in their order, where nothing is pinned."""
    unit_devices = [m.on[members[0]] for members in graph.units()]
    for x in unit_devices:
        m.model.add_exactly_one(x)
    for v, pin in graph.pins.items():
        m.model.add_bool_or([m.on[v][pin]])
    devices = cluster.devices
    if graph.pins:
        return
    if not cluster.pairs and all((d.speed, d.memory_bytes) == (devices[0].speed, devices[0].memory_bytes) for d in devices):
        for u, x in enumerate(unit_devices):
            for d in range(1, len(devices)):
                m.model.add_bool_or([~x[d], *(earlier[d - 1] for earlier in unit_devices[:u])])


def copies(m: PlacingModel, graph: OpGraph, cluster: Cluster) -> None:
    """(4), and each op's sends in the order of `PlacingModel.sent`."""
    k = len(cluster)
    for t, tensor in enumerate(graph.tensors):
        home = m.on[tensor.producer]
        for d in range(k):
            needed = m.model.new_bool_var(f"c{t},{d}")
            for w in tensor.readers:
                m.model.add_implication(m.on[w][d], needed)
            for i in range(k):
                if i != d:
                    y = m.sent[t, i, d] = m.model.new_bool_var(f"y{t},{i},{d}")
                    m.model.add_bool_or([~home[i], ~needed, y])
                    m.model.add_implication(y, home[i])


def durations(m: PlacingModel, times: _Times) -> None:
    """(2)."""
    for v, x in enumerate(m.on):
        spent = sum(times.op(v, d) * x[d] for d in range(len(x)))
        for t in times.graph.outputs[v]:
            for i in range(len(x)):
                for d in range(len(x)):
                    if i != d and times.send(t, i, d):
                        spent += times.send(t, i, d) * m.sent[t, i, d]
        m.model.add(m.end[v] == m.start[v] + spent)


def one_op_at_a_time(m: PlacingModel, times: _Times) -> None:
    """(3)."""
    k = len(times.cluster)
    for d in range(k):
        intervals = []
        for v, x in enumerate(m.on):
            most = sum(times.send(t, d, e) for t in times.graph.outputs[v] for e in range(k) if e != d)
            size: Any = times.op(v, d)
            if most:
                size = m.model.new_int_var(size, size + most, f"p{v},{d}")
            intervals.append(m.model.new_optional_interval_var(m.start[v], size, m.end[v], x[d], f"i{v},{d}"))
        m.model.add_no_overlap(intervals)


def precedence(m: PlacingModel, times: _Times, horizon: int) -> None:
    """(5)."""
    k = len(times.cluster)
    for t, tensor in enumerate(times.graph.tensors):
        u = tensor.producer
        for d in range(k):
            m.send_start[t, d] = m.model.new_int_var(0, horizon, f"r{t},{d}")
            m.model.add(m.send_start[t, d] >= m.end[u])
        for w in tensor.readers:
            m.model.add(m.start[w] >= m.end[u])
            for (i, d), y in ((pair, m.sent[t, *pair]) for pair in ((i, d) for i in range(k) for d in range(k) if i != d)):
                m.model.add(m.start[w] >= m.send_start[t, d] + times.transfer(t, i, d)).only_enforce_if(y, m.on[w][d])


def channels(m: PlacingModel, times: _Times) -> None:
    """(6); transfers of no length use no channel."""
    if times.cluster.parallel_transfers or len(m.sent) > _MOST_TRANSFERS:
        return
    outgoing, incoming = defaultdict(list), defaultdict(list)
    for (t, i, d), y in m.sent.items():
        length = times.transfer(t, i, d)
        if length:
            interval = m.model.new_optional_fixed_size_interval_var(m.send_start[t, d], length, y, f"t{t},{i},{d}")
            outgoing[i].append(interval)
            incoming[d].append(interval)
    for intervals in (*outgoing.values(), *incoming.values()):
        m.model.add_no_overlap(intervals)


def memory(m: PlacingModel, graph: OpGraph, cluster: Cluster) -> None:
    """(7); bytes of ops are rounded down."""
    persistent = [math.floor(op.persistent_bytes) for op in graph.ops]
    live = [math.floor(live) for live in graph.columns.charged_bytes().tolist()]
    for d, device in enumerate(cluster.devices):
        if device.memory_bytes is None:
            continue
        limit = math.floor(device.memory_bytes)
        held = sum(persistent[v] * m.on[v][d] for v in range(len(graph)))
        m.model.add(held <= limit)
        for v in range(len(graph)):
            if live[v]:
                m.model.add(held + live[v] * m.on[v][d] <= limit)


def step_end(m: PlacingModel, times: _Times) -> None:
    """(8)."""
    for v in range(len(m.end)):
        m.model.add(m.makespan >= m.end[v])
    for d in range(len(times.cluster)):
        m.model.add(m.makespan >= sum(times.op(v, d) * m.on[v][d] for v in range(len(m.on))))


def hint(m: PlacingModel, placement: Sequence[int], start_us: Sequence[float]) -> None:
    """Starts the solver from a plan."""
    seen = set()
    for v, d in enumerate(placement):
        m.model.add_hint(m.start[v], math.floor(start_us[v] * m.ticks_per_us))
        for e, x in enumerate(m.on[v]):
            if x.index not in seen:
                seen.add(x.index)
                m.model.add_hint(x, e == d)
