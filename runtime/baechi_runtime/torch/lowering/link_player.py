"""Transfers between two devices, timed: there and back with nothing else to do, and while both compute.

One-way time is half a round trip between two devices that do nothing else. What a transfer takes from its two devices shows only while
both compute: the threads of torch.distributed and the system's share of the work interrupt the op at hand, and caches are cold. So the
first device computes and sends, over and over, the second computes and takes in what has come, and both do the same without transfers in
between: the difference per transfer is what it costs each of them. A CUDA device does all of this on its streams, and the host waits for
it only to take the time.

And the work by which devices' speeds are compared: products of matrices that stay in a core's cache, or fill a GPU.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from baechi_ext.cost import LinkFit, fit_link
from baechi_runtime.measure.device_speeds import Pace
from baechi_runtime.measure.link_probe import LinkProbe
from baechi_runtime.torch.lowering.devices import TorchDevice

SIDE = {"cpu": 192, "cuda": 1536}
"""Side of the square matrices whose product is the unit of work: some 0.2 ms, and on CUDA well above what starting a kernel takes."""
_BLOCKS, _BLOCKS_OF_SMALL, _LARGE_BYTES = 4, 8, 2**20
TRANSFERS = 8
"""Transfers of a block: as many tensors are under way at once, at most, and one that ends it."""
_AHEAD = 2
"""Receives that are posted beyond the one being waited for."""
_LEAST_UNITS, _UNITS_PER_ONE_WAY = 2, 2
_LEAST_US = 0.1
Wait = Callable[[], object]
"""Returns when a transfer that was started is over."""


class Channel(Protocol):
    """One end of what carries tensors to the other device and back."""

    def send(self, tensor: torch.Tensor) -> Wait:
        """Starts to send a tensor."""

    def receive(self, words: int) -> Wait:
        """Makes room for a tensor of so many numbers, and starts to receive it."""


def fitted(trips_us: dict[int, Sequence[float]], send: LinkFit | None = None, receive: LinkFit | None = None) -> LinkProbe:
    """The link, from the times of round trips of each size."""
    one_way = {size: tuple(us / 2 for us in taken) for size, taken in trips_us.items()}
    return LinkProbe(one_way, fit_link([(size, statistics.median(s)) for size, s in one_way.items()]), send, receive)


@dataclass
class Player:
    """One of the two devices. The side that does not lead answers round trips, and receives what the other sends."""

    device: TorchDevice
    channel: Channel
    leads: bool

    def round_trips(self, size: int, warmup: int, repeats: int) -> list[float]:
        """Wall microseconds of each round trip, warm-up left out."""
        out = torch.zeros(size // 4, device=self.device.torch_device)
        taken = []
        for _ in range(warmup + repeats):
            begin = time.perf_counter_ns()
            if self.leads:
                come, gone = self._both(out)
                come()
            else:
                self.channel.receive(size // 4)()
                gone = self.channel.send(out)
            gone()
            self.device.synchronize()
            taken.append((time.perf_counter_ns() - begin) / 1000)
        return taken[warmup:]

    def charge_us(self, size: int, one_way_us: float) -> tuple[float, float]:
        """Microseconds that a transfer of `size` bytes takes from this device while both compute, and the time that it is a part of.

        The receiver computes a little more per transfer, so that it finds what it takes in already there.
        """
        where = self.device.torch_device
        matrix = torch.ones(SIDE[where.type], SIDE[where.type], device=where)
        unit_us = min(self._timed(lambda: matrix @ matrix, 1) for _ in range(TRANSFERS))
        units = max(_LEAST_UNITS, int(_UNITS_PER_ONE_WAY * one_way_us / unit_us)) + (not self.leads)

        def compute() -> None:
            for _ in range(units):
                torch.mm(matrix, matrix)

        def compute_alone() -> None:
            for _ in range(TRANSFERS):
                compute()

        run = self._sending if self.leads else self._receiving
        with_us, without_us = [], []
        # Both have to do as many blocks, so neither may go by a time that it took itself.
        for _ in range(1 + _BLOCKS if size > _LARGE_BYTES else 1 + _BLOCKS_OF_SMALL):
            self._meet()
            with_us.append(self._timed(lambda: run(size, compute), TRANSFERS))
            self._meet()
            without_us.append(self._timed(compute_alone, TRANSFERS))
        difference_us = statistics.median(a - b for a, b in zip(with_us[1:], without_us[1:], strict=True))
        return max(_LEAST_US, difference_us), statistics.median(with_us)

    def _sending(self, size: int, compute: Callable[[], None]) -> None:
        out = torch.zeros(size // 4, device=self.device.torch_device)
        going: list[Wait] = []
        for _ in range(TRANSFERS):
            compute()
            going.append(self.channel.send(out))
        for gone in going:
            gone()

    def _receiving(self, size: int, compute: Callable[[], None]) -> None:
        coming: deque[Wait] = deque()
        for i in range(TRANSFERS):
            while len(coming) <= _AHEAD and i + len(coming) < TRANSFERS:
                coming.append(self.channel.receive(size // 4))
            compute()
            coming.popleft()()

    def _meet(self) -> None:
        """Both leave at nearly the same time."""
        come, gone = self._both(torch.zeros(1, device=self.device.torch_device))
        gone()
        come()
        self.device.synchronize()

    def _both(self, out: torch.Tensor) -> tuple[Wait, Wait]:
        """A receive and a send, started. Where there are no tags, the one that leads sends first, and the other one receives first."""
        if self.leads and self.device.torch_device.type == "cuda":
            gone = self.channel.send(out)
            return self.channel.receive(out.numel()), gone
        return self.channel.receive(out.numel()), self.channel.send(out)

    def _timed(self, function: Callable[[], object], count: int) -> float:
        """Wall microseconds of a call, with all that it gives to the device, by `count`."""
        begin = time.perf_counter_ns()
        function()
        self.device.synchronize()
        return (time.perf_counter_ns() - begin) / 1000 / count


def play_pace(device: TorchDevice, windows: int, window_seconds: float) -> Pace:
    """The pace of a device, whose thread calls this while those of the others do the same; the first window is for warming up."""
    where = device.torch_device
    matrix = torch.ones(SIDE[where.type], SIDE[where.type], device=where)
    wall_us, clock_us = [], []
    for _ in range(1 + windows):
        mark, begin, spent, done = device.mark(), time.perf_counter(), 0.0, 0
        while spent < window_seconds or not done:  # held off, the thread may begin when the window is over
            torch.mm(matrix, matrix)
            device.synchronize()
            spent, done = time.perf_counter() - begin, done + 1
        end = device.mark()
        device.synchronize()
        wall_us.append(spent * 1e6 / done)
        clock_us.append(device.elapsed_us(mark, end) / done)
    return Pace(tuple(wall_us[1:]), tuple(clock_us[1:]))
