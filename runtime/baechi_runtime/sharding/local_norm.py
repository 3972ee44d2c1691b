"""Batch normalization of a split batch with the statistics of the whole one (as SyncBatchNorm, which runs on CUDA only)."""

from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from baechi_runtime.sharding.local_ops import LocalCall
from baechi_runtime.sharding.mesh import groups


def batch_norm(call: LocalCall, x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> Tensor:
    """The op itself, unless other processes have other parts of the batch."""
    mean, variance, train, momentum, epsilon, _ = rest
    axes = call.layout.arguments[0].placements
    over = [d for d, placement in enumerate(axes) if placement.is_shard() and cast(Shard, placement).dim != 1]
    if not over or not train:
        return call.target(x, weight, bias, *rest)
    return _BatchNorm.apply(x, weight, bias, _Statistics(call.mesh, over, mean, variance, momentum, epsilon))


class _Statistics:
    """The mesh dimensions that the batch is split over, and the running statistics."""

    def __init__(self, mesh: DeviceMesh, over: list[int], *running: Any) -> None:
        self.groups = groups(mesh, over)
        self.processes = prod(mesh.size(d) for d in over)
        self.mean, self.variance, self.momentum, self.epsilon = running

    def add_up(self, values: Tensor) -> Tensor:
        for group in self.groups:
            dist.all_reduce(values, group=group)
        return values

    def of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the whole batch by channel. The mean first: squares of what is far from 0 would lose digits."""
        dims = [d for d in range(x.dim()) if d != 1]
        variance, mean = torch.var_mean(x, dims, correction=0)
        whole = self.add_up(mean / self.processes)
        spread = variance + (mean - whole).square()
        return whole, self.add_up(spread / self.processes)

    def update(self, mean: Tensor, variance: Tensor, count: int) -> None:
        if self.mean is not None:
            self.mean.lerp_(mean, self.momentum)
            self.variance.lerp_(variance * (count / max(count - 1, 1)), self.momentum)


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: _Statistics) -> Tensor:
        mean, variance = statistics.of(x)
        ctx.count = x.numel() // x.shape[1] * statistics.processes
        statistics.update(mean, variance, ctx.count)
        ctx.statistics = statistics
        ctx.save_for_backward(x, weight, mean, variance)
        return torch.nn.functional.batch_norm(x, mean, variance, weight, bias, False, 0.0, statistics.epsilon)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """As if the statistics were given, less what they take back: the projections of that on 1 and on x."""
        x, weight, mean, variance = ctx.saved_tensors
        epsilon = ctx.statistics.epsilon
        backward = torch.ops.aten.native_batch_norm_backward.default
        dx, dw, db = backward(grad, x, weight, mean, variance, None, None, False, epsilon, [True, True, True])
        inverse = torch.rsqrt(variance + epsilon)
        along_x, along_1 = ctx.statistics.add_up(torch.stack([dw, db])) / ctx.count
        scale = inverse if weight is None else inverse * weight
        slope = scale * along_x * inverse
        shape = [-1 if d == 1 else 1 for d in range(x.dim())]
        dx.addcmul_(x, slope.view(shape), value=-1)
        dx.sub_((scale * along_1 - slope * mean).view(shape))
        return dx, dw if weight is not None else None, db if weight is not None else None, None
