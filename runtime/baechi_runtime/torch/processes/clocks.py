"""Comparisons with the clocks of other machines."""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from baechi_runtime.torch.lowering.devices import TorchDevice
from baechi_runtime.torch.processes.worker_group import WorkerGroup

_TAG = (1 << 23) + 1
"""A tag beyond the tensors' numbers, and not the probes'."""
_PINGS = 20


def tell_clock(group: WorkerGroup) -> None:
    """A worker's part of `clock_ahead`."""
    word = torch.zeros(1, dtype=torch.int64)
    for _ in range(_PINGS):
        dist.recv(word, 0, group.process_group, _TAG)
        dist.send(torch.tensor([time.monotonic_ns()]), 0, group.process_group, _TAG)


def clock_ahead(group: WorkerGroup, rank: int) -> tuple[int, int]:
    """Nanoseconds by which the clock of a rank is ahead of this one's, of rank 0, and by which that may be wrong: half of the quickest of
    some questions and answers (Cristian, Probabilistic clock synchronization, 1989)."""
    found = []
    word = torch.zeros(1, dtype=torch.int64)
    for _ in range(_PINGS):
        before = time.monotonic_ns()
        dist.send(word, rank, group.process_group, _TAG)
        dist.recv(word, rank, group.process_group, _TAG)
        after = time.monotonic_ns()
        found.append((after - before, int(word.item()) - (before + after) // 2))
    took, ahead = min(found)
    return ahead, took // 2


def clocks_ahead(devices: Sequence[TorchDevice], ask: Callable[[int], tuple[int, int]]) -> tuple[list[int], list[str]]:
    """Nanoseconds by which each rank's clock is ahead of rank 0's, and remarks on how far that may be wrong. Machines' clocks differ:
    `ask`, which gives what `clock_ahead` does, is asked of ranks on other machines than rank 0's."""
    ahead, remarks = [0] * len(devices), []
    for rank, device in enumerate(devices):
        if device.node != devices[0].node:
            ahead[rank], wrong_ns = ask(rank)
            remarks.append(f"{device.name} is on another machine; its times may be off by {wrong_ns / 1000:.0f} us")
    return ahead, remarks
