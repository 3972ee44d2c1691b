"""Probing the link between two worker processes: one-way time, and the CPU time that sending and receiving take from each side.

Rank 0 sends a tensor and rank 1 answers with one of the same size. Half a round trip is the one-way time; each process sends and
receives once a round, so its CPU time is that of both. The halves are told apart by rounds with a four-byte answer: rank 0's CPU time
is then a send and a tiny receive, rank 1's a receive and a tiny send.
"""

import statistics
import time

import torch
import torch.distributed as dist

from baechi_ext.cost import fit_link
from runtime.links import PROBE_BYTES, LinkProbe
from runtime.worker_group import WorkerGroup

_TAG = 1 << 23
WARMUP, REPEATS = 3, 15
_LEAST_US = 0.1
"""CPU times below the clock's reach are taken as this."""


def lead(group: WorkerGroup) -> LinkProbe:
    """Rank 0's part; the probe of the link between ranks 0 and 1."""
    group.command({"do": "probe"})
    rounds = {size: _rounds(1, size, size, first=True) for size in PROBE_BYTES}
    sends = {size: _rounds(1, size, 4, first=True) for size in PROBE_BYTES}
    receives = next(a["receives"] for a in group.answers() if a["receives"])
    tiny = statistics.median(cpu for _, cpu in rounds[4]) / 2
    one_way = {size: tuple(wall / 2 for wall, _ in taken) for size, taken in rounds.items()}
    return LinkProbe(
        samples_us=one_way,
        fit=fit_link([(size, statistics.median(s)) for size, s in one_way.items()]),
        send=fit_link([(size, _beyond(statistics.median(cpu for _, cpu in taken), tiny)) for size, taken in sends.items()]),
        receive=fit_link([(size, _beyond(statistics.median(cpu), tiny)) for size, cpu in zip(PROBE_BYTES, receives, strict=True)]),
    )


def answer(rank: int) -> list[list[float]]:
    """The other ranks' part: rank 1 plays, the rest look on. CPU times per size of receiving it and sending four bytes."""
    if rank != 1:
        return []
    for size in PROBE_BYTES:
        _rounds(0, size, size, first=False)
    return [[cpu for _, cpu in _rounds(0, 4, size, first=False)] for size in PROBE_BYTES]


def _beyond(cpu_us: float, tiny_us: float) -> float:
    return max(cpu_us - tiny_us, _LEAST_US)


def _rounds(peer: int, out_bytes: int, in_bytes: int, *, first: bool) -> list[tuple[float, float]]:
    """(wall, CPU) microseconds of each round, warm-up left out. The side that is not `first` answers."""
    out, into = torch.zeros(out_bytes // 4), torch.empty(in_bytes // 4)
    taken = []
    for _ in range(WARMUP + REPEATS):
        cpu, wall = time.process_time_ns(), time.perf_counter_ns()
        if first:
            dist.send(out, peer, tag=_TAG)
            dist.recv(into, peer, tag=_TAG)
        else:
            dist.recv(into, peer, tag=_TAG)
            dist.send(out, peer, tag=_TAG)
        taken.append(((time.perf_counter_ns() - wall) / 1000, (time.process_time_ns() - cpu) / 1000))
    return taken[WARMUP:]
