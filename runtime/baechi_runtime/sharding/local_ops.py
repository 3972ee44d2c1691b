"""Ops on a process's own parts of their tensors, where that takes more than calling them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard
from torch.nn import functional

from baechi_runtime.sharding.layout import Layout, Placements
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
        return plain(self.node)

    @cached_property
    def shape(self) -> list[int]:
        """The shape of this process's part of the result."""
        whole = self.node.meta["val"].shape
        return [size // self.parts(self.layout.outputs[0], dim)[1] for dim, size in enumerate(whole)]

    @cached_property
    def summands(self) -> int:
        """Number of processes whose results add up to the result."""
        return prod(self.mesh.size(d) for d in self.summed)

    @cached_property
    def summed(self) -> list[int]:
        """The mesh dimensions along which these processes are."""
        return [d for d, placement in enumerate(self.layout.outputs[0]) if placement.is_partial()]

    def splitting(self, placements: Placements, dim: int) -> list[int]:
        """The mesh dimensions that split a tensor's dimension."""
        return [d for d, placement in enumerate(placements) if placement == Shard(dim)]

    def parts(self, placements: Sequence[Placement], dim: int) -> tuple[int, int]:
        """(which part of a tensor's dimension this process has, of how many)."""
        index, count = 0, 1
        for d in self.splitting(tuple(placements), dim):
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
    """The processes' means have equally many terms."""
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
