"""Losses over split rows, and over split classes: as much of the mean as this process's parts are."""

from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from baechi_runtime.sharding.local_ops import LocalCall
from baechi_runtime.sharding.mesh import groups

MEAN, SUM = 1, 2
"""aten's reductions."""


def squared_error(call: LocalCall, x: Tensor, y: Tensor, reduction: int = MEAN) -> Tensor:
    loss = torch.ops.aten.mse_loss.default(x, y, reduction)
    return loss / call.summands if reduction == MEAN else loss


def cross_entropy(
    call: LocalCall, logits: Tensor, labels: Tensor, weight: Tensor | None = None, reduction: int = MEAN, *rest: Any
) -> Tensor:
    """This process's summand of the loss. `rest`: the label to leave out, and label smoothing."""
    places = call.layout.arguments[0].placements
    rows, classes = call.splitting(places, 0), call.splitting(places, 1)
    if not rows and not classes:
        return call.target(logits, labels, weight, reduction, *rest)
    ignored = rest[0] if rest else -100
    counted = labels != ignored
    if classes:
        losses = _SplitClasses.apply(logits, labels.where(counted, 0), call, classes) * counted
    else:
        losses = functional.cross_entropy(logits, labels, ignore_index=ignored, reduction="none")
    # Processes with other classes of the same rows have the same loss.
    total = losses.sum() / prod(call.mesh.size(d) for d in classes)
    if reduction == SUM:
        return total
    count = counted.sum()
    for group in groups(call.mesh, rows):
        dist.all_reduce(count, group=group)
    return total / count


class _SplitClasses(torch.autograd.Function):
    """Each row's loss, the same on all processes that share its classes. Their gradients come in parts of 1/n, and add up."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, call: LocalCall, classes: list[int]) -> Tensor:
        sharing = groups(call.mesh, classes)
        part, parts = call.parts(call.layout.arguments[0].placements, 1)
        width = logits.shape[1]
        own = labels - part * width
        here = (own >= 0) & (own < width)
        own = own.clamp(0, width - 1).unsqueeze(1)
        largest = logits.amax(1)
        for group in sharing:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        exponentials = (logits - largest.unsqueeze(1)).exp_()
        sums = torch.stack([exponentials.sum(1), (logits.gather(1, own).squeeze(1) - largest) * here])
        for group in sharing:
            dist.all_reduce(sums, group=group)
        ctx.save_for_backward(exponentials.div_(sums[0].unsqueeze(1)), own, here)
        ctx.parts = parts
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        softmax, own, here = ctx.saved_tensors
        dx = softmax.scatter_add(1, own, -here.to(softmax.dtype).unsqueeze(1))
        return dx.mul_((grad * ctx.parts).unsqueeze(1)), None, None, None
