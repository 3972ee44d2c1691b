"""The speed of this group's processes, and of messages between them: measured while all of them do the same."""

import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from baechi_runtime.models.training_step import TrainingStep
from baechi_runtime.sharding.layout import Argument, flattened
from baechi_runtime.sharding.moves import move
from baechi_runtime.torch.lowering.random_state import as_it_was

_STEPS, _REPEATS = 3, 5


def fastest_passes(step: TrainingStep, inputs: Sequence[Tensor], device: torch.device) -> float:
    """Seconds of a forward and backward pass over these inputs, by the slowest process: all run at once, so that what they share is shared.
    Every process has to call it; each gets the same answer. The step is left as it was."""
    with as_it_was(step):
        return agreed(min(_passes_seconds(step.module, inputs, device) for _ in range(_STEPS)), device)


def seconds_of(device: torch.device, *actions: Callable[[], object]) -> list[float]:
    """Seconds here of each of some actions in a row, which all processes begin together; what they return is let go of afterwards."""
    held = []
    dist.barrier()
    times = [time.perf_counter()]
    for action in actions:
        held.append(action())
        finish(device)
        times.append(time.perf_counter())
    return [end - begin for begin, end in pairwise(times)]


def _passes_seconds(module: nn.Module, inputs: Sequence[Tensor], device: torch.device) -> float:
    """Seconds of a forward and backward pass here, which all processes begin together."""
    weights = [p for p in module.parameters() if p.requires_grad]
    return seconds_of(device, lambda: torch.autograd.grad(module(*inputs), weights, allow_unused=True))[0]


def median_seconds(function: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call that all processes begin together, after a first one; the slowest process's."""
    taken = [seconds_of(device, function)[0] for _ in range(_REPEATS + 1)]
    return agreed(statistics.median(taken[1:]), device)


def agreed(number: float, device: torch.device, op: Any = dist.ReduceOp.MAX) -> float:
    """The largest of all processes' numbers, as the seconds of the slowest one, or what another `op` makes of them."""
    value = torch.tensor([number], dtype=torch.float64, device=device)
    dist.all_reduce(value, op)
    return value.item()


def finish(device: torch.device) -> None:
    """Wait until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_BYTES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
"""Sizes that are probed; between them time is taken to grow evenly, and beyond them as between the last two."""
_SUM, _GATHER, _SCATTER = "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"
_PROBED = (_SUM, _GATHER, _SCATTER)
_KINDS = {_SUM: _SUM, "allreduce": _SUM, _SCATTER: _SCATTER, "reduce_scatter": _SCATTER}
"""A kind -> the kind that it is probed as; any other is under way as long as a gather."""


@dataclass(frozen=True)
class Links:
    """Seconds of messages at the probed sizes, by kind and number of processes. `move_seconds`: what moving a tensor there and its gradient
    back takes beside its messages; `copy_seconds`: of copying a byte."""

    probed: Mapping[tuple[str, int], tuple[float, ...]]
    move_seconds: float
    copy_seconds: float

    def seconds(self, kind: str, size: float, processes: int) -> float:
        """Seconds of a message of which one process puts in, or gets out, this many bytes."""
        if processes == 1:
            return 0.0
        times = self.probed[_KINDS.get(kind, _GATHER), processes]
        i = min(max(bisect_right(_BYTES, size) - 1, 0), len(_BYTES) - 2)
        slope = (times[i + 1] - times[i]) / (_BYTES[i + 1] - _BYTES[i])
        return max(times[i] + slope * (size - _BYTES[i]), times[0] / 2)


def probed_links(mesh: DeviceMesh, device: torch.device) -> Links:
    """The links, measured. Every process has to call it; each gets the same answer."""
    found: dict[tuple[str, int], tuple[float, ...]] = {}
    for dims in [(d,) for d in range(mesh.ndim)] + flattened(mesh.shape):
        processes = prod(mesh.size(d) for d in dims)
        if processes > 1 and (_SUM, processes) not in found:
            times = [_probed(mesh, dims, size // 4 // processes * processes, device) for size in _BYTES]
            found |= {(kind, processes): tuple(t[kind] for t in times) for kind in _PROBED}
    numbers, target = torch.zeros(_BYTES[-1] // 4, device=device), torch.zeros(_BYTES[-1] // 4, device=device)
    copy = median_seconds(lambda: target.copy_(numbers), device) / numbers.nbytes
    return Links(found, _move_seconds(mesh, device, found), copy)


def _probed(mesh: DeviceMesh, dims: Sequence[int], words: int, device: torch.device) -> dict[str, float]:
    """Seconds of each kind of message of this many numbers, as moves over these dimensions of the mesh send them."""
    split, whole, sums = (tuple(p if d in dims else Replicate() for d in range(mesh.ndim)) for p in (Shard(0), Replicate(), Partial()))
    gathered = move(mesh, (words,), split, Argument(whole, sums))
    summed = move(mesh, (words,), sums, Argument(whole, whole))
    part, numbers = torch.zeros(words // prod(mesh.size(d) for d in dims), device=device), torch.zeros(words, device=device)
    actions: list[tuple[Callable[[Tensor], Tensor], Tensor]]
    actions = [(summed.there.forward, numbers), (gathered.there.forward, part), (gathered.back.forward, numbers)]
    return {kind: median_seconds(partial(send, words_sent), device) for kind, (send, words_sent) in zip(_PROBED, actions, strict=True)}


def _move_seconds(mesh: DeviceMesh, device: torch.device, found: Mapping[tuple[str, int], tuple[float, ...]]) -> float:
    """Seconds of a gather whose gradient is added up and scattered, less those of its two messages."""
    size, rest = mesh.size(0), (Replicate(),) * (mesh.ndim - 1)
    if size == 1:
        return 0.0
    words = _BYTES[0] // 4 // size
    there = move(mesh, (words * size,), (Shard(0), *rest), Argument((Replicate(), *rest), (Partial(), *rest)))
    part, grad = torch.zeros(words, device=device, requires_grad=True), torch.zeros(words * size, device=device)
    both = median_seconds(lambda: torch.autograd.grad(there(part), part, grad), device)
    return max(both - found[_GATHER, size][0] - found[_SCATTER, size][0], 0.0)
