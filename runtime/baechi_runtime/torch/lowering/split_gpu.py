"""One GPU as several devices, so that a machine with a single one can run a job for several: each has streams of its own and an equal
part of the GPU's multiprocessors and memory. Tensors are handed over by reference, behind an event.

Multiprocessors: a green context for each part, all of one split. torch's own GreenContext takes the first ones of the GPU for every
context that it makes, so two of them would share theirs; this goes through cuda-bindings, which torch's builds for CUDA bring along.
Without it, or with a driver that cannot, the parts are streams, and take the multiprocessors as they come.

Memory: torch's allocator keeps a pool for each stream, so the parts' pools are apart already. (In a MemPool, what other streams were
recorded to use is not freed before the step's end.) What each part holds is counted, op by op, and may not exceed its limit.

The parts share the GPU's memory bandwidth, its cache and its copy engines: a rig for testing, no substitute for several GPUs.
"""

from collections.abc import Sequence
from typing import Any

import torch

from baechi_ext.errors import MissingBackendError, first_line
from baechi_runtime.torch.lowering.devices import CudaDevice, cuda_found

GPU = 0


class GpuPart(CudaDevice):
    """One of the `share` parts of a GPU. `stream` is a green context's; without it the part has a stream of its own like any device."""

    def __init__(self, number: int, share: int, note: str, stream: torch.cuda.Stream | None = None) -> None:
        super().__init__(GPU)
        self.note = note
        """The way the GPU was split, in words."""
        self.name = f"cuda:{GPU}/{number}"
        self.share = share
        if stream is not None:
            self.compute = stream

    def take_in(self, value: torch.Tensor, source: CudaDevice) -> tuple[torch.Tensor, torch.cuda.Event]:
        # Its memory is used again only after what this part is given to do with it.
        if value.is_cuda:
            value.record_stream(self.compute)
        return value, source.compute.record_event()


def split_gpu(parts: int) -> list[CudaDevice]:
    """The first GPU as `parts` devices. Raises MissingBackendError where there is none."""
    if not cuda_found():
        raise MissingBackendError(
            f"--split_gpu={parts} needs a CUDA device and this machine has none; use --num_devices={parts} for CPU workers"
        )
    multiprocessors = torch.cuda.get_device_properties(GPU).multi_processor_count
    try:
        streams = _green_streams(parts, max(1, multiprocessors // parts))
    except (ImportError, AttributeError, RuntimeError) as e:
        reason = first_line(e, type(e).__name__)
        note = f"{parts} streams of one GPU, which share its {multiprocessors} multiprocessors ({reason})"
        return [GpuPart(i, parts, note) for i in range(parts)]
    sizes = ", ".join(str(size) for _, size in streams)
    note = f"{parts} green contexts of one GPU, with {sizes} of its {multiprocessors} multiprocessors"
    return [GpuPart(i, parts, note, stream) for i, (stream, _) in enumerate(streams)]


def _green_streams(parts: int, least: int) -> list[tuple[torch.cuda.Stream, int]]:
    """For each part a stream on multiprocessors that no other part has, at least so many, and how many they are.

    Raises ImportError without cuda-bindings, RuntimeError where the driver cannot split the GPU so.
    """
    from cuda.bindings import driver

    def done(result: tuple[Any, ...]) -> Sequence[Any]:
        if result[0] != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{result[0].name} from the CUDA driver")
        return result[1:]

    torch.cuda.init()
    torch.cuda.synchronize(GPU)  # the primary context, which green contexts belong to, is there then
    (device,) = done(driver.cuDeviceGet(GPU))
    (all_of_it,) = done(driver.cuDeviceGetDevResource(device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    # Sizes come in steps that depend on the GPU, so the driver gives `least` or more; where that takes too many, a step less does.
    for size in range(least, 0, -1):
        groups, found, _ = done(driver.cuDevSmResourceSplitByCount(parts, all_of_it, 0, size))
        if found == parts:
            break
    else:
        raise RuntimeError(f"the driver splits it into {found} parts at most")
    streams: list[tuple[torch.cuda.Stream, int]] = []
    for group in groups[:parts]:
        (description,) = done(driver.cuDevResourceGenerateDesc([group], 1))
        (context,) = done(driver.cuGreenCtxCreate(description, device, driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM))
        (stream,) = done(driver.cuGreenCtxStreamCreate(context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0))
        # Contexts and streams are for the life of the process.
        streams.append((torch.cuda.ExternalStream(int(stream), device=GPU), int(group.sm.smCount)))
    return streams
