"""Probing the link between two worker processes: one-way time, and what sending and receiving take from devices that compute meanwhile (see
baechi_runtime.torch.lowering.link_player).

Tensors move as in a step: through shared memory, or received into memory that was posted before they come, and sent without blocking.
Without tags both ends start their transfers in one order.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from baechi_ext.cost import LinkFit, fit_link
from baechi_runtime.measure.link_probe import PROBE_BYTES, LinkProbe
from baechi_runtime.torch.lowering.devices import TorchDevice
from baechi_runtime.torch.lowering.link_player import TRANSFERS, Player, Wait, fitted
from baechi_runtime.torch.processes.lines import Lines, tensor_at
from baechi_runtime.torch.processes.worker_group import WorkerGroup

_TAG = 1 << 23
_WARMUP, _REPEATS = 3, 15
_PLACES = TRANSFERS + 1
"""Tensors that are under way at once, at most: a block's, and what ends it."""
_WORD = torch.empty(1)


def probed(parts: Sequence[dict[str, list[Any]] | None], first: int, second: int, sizes: Sequence[int]) -> LinkProbe:
    """The link between two ranks from what every rank's `play` gave. `sizes` in bytes.

    Beyond the largest of PROBE_BYTES what the devices are charged follows the line through the smaller ones.
    """
    leading, following = cast(dict[str, list[Any]], parts[first]), cast(dict[str, list[Any]], parts[second])
    send, receive = (_charge(_loaded_sizes(sizes), part["charges"]) for part in (leading, following))
    return fitted(dict(zip(sizes, leading["wall_us"], strict=True)), send, receive)


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
    player = Player(device, _Posted(group, device, peer) if group.lines is None else _Shared(group.lines, number, peer, max(sizes)), leads)
    trips = {size: player.round_trips(size, _WARMUP, _REPEATS) for size in sizes}
    charges = [player.charge_us(size, statistics.median(trips[size]) / 2) for size in _loaded_sizes(sizes)]
    return {"wall_us": list(trips.values()), "charges": charges}


def _loaded_sizes(sizes: Sequence[int]) -> list[int]:
    return [size for size in sizes if size <= PROBE_BYTES[-1]] or [min(sizes)]


@dataclass(frozen=True)
class _Posted:
    """torch.distributed."""

    group: WorkerGroup
    device: TorchDevice
    peer: int

    def send(self, tensor: torch.Tensor) -> Wait:
        return cast(dist.Work, dist.isend(tensor, self.peer, self.group.process_group, _TAG)).wait

    def receive(self, words: int) -> Wait:
        into = torch.empty(words, device=self.device.torch_device)
        return cast(dist.Work, dist.irecv(into, self.peer, self.group.process_group, _TAG)).wait


class _Shared:
    """Shared memory: tensors have places of their own, which they take in turns, since each is read before its turn comes again."""

    def __init__(self, lines: Lines, number: int, peer: int, most_bytes: int) -> None:
        self._lines, self._number, self._peer = lines, number, peer
        self._most_bytes = min(most_bytes, PROBE_BYTES[-1])
        self._sent = self._received = 0
        self._pages = lines.pages(number, max(_PLACES * self._most_bytes, most_bytes), [peer])

    def send(self, tensor: torch.Tensor) -> Wait:
        self._place(self._peer, self._sent, tensor.numel()).copy_(tensor)
        self._lines.tell(self._peer, self._number, self._sent)
        self._sent += 1
        return lambda: None

    def receive(self, words: int) -> Wait:
        turn = self._received
        self._received += 1

        def wait() -> None:
            self._lines.wait(self._peer, self._number, turn)
            self._place(self._lines.rank, turn, words)

        return wait

    def _place(self, rank: int, turn: int, words: int) -> torch.Tensor:
        """Where the tensor of that turn is; a large one, of which there is but one under way, begins where the first place does."""
        begin = turn % _PLACES * self._most_bytes if 4 * words <= self._most_bytes else 0
        return tensor_at(self._pages[rank], begin, _WORD.expand(words), (1,))
