"""Channels that note when tensors are on their way; and what the clock of another machine says."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from runtime.processes.channels import Channels
from runtime.step_recorder import DeviceLog, noting_taker
from runtime.torch_devices import TorchDevice

_TAG = (1 << 23) + 1
"""Beyond the tensors' numbers, and not the probes'."""
_PINGS = 20


class NotingChannels(Channels):
    """Of a CPU worker. A send is over for its sender when the thread that waits for it says so."""

    log: DeviceLog

    def giver(self, tensor: int, target: int) -> Callable[[Any], None]:
        """See `Exchange`."""
        give, sent = super().giver(tensor, target), self.log.sent

        def noting(value: torch.Tensor) -> None:
            self._sending = tensor, target
            begin = time.monotonic_ns()
            sent[tensor, target] = begin, begin
            give(value)

        return noting

    def _keep(self, value: torch.Tensor, work: dist.Work) -> None:
        super()._keep(value, NotingWork(work, self.log.sent, self._sending))

    def taker(self, tensor: int, target: int) -> Callable[[], torch.Tensor]:
        """See `Exchange`."""
        return noting_taker(super().taker(tensor, target), tensor, self.log)


class NotingWork:
    """A send that notes when it is over, in the span of `sent` that began with it."""

    def __init__(self, work: dist.Work, sent: dict[Any, tuple[int, int]], key: object) -> None:
        self._work = work
        self._sent = sent
        self._key = key

    def wait(self, timeout: timedelta) -> bool:
        done = self._work.wait(timeout)
        begin, _ = self._sent[self._key]
        self._sent[self._key] = begin, time.monotonic_ns()
        return done


def tell_clock() -> None:
    """A worker's part of `clock_ahead`."""
    word = torch.zeros(1, dtype=torch.int64)
    for _ in range(_PINGS):
        dist.recv(word, 0, tag=_TAG)
        dist.send(torch.tensor([time.monotonic_ns()]), 0, tag=_TAG)


def clock_ahead(rank: int) -> tuple[int, int]:
    """By how many nanoseconds the clock of a rank is ahead of this one's, of rank 0, and by how many that may be wrong: half of the
    quickest of some questions and answers (Cristian, Probabilistic clock synchronization, 1989)."""
    found = []
    word = torch.zeros(1, dtype=torch.int64)
    for _ in range(_PINGS):
        before = time.monotonic_ns()
        dist.send(word, rank, tag=_TAG)
        dist.recv(word, rank, tag=_TAG)
        after = time.monotonic_ns()
        found.append((after - before, int(word.item()) - (before + after) // 2))
    took, ahead = min(found)
    return ahead, took // 2


def clocks_ahead(devices: Sequence[TorchDevice], ask: Callable[[int], tuple[int, int]]) -> tuple[list[int], list[str]]:
    """By how many nanoseconds each rank's clock is ahead of rank 0's, and remarks on how far that may be wrong. Machines' clocks differ:
    `ask`, which gives what `clock_ahead` does, is asked of ranks on other machines than rank 0's."""
    ahead, remarks = [0] * len(devices), []
    for rank, device in enumerate(devices):
        if device.node != devices[0].node:
            ahead[rank], wrong_ns = ask(rank)
            remarks.append(f"{device.name} is on another machine; its times may be off by {wrong_ns / 1000:.0f} us")
    return ahead, remarks
