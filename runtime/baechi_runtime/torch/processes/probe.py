"""Probing the link between two worker processes: one-way time, and what sending and receiving take from devices that compute meanwhile.

One-way time is half a round trip between two devices that do nothing else. What a transfer takes from its two devices shows only while
both compute: the threads of torch.distributed and the system's share of the work interrupt the op at hand, and caches are cold. So the
first rank computes and sends, over and over, the second computes and takes in what has come, and both do the same without transfers in
between: the difference per transfer is what it costs each of them. Tensors move as in a step: through shared memory, or received into
memory that was posted before they come, and sent without blocking. A CUDA device does all of this on its streams, and the host waits for it
only to take the time; without tags both ends start their transfers in one order.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from baechi_ext.cost import LinkFit, fit_link
from baechi_runtime.measure.link_probe import PROBE_BYTES, LinkProbe
from baechi_runtime.torch.lowering.devices import TorchDevice
from baechi_runtime.torch.processes.lines import Lines, Pages
from baechi_runtime.torch.processes.worker_group import WorkerGroup

_TAG = 1 << 23
WARMUP, REPEATS = 3, 15
_BLOCKS, _BLOCKS_OF_SMALL, _LARGE_BYTES, _TRANSFERS = 4, 12, 2**20, 8
_AHEAD = 2
"""Receives that are posted beyond the one being waited for."""
_SIDE = {"cpu": 192, "cuda": 1536}
"""Side of the square matrices whose product is the unit of work: some 0.2 ms, and on CUDA well above what starting a kernel takes."""
_LEAST_UNITS, _UNITS_PER_ONE_WAY = 2, 2
_LEAST_US = 0.1
_PLACES = _TRANSFERS + 1
"""Tensors that are under way at once, at most: a block's, and what ends it."""
_WORD = torch.empty(1)


def probe_pair(group: WorkerGroup, device: TorchDevice, pair: tuple[int, int], sizes: Sequence[int]) -> LinkProbe:
    """Rank 0, of `device`, has the ranks of `pair` (itself may be one) play, and fits what they measured. `sizes` in bytes.

    Beyond the largest of PROBE_BYTES what the devices are charged follows the line through the smaller ones.
    """
    first, second = pair
    command = {"do": "probe", "first": first, "second": second, "sizes": list(sizes)}
    group.command(command)
    parts = [play(group, device, command), *(a["part"] for a in group.answers())]
    one_way = {size: tuple(us / 2 for us in taken) for size, taken in zip(sizes, parts[first]["wall_us"], strict=True)}
    send, receive = (_charge(_loaded_sizes(sizes), parts[rank]["charges"]) for rank in pair)
    return LinkProbe(one_way, fit_link([(size, statistics.median(s)) for size, s in one_way.items()]), send, receive)


def _charge(sizes: Sequence[int], charges: Sequence[tuple[float, float]]) -> LinkFit:
    return fit_link([(size, us) for size, (us, _) in zip(sizes, charges, strict=True)], [scale_us for _, scale_us in charges])


def play(group: WorkerGroup, device: TorchDevice, command: dict[str, Any]) -> dict[str, list[Any]] | None:
    """A rank's part: per size the wall times of round trips, and what a transfer took from this rank; None for a bystander."""
    first, second, sizes = command["first"], command["second"], command["sizes"]
    number = 0 if group.lines is None else group.lines.open_channel()  # of bystanders, too
    if group.rank not in (first, second):
        return None
    leads = group.rank == first
    peer = second if leads else first
    wire = _Posted(device, peer) if group.lines is None else _Shared(group.lines, number, peer, max(sizes))
    player = _Player(device, wire, leads)
    trips = {size: player.round_trips(size) for size in sizes}
    one_way = {size: statistics.median(trips[size]) / 2 for size in sizes}
    return {"wall_us": list(trips.values()), "charges": [player.charge_us(size, one_way[size]) for size in _loaded_sizes(sizes)]}


def _loaded_sizes(sizes: Sequence[int]) -> list[int]:
    return [size for size in sizes if size <= PROBE_BYTES[-1]] or [min(sizes)]


class _Work(Protocol):
    """A transfer that was started."""

    def wait(self) -> object:
        """Returns when it is over."""


class _Wire(Protocol):
    """One end of what carries tensors to the other rank and back."""

    def send(self, tensor: torch.Tensor) -> _Work:
        """Starts to send a tensor."""

    def receive(self, words: int) -> _Work:
        """Makes room for a tensor of so many numbers, and starts to receive it."""


@dataclass(frozen=True)
class _Posted:
    """torch.distributed."""

    device: TorchDevice
    peer: int

    def send(self, tensor: torch.Tensor) -> _Work:
        return cast(dist.Work, dist.isend(tensor, self.peer, tag=_TAG))

    def receive(self, words: int) -> _Work:
        into = torch.empty(words, device=self.device.torch_device)
        return cast(dist.Work, dist.irecv(into, self.peer, tag=_TAG))


class _Shared:
    """Shared memory: tensors have places of their own, which they take in turns, since each is read before its turn comes again."""

    def __init__(self, lines: Lines, number: int, peer: int, most_bytes: int) -> None:
        self._lines, self._number, self._peer = lines, number, peer
        self._most_bytes = min(most_bytes, PROBE_BYTES[-1])
        self._sent = self._received = 0
        pages = lines.pages(number, max(_PLACES * self._most_bytes, most_bytes), [peer])
        self._own, self._theirs = pages[lines.rank], pages[peer]

    def send(self, tensor: torch.Tensor) -> _Work:
        self._place(self._theirs, self._sent, tensor.numel()).copy_(tensor)
        self._lines.tell(self._peer, self._number, self._sent)
        self._sent += 1
        return _Done(lambda: None)

    def receive(self, words: int) -> _Work:
        turn = self._received
        self._received += 1

        def wait() -> None:
            self._lines.wait(self._peer, self._number, turn)
            self._place(self._own, turn, words)

        return _Done(wait)

    def _place(self, pages: Pages, turn: int, words: int) -> torch.Tensor:
        """Where the tensor of that turn is; a large one, of which there is but one under way, begins where the first place does."""
        begin = turn % _PLACES * self._most_bytes if 4 * words <= self._most_bytes else 0
        return pages.view(begin, _WORD.expand(words), (1,))


@dataclass(frozen=True)
class _Done:
    """A transfer of which only the wait is left."""

    wait: Callable[[], object]


@dataclass
class _Player:
    """One of the two ranks. The side that does not lead answers round trips, and receives what the other sends."""

    device: TorchDevice
    wire: _Wire
    leads: bool

    def round_trips(self, size: int) -> list[float]:
        """Wall microseconds of each round trip, warm-up left out."""
        out = torch.zeros(size // 4, device=self.device.torch_device)
        taken = []
        for _ in range(WARMUP + REPEATS):
            begin = time.perf_counter_ns()
            if self.leads:
                coming, going = self._both(out)
                coming.wait()
            else:
                coming = self.wire.receive(size // 4)
                coming.wait()
                going = self.wire.send(out)
            going.wait()
            self.device.synchronize()
            taken.append((time.perf_counter_ns() - begin) / 1000)
        return taken[WARMUP:]

    def charge_us(self, size: int, one_way_us: float) -> tuple[float, float]:
        """Microseconds that a transfer of `size` bytes takes from this rank while both compute, and the time that this is a difference of.

        The receiver computes a little more per transfer, so that it finds what it takes in already there.
        """
        where = self.device.torch_device
        matrix = torch.ones(_SIDE[where.type], _SIDE[where.type], device=where)
        unit_us = min(self._timed(lambda: matrix @ matrix, 1) for _ in range(_TRANSFERS))
        units = max(_LEAST_UNITS, int(_UNITS_PER_ONE_WAY * one_way_us / unit_us)) + (not self.leads)

        def compute() -> None:
            for _ in range(units):
                torch.mm(matrix, matrix)

        def compute_alone() -> None:
            for _ in range(_TRANSFERS):
                compute()

        run = self._sending if self.leads else self._receiving
        with_us, without_us = [], []
        # Both ranks have to do as many blocks, so neither may go by a time that it took itself.
        for _ in range(1 + _BLOCKS if size > _LARGE_BYTES else 1 + _BLOCKS_OF_SMALL):
            self._meet()
            with_us.append(self._timed(lambda: run(size, compute), _TRANSFERS))
            self._meet()
            without_us.append(self._timed(compute_alone, _TRANSFERS))
        difference_us = statistics.median(a - b for a, b in zip(with_us[1:], without_us[1:], strict=True))
        return max(_LEAST_US, difference_us), statistics.median(with_us)

    def _sending(self, size: int, compute: Callable[[], None]) -> None:
        out = torch.zeros(size // 4, device=self.device.torch_device)
        going = []
        for _ in range(_TRANSFERS):
            compute()
            going.append(self.wire.send(out))
        for work in going:
            work.wait()

    def _receiving(self, size: int, compute: Callable[[], None]) -> None:
        coming: deque[_Work] = deque()
        for i in range(_TRANSFERS):
            while len(coming) <= _AHEAD and i + len(coming) < _TRANSFERS:
                coming.append(self.wire.receive(size // 4))
            compute()
            coming.popleft().wait()

    def _meet(self) -> None:
        """Both ranks leave at nearly the same time."""
        coming, going = self._both(torch.zeros(1, device=self.device.torch_device))
        going.wait()
        coming.wait()
        self.device.synchronize()

    def _both(self, out: torch.Tensor) -> tuple[_Work, _Work]:
        """A receive and a send, started. Where there are no tags, the rank that leads sends first, and the other one receives first."""
        if self.leads and self.device.torch_device.type == "cuda":
            going = self.wire.send(out)
            return self.wire.receive(out.numel()), going
        coming = self.wire.receive(out.numel())
        return coming, self.wire.send(out)

    def _timed(self, function: Callable[[], object], count: int) -> float:
        """Wall microseconds of a call, with all that it gives to the device, by `count`."""
        begin = time.perf_counter_ns()
        function()
        self.device.synchronize()
        return (time.perf_counter_ns() - begin) / 1000 / count
