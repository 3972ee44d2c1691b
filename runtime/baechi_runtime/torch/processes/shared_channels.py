"""Channels through memory that the workers of one machine share, and where these are the choice.

Each tensor that comes to a device in a step has a place of its own there, into which its sender copies it, and from which its readers read
it: one copy, and one message through a pipe that says so. A sender may write into a place again once its receiver's run is over, which the
receiver says at the end of each run; so a sender waits only for runs before its own, and nothing can wait in a circle.
"""

from collections.abc import Callable
from typing import Any

import torch

from baechi_ext.capture.torch_joint import Binding
from baechi_ext.errors import ExecutionError
from baechi_ext.simulate import Timeline
from baechi_runtime.torch.lowering.devices import TorchDevice
from baechi_runtime.torch.processes.channels import Channels, Phase
from baechi_runtime.torch.processes.lines import Lines, LostLineError, tensor_at
from baechi_runtime.torch.processes.posted_channels import PostedChannels, StreamChannels
from baechi_runtime.torch.processes.worker_group import WorkerGroup

_OVER = 2**32 - 1
"""The message that a run is over, so that its places may be written again; a tensor's number is far below."""
_ALIGNED_TO = 64


class SharedChannels(Channels):
    """One worker's ends of all transfers of one placed step, or of one phase of it."""

    def __init__(self, timeline: Timeline, binding: Binding, group: WorkerGroup, lines: Lines, phase: Phase | None = None) -> None:
        super().__init__(timeline, binding, group, phase)
        self._lines = lines
        self._number = lines.open_channel()
        places = [self._places(device) for device in range(group.size)]
        self._places_at, sizes = [found for found, _ in places], [size for _, size in places]
        self._sources = sorted({x.source for x in self._coming_to(self._rank)})
        self._targets = [d for d in range(group.size) if any(x.source == self._rank for x in self._coming_to(d))]
        self._in_use: set[int] = set()
        """The devices whose last run may not be over."""
        # What a phase leaves for a later one is kept while this one may run again.
        self._copies = phase is not None
        self.extra_bytes = sizes[self._rank]
        try:
            self._pages = lines.pages(self._number, sizes[self._rank], self._targets)
        except LostLineError as e:
            raise self._unsent(str(e)) from e
        except OSError as e:
            raise ExecutionError(
                f"device {self._rank} has no memory to share for the {self.extra_bytes} bytes that come to it ({e.strerror}); "
                "raise what limits it (ulimit -n, or memory), or set BAECHI_SHARED_MEMORY=0"
            ) from e

    def _places(self, device: int) -> tuple[dict[int, int], int]:
        """Where each tensor that comes to a device begins, and how many bytes they all take."""
        begins, end = {}, 0
        for tensor in sorted({x.tensor for x in self._coming_to(device)}):
            begins[tensor] = end
            like, _ = self._like(tensor)
            end += -(-like.numel() * like.element_size() // _ALIGNED_TO) * _ALIGNED_TO
        return begins, end

    def _place(self, tensor: int, device: int) -> torch.Tensor:
        return tensor_at(self._pages[device], self._places_at[device][tensor], *self._like(tensor))

    def giver(self, tensor: int, target: int, gone: Callable[[], None] | None = None) -> Callable[[Any], None]:
        place, tell, number, in_use = self._place(tensor, target), self._lines.tell, self._number, self._in_use

        def give(value: torch.Tensor) -> None:
            try:
                if target in in_use:
                    self._lines.wait(target, number, _OVER)
                    in_use.discard(target)
                place.copy_(value)
                tell(target, number, tensor)
            except LostLineError as e:
                raise self._unsent(str(e)) from e
            if gone is not None:
                gone()

        return give

    def taker(self, tensor: int, target: int) -> Callable[[], torch.Tensor]:
        source = self._placement[self._tensors[tensor].producer]
        wait, number, place = self._lines.wait, self._number, self._place

        def take() -> torch.Tensor:
            try:
                wait(source, number, tensor)
            except LostLineError as e:
                raise self._in_vain(tensor, str(e)) from e
            value = place(tensor, target)
            return value.clone() if self._copies else value

        return take

    def finish(self) -> float:
        """See Channels; what was sent is there, and no clock runs on in a wait, in which CPU time stands still."""
        try:
            for source in self._sources:
                self._lines.tell(source, self._number, _OVER)
            for target in self._in_use:  # a run that sent nothing there
                self._lines.wait(target, self._number, _OVER)
        except LostLineError as e:
            raise self._unsent(str(e)) from e
        self._in_use.update(self._targets)
        return 0.0


def channels_of(timeline: Timeline, binding: Binding, group: WorkerGroup, device: TorchDevice, phase: Phase | None = None) -> Channels:
    """The channels of a step, or of a phase of it: shared memory where all workers have lines to each other, and room for all that comes to
    them in a step; otherwise torch.distributed. The same on all workers."""
    if device.torch_device.type != "cpu":
        return StreamChannels(timeline, binding, group, device)
    if group.lines is not None and _has_room(timeline):
        return SharedChannels(timeline, binding, group, group.lines, phase)
    return PostedChannels(timeline, binding, group, device, phase)


def _has_room(timeline: Timeline) -> bool:
    """True if every device has memory for all that comes to it in a step beside the step's peak."""
    coming = [0.0] * len(timeline.cluster)
    for transfer in timeline.transfers:
        coming[transfer.target] += timeline.graph.tensors[transfer.tensor].bytes
    limits = (device.memory_bytes for device in timeline.cluster.devices)
    return all(limit is None or peak + more <= limit for limit, peak, more in zip(limits, timeline.peak_memory_bytes, coming, strict=True))
