"""Ops on a process's own parts of their tensors, where that takes more than calling them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard
from torch.nn import functional

from baechi_runtime.sharding.layout import Layout, groups
from baechi_runtime.sharding.op_names import argument_at, op_of, plain


@dataclass(frozen=True)
class LocalCall:
    """A call, its layout, and the mesh that it runs on."""

    node: fx.Node
    layout: Layout
    mesh: DeviceMesh

    @cached_property
    def target(self) -> Callable[..., Any]:
        """The op; where it works in place, the one that does not."""
        return plain(op_of(self.node))

    @cached_property
    def shape(self) -> list[int]:
        """The shape of this process's part of the result."""
        whole = self.node.meta["val"].shape
        return [size // self.parts(self.layout.outputs[0], dim)[1] for dim, size in enumerate(whole)]

    @cached_property
    def summands(self) -> int:
        """Number of processes whose results add up to the result."""
        return self.size([d for d, placement in enumerate(self.layout.outputs[0]) if placement.is_partial()])

    def size(self, dims: Sequence[int]) -> int:
        """Number of processes along these dimensions of the mesh."""
        return prod(self.mesh.size(d) for d in dims)

    def add_up(self, values: Tensor, dims: Sequence[int], op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Add values up, or reduce them by another op, in place, over the processes along these dimensions of the mesh."""
        for group in groups(self.mesh, dims):
            dist.all_reduce(values, op, group=group)
        return values

    def splitting(self, placements: Sequence[Placement], dim: int) -> list[int]:
        """The mesh dimensions that split a tensor's dimension."""
        return [d for d, placement in enumerate(placements) if placement == Shard(dim)]

    def parts(self, placements: Sequence[Placement], dim: int) -> tuple[int, int]:
        """(which part of a tensor's dimension this process has, of how many)."""
        index, count = 0, 1
        for d in self.splitting(placements, dim):
            index, count = index * self.mesh.size(d) + self.mesh.get_local_rank(d), count * self.mesh.size(d)
        return index, count


Runner = Callable[..., Any]
"""(call, *arguments, **options) on local parts -> the local parts of the results."""


def reshape(call: LocalCall, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """Any op that only changes the shape."""
    return x.reshape(call.shape)


def expand(call: LocalCall, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x.expand(call.shape)


def product(call: LocalCall, *args: Any, **kwargs: Any) -> Tensor:
    """A product with a bias: where several processes' results add up, each adds a part of the bias."""
    if call.summands == 1:
        return call.target(*args, **kwargs)
    schema = op_of(call.node)._schema
    names = [argument.name for argument in schema.arguments]
    for name in ("bias", "self") if schema.name == "aten::addmm" else ("bias",):
        at = names.index(name) if name in names else len(args)
        if at < len(args) and args[at] is not None:
            args = (*args[:at], args[at] / call.summands, *args[at + 1 :])
    return call.target(*args, **kwargs)


def mean(call: LocalCall, *args: Any, **kwargs: Any) -> Tensor:
    """The op itself on parts that have equally many terms."""
    return call.target(*args, **kwargs) / call.summands


def embedding(call: LocalCall, weight: Tensor, indices: Tensor, padding: int = -1, *_: Any) -> Tensor:
    """Rows of the table; where the table's rows are split, zeros for rows that others have."""
    part, parts = call.parts(call.layout.arguments[0].placements, 0)
    if parts == 1:
        return torch.ops.aten.embedding.default(weight, indices, padding)
    rows = weight.shape[0]
    own = indices - part * rows
    here = (own >= 0) & (own < rows)
    hidden = padding - part * rows if padding >= 0 else -1
    found = torch.ops.aten.embedding.default(weight, own.clamp(0, rows - 1), hidden if 0 <= hidden < rows else -1)
    return found * here.unsqueeze(-1)


def dropout(call: LocalCall, x: Tensor, rate: float, train: bool) -> Tensor:
    """Every process draws the numbers of the whole tensor and uses its own, so that all strategies drop the same."""
    if not train or rate in (0.0, 1.0):
        return functional.dropout(x, rate, train)
    whole = argument_at(call.node, 0).meta["val"]
    kept = torch.empty_strided(whole.shape, whole.stride(), dtype=x.dtype, device=x.device).bernoulli_(1 - rate)
    for dim, size in enumerate(x.shape):
        part, parts = call.parts(call.layout.outputs[0], dim)
        if parts > 1:
            kept = kept.narrow(dim, part * size, size)
    return x * kept.div(1 - rate)


def batch_norm(call: LocalCall, x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> Tensor:
    """The op itself, unless other processes have other parts of the batch: then with the statistics of the whole one (as SyncBatchNorm,
    which runs on CUDA only)."""
    mean, variance, train, momentum, epsilon, _ = rest
    over = [d for d, placement in enumerate(call.layout.arguments[0].placements) if placement.is_shard() and placement != Shard(1)]
    if not over or not train:
        return call.target(x, weight, bias, *rest)
    return _BatchNorm.apply(x, weight, bias, _Batch(call, over, mean, variance, momentum, epsilon))


@dataclass(frozen=True)
class _Batch:
    """A batch split over mesh dimensions, and its running statistics."""

    call: LocalCall
    over: Sequence[int]
    mean: Tensor | None
    variance: Tensor | None
    momentum: float
    epsilon: float

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the whole batch by channel. The mean first: squares of what is far from 0 would lose digits."""
        variance, mean = torch.var_mean(x, [d for d in range(x.dim()) if d != 1], correction=0)
        processes = self.call.size(self.over)
        whole = self.call.add_up(mean / processes, self.over)
        return whole, self.call.add_up((variance + (mean - whole).square()) / processes, self.over)


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, batch: _Batch) -> Tensor:
        mean, variance = batch.statistics(x)
        ctx.batch, ctx.count = batch, x.numel() // x.shape[1] * batch.call.size(batch.over)
        if batch.mean is not None and batch.variance is not None:
            batch.mean.lerp_(mean, batch.momentum)
            batch.variance.lerp_(variance * (ctx.count / max(ctx.count - 1, 1)), batch.momentum)
        ctx.save_for_backward(x, weight, mean, variance)
        return functional.batch_norm(x, mean, variance, weight, bias, False, 0.0, batch.epsilon)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """As if the statistics were given, less what they take back: the projections of that on 1 and on x."""
        x, weight, mean, variance = ctx.saved_tensors
        batch = ctx.batch
        backward = torch.ops.aten.native_batch_norm_backward.default
        dx, dw, db = backward(grad, x, weight, mean, variance, None, None, False, batch.epsilon, [True, True, True])
        inverse = torch.rsqrt(variance + batch.epsilon)
        along_x, along_1 = batch.call.add_up(torch.stack([dw, db]), batch.over) / ctx.count
        scale = inverse if weight is None else inverse * weight
        slope = scale * along_x * inverse
        shape = [-1 if d == 1 else 1 for d in range(x.dim())]
        dx.addcmul_(x, slope.view(shape), value=-1)
        dx.sub_((scale * along_1 - slope * mean).view(shape))
        return dx, dw if weight is not None else None, db if weight is not None else None, None


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
    total = losses.sum() / call.size(classes)
    return total if reduction == SUM else total / call.add_up(counted.sum(), rows)


class _SplitClasses(torch.autograd.Function):
    """Each row's loss, the same on all processes that share its classes. Their gradients come in parts of 1/n, and add up."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, call: LocalCall, classes: list[int]) -> Tensor:
        part, parts = call.parts(call.layout.arguments[0].placements, 1)
        width = logits.shape[1]
        own = labels - part * width
        here = (own >= 0) & (own < width)
        own = own.clamp(0, width - 1).unsqueeze(1)
        largest = call.add_up(logits.amax(1), classes, dist.ReduceOp.MAX)
        exponentials = (logits - largest.unsqueeze(1)).exp_()
        sums = call.add_up(torch.stack([exponentials.sum(1), (logits.gather(1, own).squeeze(1) - largest) * here]), classes)
        ctx.save_for_backward(exponentials.div_(sums[0].unsqueeze(1)), own, here)
        ctx.parts = parts
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        softmax, own, here = ctx.saved_tensors
        dx = softmax.scatter_add(1, own, -here.to(softmax.dtype).unsqueeze(1))
        return dx.mul_((grad * ctx.parts).unsqueeze(1)), None, None, None
