"""Channels through shared memory for devices that have no room for all that comes to them in a step beside the step's peak.

A receiver says when a tensor may come, as early as it has room; a sender copies it then, or when it next gives or takes a tensor after
that, and gives a tensor's memory back to the system when the last that reads it is gone. A receiver says so at the latest before it waits
for the tensor itself, and a sender that waits hears all receivers, so nothing can wait in a circle.
"""

import mmap
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from baechi_ext.capture.torch_joint import Binding
from baechi_ext.simulate import Timeline
from baechi_runtime.torch.processes.channels import Phase
from baechi_runtime.torch.processes.lines import Lines, LostLineError
from baechi_runtime.torch.processes.shared_channels import SharedChannels
from baechi_runtime.torch.processes.worker_group import WorkerGroup

_MAY_COME = 2**31
"""Added to a tensor's number: it may come."""


class TightChannels(SharedChannels):
    """See SharedChannels."""

    aligned_to = mmap.PAGESIZE

    def __init__(self, timeline: Timeline, binding: Binding, group: WorkerGroup, lines: Lines, phase: Phase | None = None) -> None:
        super().__init__(timeline, binding, group, lines, phase)
        self.extra_bytes = 0
        self._waiting: dict[tuple[int, int], Callable[[], None]] = {}
        """(tensor, target) -> what sends it, once it may come."""
        self._post_early()

    def _poster(self, tensor: int, source: int) -> Callable[[Any], None]:
        tell, number = self._lines.tell, self._number

        def post(_: Any) -> None:
            try:
                tell(source, number, _MAY_COME + tensor)
            except LostLineError as e:
                raise self._in_vain(tensor, str(e)) from e

        return post

    def giver(self, tensor: int, target: int, gone: Callable[[], None] | None = None) -> Callable[[Any], None]:
        """See `Exchange`."""
        send = super().giver(tensor, target, gone)

        def give(value: torch.Tensor) -> None:
            self._waiting[tensor, target] = lambda: send(value)
            try:
                self._lines.hear(self._lines.reads)
            except LostLineError as e:
                raise self._unsent(str(e)) from e
            self._send_what_may_come()

        return give

    def _send_what_may_come(self) -> None:
        for tensor, target in list(self._waiting):
            if self._lines.took(target, self._number, _MAY_COME + tensor):
                self._waiting.pop((tensor, target))()

    def _wait(self, peer: int, number: int) -> None:
        def came() -> bool:
            self._send_what_may_come()
            return self._lines.took(peer, self._number, number)

        if not self._lines.took(peer, self._number, number):
            self._lines.listen(self._lines.reads, came)

    def _received(self, tensor: int) -> torch.Tensor:
        """The tensor in its place, which the system has back when nobody looks at it any more."""
        begin = self._places_at[self._rank][tensor]
        like, stride = self._like(tensor)
        size = like.numel() * like.element_size()
        if not size:
            return torch.empty(like.size(), dtype=like.dtype)
        memory = self._pages[self._rank].memory
        row = np.frombuffer(memory, dtype=np.uint8, count=size, offset=begin)
        weakref.finalize(row, memory.madvise, mmap.MADV_REMOVE, begin, -(-size // self.aligned_to) * self.aligned_to).atexit = False
        return torch.from_numpy(row).view(like.dtype).as_strided(like.size(), stride)

    def finish(self) -> float:
        """See Channels."""
        def sent() -> bool:
            self._send_what_may_come()
            return not self._waiting

        try:
            if self._waiting:
                self._lines.listen(self._lines.reads, sent)
        except LostLineError as e:
            raise self._unsent(str(e)) from e
        return super().finish()
