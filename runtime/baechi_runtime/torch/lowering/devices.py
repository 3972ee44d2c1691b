"""Where a device program runs: a CPU core, or a CUDA device with its streams. One object per device, used by its own thread."""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from baechi_ext.capture.torch_private import hold_stream
from baechi_ext.errors import ExecutionError, MissingBackendError, first_line
from baechi_runtime.host.host_memory import usable_bytes
from baechi_runtime.host.processor import available_cores
from baechi_runtime.host.variables import number_of
from baechi_runtime.torch.lowering.memory_limit import plannable_bytes


class TorchDevice(ABC):
    """A device as the executor needs it. Work given to it is done at once, unless a kind of device says otherwise."""

    clock_name: str
    share = 1
    """The number of parts that its GPU is split into, of which this is one; 1 where it is not split."""
    let_go: Callable[[Any], None] | None = None
    """To be called after a tensor from another device was let go of; None: its memory is free at once."""

    def __init__(self, name: str, torch_device: torch.device, node: int = 0) -> None:
        self.name = name
        self.torch_device = torch_device
        self.node = node
        """The number of the run's machine that it is on."""
        self.cores = available_cores()
        """The host's cores that this process may use, all devices of the run together."""

    def enter(self) -> None:
        """Prepares the calling thread: core or stream, one intra-op thread."""
        torch.get_num_threads()  # a thread's first look takes over what another thread set last; after it, what it sets is its own
        torch.set_num_threads(1)

    def synchronize(self) -> None:  # noqa: B027 - nothing to wait for
        """Returns when all work given to the device is done."""

    @abstractmethod
    def mark(self) -> Any:
        """A point on the device's clock: thread CPU time, or a CUDA event behind the work given so far."""

    @abstractmethod
    def elapsed_us(self, start: Any, end: Any) -> float:
        """Microseconds between two marks, after `synchronize`."""

    def peak_bytes(self) -> int | None:
        """The most bytes held since `reset_peak`, by the device's allocator; None where it does not say."""
        return None

    def reset_peak(self) -> None:  # noqa: B027 - nothing to start
        """Starts a new measurement of `peak_bytes`."""


class CpuDevice(TorchDevice):
    """One core, one intra-op thread. Tensors are handed over by reference."""

    clock_name = "thread_cpu"

    def __init__(self, index: int, node: int = 0, local: int | None = None) -> None:
        """`local` is its number among the devices of its machine; None: it is alone there with those of smaller index."""
        super().__init__(f"cpu:{index}", torch.device("cpu"), node)
        self.core = self.cores[(index if local is None else local) % len(self.cores)]

    def enter(self) -> None:
        super().enter()
        os.sched_setaffinity(0, {self.core})

    def mark(self) -> int:
        return time.thread_time_ns()

    def elapsed_us(self, start: int, end: int) -> float:
        return (end - start) / 1000


_CYCLES_PER_US = 2000
"""No GPU's clock is faster by much."""


class CudaDevice(TorchDevice):
    """One of the CUDA devices of one process, whose host thread gives all of them their work; or that of the worker process `rank`, number
    `index` of the machine `node`.

    Memory is used again in the order of the stream it was taken on. So a tensor that is copied out is kept until this device knows of
    the copy's end, and a copy in waits until all is done that read what was let go of before. torch's allocator need not be told of the
    other streams: it would hold memory back until it sees their events, which it does not while a graph is captured.
    """

    clock_name = "cuda_event"
    let_go: Callable[[Any], None]

    def __init__(self, index: int, rank: int | None = None, node: int = 0) -> None:
        super().__init__(f"cuda:{index if rank is None else rank}", torch.device("cuda", index), node)
        self.let_go = self._note_end_of_use
        self._unused: torch.cuda.Event | None = None
        """Behind the last reader of what was let go of in this step."""

    # Made at their first use, which opens the device: a worker process opens none but its own.
    @cached_property
    def compute(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.torch_device)

    @cached_property
    def copy(self) -> torch.cuda.Stream:
        """The stream for what comes in from other devices."""
        return torch.cuda.Stream(self.torch_device)

    @cached_property
    def outgoing(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.torch_device)

    @property
    def streams(self) -> tuple[torch.cuda.Stream, ...]:
        return self.compute, self.copy, self.outgoing

    def enter(self) -> None:
        super().enter()
        torch.cuda.set_device(self.torch_device)
        torch.cuda.set_stream(self.compute)

    def take_turn(self, _: Any = None) -> None:
        """Has the calling thread give its GPU work as this device: on its compute stream."""
        torch.cuda.set_stream(self.compute)

    def begin(self) -> None:
        """Before a step, or a phase of one, with all devices idle."""
        self._unused = None

    def take_in(self, value: torch.Tensor, source: "CudaDevice") -> tuple[torch.Tensor, torch.cuda.Event]:
        """Begins to copy a tensor that `source` was just told to compute; the copy, and the event behind which it is there."""
        self.copy.wait_stream(source.compute)
        if self._unused is not None:
            self.copy.wait_event(self._unused)
        # torch copies between two devices on the current stream of the source's; before and after, it and that of the target wait for
        # each other. So a device sends one tensor at a time, and takes in one at a time.
        torch.cuda.set_stream(source.outgoing)
        torch.cuda.set_stream(self.copy)
        try:
            here = torch.empty_like(value, device=self.torch_device)
            here.copy_(value, non_blocking=True)
        finally:
            source.take_turn()
            self.take_turn()
        return here, self.copy.record_event()

    def _note_end_of_use(self, _: Any) -> None:
        self._unused = self.compute.record_event()

    def synchronize(self) -> None:
        try:
            for stream in self.streams:
                stream.synchronize()
        except RuntimeError as e:  # of a kernel, found only now
            raise ExecutionError(f"device {self.name} failed: {type(e).__name__}: {first_line(e)}") from e

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.compute)
        return event

    def elapsed_us(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) * 1000

    def hold(self, us: float) -> None:
        """Keeps the device waiting for so long, or longer where its clock is slow, before it does what it is given next."""
        hold_stream(self.compute, int(us * _CYCLES_PER_US))

    def peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.torch_device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)


@contextmanager
def on_core_of(device: TorchDevice) -> Iterator[None]:
    """Within, the calling thread keeps to the core of a CPU device, as that device's own thread does."""
    core = getattr(device, "core", None)
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run ops in one thread, so that sums are added up in the same order as by a placed op."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def cpu_devices(count: int) -> list[TorchDevice]:
    return [CpuDevice(i) for i in range(count)]


def cpu_workers(count: int, environment: Mapping[str, str] = os.environ) -> list[TorchDevice]:
    """The devices of `count` worker processes, cpu:RANK each. `environment` is torchrun's: a machine's workers take its cores in turn.

    Raises OptionError where it makes no sense.
    """
    here = number_of("LOCAL_WORLD_SIZE", count, environment)  # torchrun starts equally many on each machine
    return [CpuDevice(rank, rank // here, rank % here) for rank in range(count)]


def cuda_devices(count: int) -> list[CudaDevice]:
    """The first `count` CUDA devices. Raises MissingBackendError where there are fewer."""
    _require_cuda(count, count)
    return [CudaDevice(i) for i in range(count)]


def cuda_workers(count: int, environment: Mapping[str, str] = os.environ) -> list[TorchDevice]:
    """The devices of `count` worker processes, one CUDA device each, none of them opened. `environment` is torchrun's: a machine's workers
    take its devices in turn, and a device of another machine is taken to be like the one of that number here.

    Raises MissingBackendError where this machine has fewer devices than workers, or torch has no NCCL.
    """
    here = number_of("LOCAL_WORLD_SIZE", count, environment)
    _require_cuda(count, here)
    if not dist.is_nccl_available():
        raise MissingBackendError("--workers=process for CUDA devices needs NCCL, which this torch lacks; drop --workers=process")
    return [CudaDevice(rank % here, rank, rank // here) for rank in range(count)]


def cuda_found() -> int:
    """The number of CUDA devices that this process can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def uuids_of_gpus(indices: Sequence[int]) -> list[str]:
    """As the driver names them, whatever CUDA_VISIBLE_DEVICES leaves and orders."""
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in indices]


def _require_cuda(count: int, here: int) -> None:
    found = cuda_found()
    if here > found:
        wanted = f"{count} CUDA devices" if here == count else f"{count} CUDA devices, {here} of them here,"
        raise MissingBackendError(
            f"--num_gpus={count} asks for {wanted} and this machine has {found}; use --num_devices={count} for CPU workers"
        )


def is_capturing() -> bool:
    """True while the calling thread's stream records a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def settle(devices: Sequence[TorchDevice]) -> None:
    """Waits for what the calling thread gave CUDA devices outside of their own streams, which do not wait for it by themselves."""
    for device in {d.torch_device for d in devices if d.torch_device.type == "cuda"}:
        torch.cuda.synchronize(device)


def memory_bytes(device: TorchDevice, sharers: int) -> int:
    """Bytes of tensors that a device of this machine may hold: a CUDA device what its own memory has room for, or its part of it; one of
    `sharers` CPU devices an equal part of the memory that this process may use."""
    if device.torch_device.type == "cuda":
        return plannable_bytes(torch.cuda.get_device_properties(device.torch_device).total_memory) // device.share
    return usable_bytes() // sharers
