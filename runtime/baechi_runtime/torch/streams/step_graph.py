"""A placed step as one CUDA graph: the kernels of all devices, the copies between them, and what waits for what. A step is one launch then.

Capturing begins on one device's stream, from which the streams of all devices branch off, and to which they come back. On each device it
takes memory from a pool of its own, in which a tensor's place is used again as soon as the plan frees it, and which nobody else uses.

See https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs for what a graph may hold.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from baechi_ext.capture.torch_joint import Binding
from baechi_ext.capture.torch_private import free_workspaces, give_up_capture
from baechi_ext.collector import without_collection
from baechi_ext.simulate import Timeline
from baechi_runtime.torch.lowering.devices import CudaDevice, TorchDevice

MOST_MEMORY = 0.5
"""The part of a GPU's free memory that a graph may keep: others come after it, and the unplaced step."""


class CudaRecorder:
    """Captures one CUDA graph of several devices, of which `origin` may draw random numbers. Called in the devices' thread."""

    def __init__(self, devices: Sequence[CudaDevice], origin: CudaDevice) -> None:
        self._origin = origin
        self._streams = [stream for device in devices for stream in device.streams if stream != origin.compute]
        others = {device.torch_device for device in devices} - {origin.torch_device}
        self._pools = {device: _pool(device) for device in others}
        """A graph keeps its own, on the device where it begins, but not these: who holds the graph has to."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Captures what `work` gives to the devices, and returns a function that does it again on the same tensors. `work` is called, but
        nothing is computed. Raises RuntimeError where that cannot be captured."""
        graph, compute = torch.cuda.CUDAGraph(), self._origin.compute
        free_workspaces()
        torch.cuda.empty_cache()  # what the steps before it took, and it takes anew
        with contextlib.ExitStack() as stack:
            stack.callback(free_workspaces)  # the graph's pool keeps its own, and nothing else uses that
            stack.enter_context(without_collection())  # a graph that is freed meanwhile would end this one
            for device, pool in self._pools.items():
                stack.enter_context(torch.cuda.use_mem_pool(pool, device))
            stack.enter_context(torch.cuda.stream(compute))
            own = torch.cuda.graph_pool_handle()
            # Other threads may allocate meanwhile.
            graph.capture_begin(own, capture_error_mode="thread_local")
            try:
                for stream in self._streams:
                    stream.wait_stream(compute)
                work()
                self._join()
                self._end(graph)
            except BaseException:
                self._give_up(graph, own)
                raise

        return partial(self._replay, graph)

    def _join(self) -> None:
        for stream in self._streams:
            self._origin.compute.wait_stream(stream)

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        self._origin.take_turn()  # where it began; parts of one GPU have taken turns
        graph.capture_end()

    def _give_up(self, graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> None:
        """Ends a capture that failed, for torch's allocator and generators, too, which earlier torch leaves as they were amid it."""
        with contextlib.suppress(RuntimeError):
            self._join()
        try:
            self._end(graph)
        except RuntimeError:  # which says only that it failed
            device = self._origin.torch_device
            give_up_capture(device.index, pool)
            with contextlib.suppress(RuntimeError):
                graph.reset()
            other = torch.cuda.CUDAGraph()
            with contextlib.suppress(RuntimeError):
                other.capture_begin(capture_error_mode="thread_local")
                torch.zeros(1, device=device)
            with contextlib.suppress(RuntimeError):
                other.capture_end()

    def _replay(self, graph: torch.cuda.CUDAGraph) -> None:
        with torch.cuda.stream(self._origin.compute):
            graph.replay()


def _pool(device: torch.device) -> torch.cuda.MemPool:
    with torch.cuda.device(device):
        return torch.cuda.MemPool()


def why_not_captured(timeline: Timeline, binding: Binding, optimizers: Mapping[str, torch.optim.Optimizer]) -> str:
    """The reason why no graph can do the step again; empty where none is known."""
    for op, bound in zip(timeline.graph.ops, binding.ops, strict=True):
        tags = () if bound.node is None else getattr(bound.node.target, "tags", ())
        if {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(tags):
            return f"the shape of what op {op.id!r} makes depends on values"
    if len({timeline.placement[v] for v in binding.seeded_ops}) > 1:
        return "random numbers are drawn on several devices (--relaxed_random)"
    counting = next((o for o in optimizers.values() if not _is_replayable(o)), None)
    return f"{type(counting).__name__} counts its steps on the host" if counting is not None else ""


def too_large(timeline: Timeline, devices: Sequence[TorchDevice], copied_bytes: Mapping[torch.device, float] | None = None) -> str:
    """The reason why a graph would keep too much of a GPU's memory; empty where it would not. It stays taken while the graph is there, by
    all that a step holds at a time beside what is there from the start, and `copied_bytes` besides; what torch's allocator keeps of free
    memory is given back first."""
    torch.cuda.empty_cache()
    needed = {device.torch_device: (copied_bytes or {}).get(device.torch_device, 0.0) for device in devices}
    for device, peak in zip(devices, timeline.peak_memory_bytes, strict=True):
        needed[device.torch_device] += peak
    for op, d in zip(timeline.graph.ops, timeline.placement, strict=True):
        needed[devices[d].torch_device] -= op.persistent_bytes
    for gpu, taken in needed.items():
        free = torch.cuda.mem_get_info(gpu)[0] if gpu.type == "cuda" else math.inf
        if taken > MOST_MEMORY * free:
            return f"it would keep {taken / 2**30:.3g} of the {free / 2**30:.3g} GiB that are free on {gpu}, more than {MOST_MEMORY:.0%}"
    return ""


def _is_replayable(optimizer: torch.optim.Optimizer) -> bool:
    """True if a step of the optimizer is kernels alone. Others count their steps on the host, unless they are told to be `capturable`."""
    return isinstance(optimizer, torch.optim.SGD) or all(group.get("capturable", False) for group in optimizer.param_groups)
