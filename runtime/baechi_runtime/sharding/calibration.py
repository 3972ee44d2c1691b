"""The speed of this group's processes, and the timing of what they do together."""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from baechi_runtime.models.training_step import TrainingStep

_STEPS, _REPEATS = 3, 5


def measured_tera_flops(step: TrainingStep, flop: float, device: torch.device) -> float:
    """The operations (10^12) a second of a process. The step has `flop` of them, and runs whole on all processes at once while it is timed,
    so that what they share is shared. Every process has to call it; each gets the same answer."""
    saved = step.snapshot()
    seconds = agreed(min(step_seconds(step.module, step.inputs, device) for _ in range(_STEPS)), device)
    step.restore(saved)  # running statistics moved
    return flop / seconds / 1e12


def step_seconds(module: nn.Module, inputs: Sequence[Tensor], device: torch.device) -> float:
    """Seconds of a forward and backward pass here, which all processes begin together."""
    weights = [p for p in module.parameters() if p.requires_grad]
    dist.barrier()
    began = time.perf_counter()
    gradients = torch.autograd.grad(module(*inputs), weights, allow_unused=True)
    finish(device)
    del gradients
    return time.perf_counter() - began


def median_seconds(function: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call that all processes begin together, after a first one; the slowest process's."""
    taken = []
    for _ in range(_REPEATS + 1):
        dist.barrier()
        began = time.perf_counter()
        function()
        finish(device)
        taken.append(time.perf_counter() - began)
    return agreed(sorted(taken[1:])[_REPEATS // 2], device)


def agreed(seconds: float, device: torch.device) -> float:
    """The seconds of the slowest process."""
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def finish(device: torch.device) -> None:
    """Wait until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
