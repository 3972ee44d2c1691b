"""Probing the link between two worker processes: one-way time, and the CPU time that sending and receiving take from each side.

The first rank sends a tensor and the second answers with one of the same size. Half a round trip is the one-way time; each process sends
and receives once a round, so its CPU time is that of both. The halves are told apart by rounds with a four-byte answer: the first
rank's CPU time is then a send and a tiny receive, the second's a receive and a tiny send. Tensors move as in a step: received into new
memory, posted before they come, sent without blocking.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from baechi_ext.cost import fit_link
from baechi_ext.errors import ExecutionError
from runtime.links import LinkProbe
from runtime.worker_group import WorkerGroup

_TAG = 1 << 23
_TINY_BYTES = 4
WARMUP, REPEATS = 3, 15
_LEAST_US = 0.1
"""CPU times below the clock's reach are taken as this."""


def probe_pair(group: WorkerGroup, first: int, second: int, sizes: Sequence[int]) -> LinkProbe:
    """Rank 0 has the ranks `first` and `second` (itself may be one) play, and fits what they measured. `sizes` in bytes."""
    command = {"do": "probe", "first": first, "second": second, "sizes": list(sizes)}
    group.command(command)
    parts = [play(0, command), *(a["part"] for a in group.answers())]
    one_way = {size: tuple(us / 2 for us in taken) for size, taken in zip(sizes, parts[first]["wall_us"], strict=True)}
    send, receive = parts[first]["cpu_us"], parts[second]["cpu_us"]
    tiny = statistics.median(parts[first]["tiny_us"]) / 2
    return LinkProbe(
        samples_us=one_way,
        fit=fit_link([(size, statistics.median(s)) for size, s in one_way.items()]),
        send=fit_link([(size, _beyond(statistics.median(cpu), tiny)) for size, cpu in zip(sizes, send, strict=True)]),
        receive=fit_link([(size, _beyond(statistics.median(cpu), tiny)) for size, cpu in zip(sizes, receive, strict=True)]),
    )


def play(rank: int, command: dict[str, Any]) -> dict[str, list[Any]] | None:
    """A rank's part: per size, wall times of full rounds and CPU times of rounds whose answer is tiny; None for a bystander."""
    first, second, sizes = command["first"], command["second"], command["sizes"]
    if rank not in (first, second):
        return None
    leads, peer = rank == first, second if rank == first else first
    tiny = _rounds(peer, _TINY_BYTES, _TINY_BYTES, leads=leads)
    full = [_rounds(peer, size, size, leads=leads) for size in sizes]
    ends = [(size, _TINY_BYTES) if leads else (_TINY_BYTES, size) for size in sizes]
    lopsided = [_rounds(peer, out, into, leads=leads) for out, into in ends]
    return {
        "tiny_us": [cpu for _, cpu in tiny],
        "wall_us": [[wall for wall, _ in taken] for taken in full],
        "cpu_us": [[cpu for _, cpu in taken] for taken in lopsided],
    }


def _beyond(cpu_us: float, tiny_us: float) -> float:
    return max(cpu_us - tiny_us, _LEAST_US)


def _rounds(peer: int, out_bytes: int, in_bytes: int, *, leads: bool) -> list[tuple[float, float]]:
    """(wall, CPU) microseconds of each round, warm-up left out. The side that does not lead answers."""
    out = torch.zeros(out_bytes // 4)
    taken = []
    for _ in range(WARMUP + REPEATS):
        cpu, wall = time.process_time_ns(), time.perf_counter_ns()
        into = torch.empty(in_bytes // 4)
        coming = _started(dist.irecv(into, peer, tag=_TAG))
        if leads:
            going = _started(dist.isend(out, peer, tag=_TAG))
            coming.wait()
        else:
            coming.wait()
            going = _started(dist.isend(out, peer, tag=_TAG))
        going.wait()
        taken.append(((time.perf_counter_ns() - wall) / 1000, (time.process_time_ns() - cpu) / 1000))
    return taken[WARMUP:]


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise ExecutionError("a worker cannot send to itself; probe two different devices")
    return work
