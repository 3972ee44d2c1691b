"""Channels of a CUDA device, over NCCL: transfers run on a stream of their own, and it is streams that wait, not the host.

The host gives a device its whole step at once. NCCL's stream waits for what the compute stream was given before an end of a transfer was
started, the compute stream for a received tensor right before its first use. torch's allocator knows that both streams use these tensors,
so one that is freed is used again only after its transfer, and nothing has to be kept here.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from baechi_ext.capture.torch_joint import Binding
from baechi_ext.simulate import Timeline
from baechi_runtime.torch.lowering.devices import TorchDevice
from baechi_runtime.torch.processes.posted_channels import PostedChannels
from baechi_runtime.torch.processes.worker_group import WorkerGroup

_POLL_SECONDS = 5e-5


class StreamChannels(PostedChannels):
    """One worker's ends of all transfers of one placed step between CUDA devices."""

    def __init__(self, timeline: Timeline, binding: Binding, group: WorkerGroup, device: TorchDevice) -> None:
        super().__init__(timeline, binding, group, device)
        self._clock = device
        self._waits: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []
        """Each wait of the compute stream for a tensor: where it begins, and where it ends."""

    def _keep(self, value: torch.Tensor, work: dist.Work, gone: Callable[[], None] | None) -> None:
        """A send is done when its receiver's step is."""

    def _await(self, tensor: int, work: dist.Work) -> None:
        begin = self._clock.mark()
        work.wait()  # with a time-out it would hold up the host
        self._waits.append((tensor, begin, self._clock.mark()))

    def finish(self) -> float:
        """Waits until all has been received; how many microseconds the compute stream waited for it.

        Raises LostPeerError, naming the first tensor that does not come in time.
        """
        waited_us, timeout_seconds = 0.0, self._timeout.total_seconds()
        for tensor, begin, end in self._waits:
            deadline = time.monotonic() + timeout_seconds
            while not end.query():
                if time.monotonic() > deadline:
                    raise self._in_vain(tensor, f"nothing came for {timeout_seconds:g} s")
                time.sleep(_POLL_SECONDS)
            waited_us += self._clock.elapsed_us(begin, end)
        self._waits.clear()
        return waited_us
