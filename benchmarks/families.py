"""Generated graphs and clusters to compare placers on: seeded, the same on every machine, in two sets that share no graph.

TUNING is for looking at while a method is made. HELD_OUT is for the final comparison alone: other seeds, and families of its own.

A case is named family-ops-ccr-devices-memory:

- ccr: the communication-to-computation ratio, the mean time a tensor takes over the default link by the mean compute time of an op.
  A tenth of that mean is the link's latency. The link makes the ratio: the graph is the same for all ratios.
- devices: a number of equal devices with equal links, or a key of CLUSTERS.
- memory: loose (no limit), or tight (every device has TIGHT times the largest peak of a plan that is known: `known_plan`).
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from baechi_ext.ir import Cluster, Device, Link, OpGraph
from baechi_ext.simulate import Simulator
from benchmarks.shapes import FAMILIES

TIGHT = 1.1
LATENCY_SHARE = 0.1
SLOW_PAIR = 5.0
"""Between two halves of a cluster a transfer takes this many times as long as within one."""
CLUSTERS: dict[str, tuple[float, ...]] = {
    "speeds": (1.0, 1.0, 2.0, 0.5),
    "nodes": (1.0,) * 6,
    "parallel": (1.0,) * 4,
}
"""Speeds of the devices. speeds: unequal ones; nodes: slow links between two halves; parallel: transfers do not queue."""


@dataclass(frozen=True)
class Case:
    """One graph on one cluster; both are made when they are first asked for."""

    family: str
    ops: int
    ccr: float
    devices: str
    memory: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.family}-{self.ops}-{self.ccr:g}-{self.devices}-{self.memory}"

    @cached_property
    def graph(self) -> OpGraph:
        return FAMILIES[self.family](self.ops, np.random.default_rng(self.seed))

    @cached_property
    def cluster(self) -> Cluster:
        return cluster_for(self.graph, self.ccr, self.devices, self.memory)


C = TypeVar("C", bound=Case)


def cluster_for(graph: OpGraph, ccr: float, devices: str, memory: str) -> Cluster:
    """The cluster of a case."""
    cluster = make_cluster(devices, link_of_ratio(graph, ccr))
    return cluster if memory == "loose" else tightened(graph, cluster)


def link_of_ratio(graph: OpGraph, ccr: float) -> Link:
    """The link on which the mean tensor of `graph` takes `ccr` times as long as its mean op."""
    transfer_us = ccr * graph.total_compute_us() / len(graph)
    mean_bytes = sum(t.bytes for t in graph.tensors) / max(1, len(graph.tensors))
    return Link(us_per_byte=(1 - LATENCY_SHARE) * transfer_us / mean_bytes, latency_us=LATENCY_SHARE * transfer_us)


def make_cluster(devices: str, link: Link) -> Cluster:
    """`devices` is a number or a key of CLUSTERS."""
    if devices not in CLUSTERS:
        return Cluster.uniform(int(devices), link=link)
    members = tuple(Device(f"device:{i}", None, speed) for i, speed in enumerate(CLUSTERS[devices]))
    pairs = {}
    if devices == "nodes":
        slow = Link(SLOW_PAIR * link.us_per_byte, SLOW_PAIR * link.latency_us)
        halves = members[: len(members) // 2], members[len(members) // 2 :]
        pairs = {(a.name, b.name): slow for here, there in (halves, halves[::-1]) for a in here for b in there}
    return Cluster(members, link, pairs, parallel_transfers=devices == "parallel")


def tightened(graph: OpGraph, cluster: Cluster) -> Cluster:
    """`cluster` with TIGHT times the largest peak of the known plan on every device: at least that plan fits."""
    limit = int(TIGHT * max(known_plan(graph, cluster)[2])) + 1
    return replace(cluster, devices=tuple(replace(d, memory_bytes=limit) for d in cluster.devices))


def known_plan(graph: OpGraph, cluster: Cluster) -> tuple[list[int], list[int], tuple[int | float, ...]]:
    """The placement, priorities and peaks of the plan, of a few simple ones, whose largest peak is the smallest.

    They cut two topological orders into chunks of equal bytes, colocation groups going where their first op goes.
    """
    simulator = Simulator(graph, cluster)
    held = [op.persistent_bytes + op.output_bytes for op in graph.ops]
    plans = []
    for order in (graph.order, depth_first_order(graph)):
        placement = chunks(graph, order, held, len(cluster))
        priority = [0] * len(graph)
        for rank, v in enumerate(order):
            priority[v] = rank
        plans.append((placement, priority, simulator.run(placement, priority).peak_memory_bytes))
    return min(plans, key=lambda plan: max(plan[2]))


def depth_first_order(graph: OpGraph) -> tuple[int, ...]:
    """A topological order that goes on with what the last op made ready."""
    missing = [len(i) for i in graph.inputs]
    stack = [v for v, k in enumerate(missing) if k == 0][::-1]
    order = []
    while stack:
        v = stack.pop()
        order.append(v)
        for t in graph.outputs[v]:
            for w in graph.tensors[t].readers:
                missing[w] -= 1
                if missing[w] == 0:
                    stack.append(w)
    return tuple(order)


def chunks(graph: OpGraph, order: Sequence[int], weights: Sequence[float], num_devices: int) -> list[int]:
    """The placement that cuts a topological order into chunks of equal weight; a colocation group goes where its first op goes."""
    members = {v: group for group in graph.groups.values() for v in group}
    placement = [-1] * len(graph)
    total, filled = sum(weights), 0.0
    for v in order:
        if placement[v] < 0:
            unit = members.get(v, (v,))
            weight = sum(weights[w] for w in unit)
            device = min(num_devices - 1, int((filled + weight / 2) * num_devices / total)) if total else 0
            filled += weight
            for w in unit:
                placement[w] = device
    return placement


def cases_of(seed: object, table: str, kind: type[C] = Case) -> tuple[C, ...]:
    """Cases by number of ops; a graph's seed is made of `seed`, its family and its size, so that cases of one graph share it."""
    cases = []
    for ops, members in (line.split(":") for line in table.strip().splitlines()):
        for family, ccr, devices, memory in map(str.split, members.split(";")):
            drawn = zlib.crc32(f"{seed} {family} {ops.strip()}".encode())
            cases.append(kind(family, int(ops), float(ccr), devices, memory, drawn))
    return tuple(cases)


TUNING = cases_of(
    1,
    """
    20: layered 1 2 loose; fork_join 10 2 tight; series_parallel 0.1 3 loose; random 1 3 tight; training 1 2 tight
    100: layered 10 4 loose; fork_join 1 4 tight; series_parallel 1 2 loose; random 0.1 speeds loose; training 1 4 tight
    500: layered 1 8 loose; layered 0.1 4 tight; fork_join 0.1 3 loose; series_parallel 10 nodes loose; random 1 4 loose
    500: random 10 4 tight; training 0.1 2 tight; training 1 parallel loose; training 10 4 tight
    2000: layered 1 14 loose; fork_join 1 speeds tight; series_parallel 1 4 tight; random 0.1 8 tight; training 1 8 tight
    2000: training 0.1 speeds loose; training 1 nodes loose
    10000: layered 0.1 4 loose; random 1 8 loose; training 1 4 tight
    100000: random 1 4 loose; training 0.1 4 tight
    """,
)
HELD_OUT = cases_of(
    2,
    """
    20: layered 10 3 tight
    25: wavefront 1 2 loose
    40: transformer 1 2 tight; random 0.1 2 loose
    60: series_parallel 10 2 tight; training 0.1 4 loose
    150: fork_join 10 2 loose
    144: wavefront 1 4 tight
    200: transformer 1 4 loose; layered 1 nodes loose; random 10 8 loose; series_parallel 0.1 speeds tight
    300: training 1 3 tight
    400: recurrent 1 4 tight
    600: fork_join 1 8 tight
    900: wavefront 0.1 8 loose
    800: layered 10 4 tight; random 1 parallel loose
    1000: transformer 0.1 4 tight; recurrent 10 2 loose
    1500: training 10 8 loose; series_parallel 1 14 loose
    3000: recurrent 1 speeds loose; transformer 1 8 tight; random 1 3 tight
    10000: wavefront 1 14 loose; training 0.1 8 tight; layered 1 nodes tight
    100000: recurrent 0.1 4 loose; layered 1 8 tight
    """,
)
SETS: dict[str, tuple[Case, ...]] = {"tuning": TUNING, "held_out": HELD_OUT}
