"""A limit on a worker process's memory while it runs its share of a step, kept by the system, or for a CUDA device by torch's allocator:
what goes beyond it fails to be allocated."""

import contextlib
import resource
from collections.abc import Iterator

import torch

from baechi_ext.errors import ExecutionError, first_line
from baechi_runtime.host import process_memory

SLACK_BYTES = 64 * 1024 * 1024
"""Bytes that a step may take beyond its tensors: the kernels' own scratch memory, buffers of the transport, and fragmentation."""
WORKSPACE_BYTES = 3 * 33 * 1024 * 1024
"""cuBLAS's and cuBLASLt's on the streams of the unplaced and of the placed step, and once more in a graph: 33 MiB each on an H100, less on
older GPUs (benchmarks/gpu_memory.py)."""
CONTEXT_BYTES = 800 * 1024 * 1024
"""The driver's, and the code of kernels: 619 MiB with the first tensor on an H100, up to 771 with a model's step."""
FRAGMENTS = 0.25
"""The part of its tensors' bytes that torch's allocator takes beyond them, since it rounds up, and keeps memory in segments."""
TOGETHER_BYTES = 32 * 1024 * 1024
"""Bytes of gradients that wait until their parameters are updated together."""
CUDA_SLACK_BYTES = SLACK_BYTES + WORKSPACE_BYTES + TOGETHER_BYTES


def plannable_bytes(free_bytes: float) -> int:
    """Bytes of tensors that a CUDA device with so much free memory has room for."""
    return max(0, int((free_bytes - CONTEXT_BYTES - CUDA_SLACK_BYTES) / (1 + FRAGMENTS)))


class MemoryLimit:
    """As a context: this process may take this many bytes more than it had when the limit was made. None: no limit. What it comes to hold
    outside of the context, other plans that are loaded beside this one say, is not charged."""

    def __init__(self, more_bytes: int | None) -> None:
        self._limit: int | None = None
        self._held = 0
        self._before: tuple[int, int] | None = None
        process_memory.trim()
        data = process_memory.data_bytes()
        if more_bytes is not None and data is not None:
            self._limit, self._held = data + max(0, more_bytes) + SLACK_BYTES, data

    def __enter__(self) -> None:
        if self._limit is not None:
            self._limit += max(0, (process_memory.data_bytes() or 0) - self._held)
            self._before = resource.getrlimit(resource.RLIMIT_DATA)
            hard = self._before[1]
            soft = self._limit if hard == resource.RLIM_INFINITY else min(self._limit, hard)
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            resource.setrlimit(resource.RLIMIT_DATA, self._before)
            self._before, self._held = None, process_memory.data_bytes() or 0


class CudaMemoryLimit:
    """The same for what torch holds on a CUDA device. What it keeps of freed memory counts too, as far as it can't be given back; what
    others have come to hold since the limit was made is not charged."""

    def __init__(self, more_bytes: int | None, device: torch.device) -> None:
        self._device = device
        self._limit: int | None = None
        if more_bytes is not None:
            torch.cuda.empty_cache()
            self._total = torch.cuda.get_device_properties(device).total_memory
            self._held = torch.cuda.memory_allocated(device)
            limit = torch.cuda.memory_reserved(device) + int(max(0, more_bytes) * (1 + FRAGMENTS)) + CUDA_SLACK_BYTES
            self._limit = limit if limit < self._total else None

    def __enter__(self) -> None:
        if self._limit is not None:
            limit = self._limit + max(0, torch.cuda.memory_allocated(self._device) - self._held)
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / self._total), self._device)

    def __exit__(self, *_: object) -> None:
        if self._limit is not None:
            torch.cuda.set_per_process_memory_fraction(1.0, self._device)


@contextlib.contextmanager
def loading(what: str) -> Iterator[None]:
    """Raises ExecutionError where there is no memory for what is done inside."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as e:
        reason = first_line(e, "no more memory")
        raise ExecutionError(
            f"out of memory while {what} was loaded: {reason}; use more devices or a smaller batch, or end what else holds memory there"
        ) from e
