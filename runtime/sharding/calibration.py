"""What this group of processes is, as the search sees it: how fast a process computes the step, and how fast a sum goes round."""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from baechi_ext.shard.machine import Machine
from runtime.step import TrainingStep

_STEPS, _REPEATS = 3, 5
_SMALL, _LARGE = 1 << 10, 1 << 20
"""Numbers in the sums that are timed."""


def measured_machine(step: TrainingStep, flop: float, device: torch.device) -> Machine:
    """The machine of all processes of the group. The step has `flop` operations, and runs whole on all of them at once while it is timed,
    so that what they share is shared. Every process has to call it; each gets the same answer."""
    processes = dist.get_world_size()
    saved = step.snapshot()
    seconds = agreed(min(step_seconds(step.module, step.inputs, device) for _ in range(_STEPS)), device)
    step.restore(saved)  # running statistics moved
    if processes == 1:
        return Machine(devices=1, tera_flops=flop / seconds / 1e12)
    small, large = (_sum_seconds(size, device) for size in (_SMALL, _LARGE))
    rounds = 2 * (processes - 1)  # of a ring: each passes on a part of the numbers
    per_word = max(large - small, 1e-9) / (rounds * (_LARGE - _SMALL) / processes)
    latency = max(small - per_word * rounds * _SMALL / processes, 0.0) / rounds
    return Machine(
        devices=processes,
        tera_flops=flop / seconds / 1e12,
        gigabytes_per_second=4 / per_word / 1e9,
        latency_us=latency * 1e6,
    )


def step_seconds(module: nn.Module, inputs: Sequence[Tensor], device: torch.device) -> float:
    """Of forward and backward here, which all processes begin together."""
    weights = [p for p in module.parameters() if p.requires_grad]
    dist.barrier()
    began = time.perf_counter()
    gradients = torch.autograd.grad(module(*inputs), weights, allow_unused=True)
    finish(device)
    del gradients
    return time.perf_counter() - began


def median_seconds(function: Callable[[], object], device: torch.device) -> float:
    """Of a call that all processes begin together, after a first one; the slowest process's."""
    taken = []
    for _ in range(_REPEATS + 1):
        dist.barrier()
        began = time.perf_counter()
        function()
        finish(device)
        taken.append(time.perf_counter() - began)
    return agreed(sorted(taken[1:])[_REPEATS // 2], device)


def _sum_seconds(size: int, device: torch.device) -> float:
    numbers = torch.zeros(size, device=device)
    return median_seconds(lambda: dist.all_reduce(numbers), device)


def agreed(seconds: float, device: torch.device) -> float:
    """The slowest process's."""
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def finish(device: torch.device) -> None:
    """Returns when the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
