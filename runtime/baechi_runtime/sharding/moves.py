"""Moving parts of a value to where an op wants them: DTensor says once with which ops, a step runs these ops on plain tensors.

DTensor's redistribution is traced, forward and backward, with tensors without values. What comes out are the chunks, copies and functional
collectives that it would run for parts of that shape; they are run without it, which would take longer than many an op.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from baechi_ext.capture.torch_private import collective_of, traced, valueless
from baechi_runtime.sharding.layout import Argument, Placements


@dataclass(frozen=True, slots=True)
class Collective:
    """A message among this many processes. `words`: the numbers that one puts in or gets out, the larger of both."""

    kind: str
    words: int
    processes: int


@dataclass(frozen=True, eq=False)
class Move:
    """From parts as they were written to parts as an op wants them, and the gradients' way back: ops on plain local tensors.

    They are traced when they are first asked for, since not all values have gradients. `summands`: a weight's gradient
    is left in so many partial sums, so what comes back is divided by that.
    """

    mesh: DeviceMesh
    part: tuple[int, ...]
    written: Placements
    wanted: Argument
    summands: int = 1

    def __call__(self, part: Tensor) -> Tensor:
        if part.requires_grad:
            return _Moved.apply(part, self, self.back.forward)
        return part if self.stays else self.there.forward(part.contiguous())

    @property
    def stays(self) -> bool:
        """True if only gradients move."""
        return self.written == self.wanted.placements

    @cached_property
    def there(self) -> fx.GraphModule:
        """The ops that move a part."""
        with valueless():
            return traced(self._read, torch.empty(self.part))

    @cached_property
    def back(self) -> fx.GraphModule:
        """The ops that move its gradient."""
        with valueless():
            source = torch.empty(self.part, requires_grad=True)
            result = self._read(source)
            return traced(lambda g: torch.autograd.grad(result, source, g, retain_graph=True)[0], torch.empty_like(result))

    @cached_property
    def sent(self) -> tuple[Collective, ...]:
        """The messages that move a part."""
        return () if self.stays else _collectives(self.there)

    @cached_property
    def returned(self) -> tuple[Collective, ...]:
        """The messages that move its gradient."""
        return _collectives(self.back)

    def _read(self, local: Tensor) -> Tensor:
        """Read a part as DTensor does it."""
        value = DTensor.from_local(local, self.mesh, self.written, run_check=False)
        if self.written != self.wanted.placements:
            value = value.redistribute(placements=self.wanted.placements)
        return value.to_local(grad_placements=self.wanted.gradient)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, move: Move, back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back, ctx.summands = back, move.summands
        return part.view_as(part) if move.stays else move.there.forward(part.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        returned = ctx.back(grad.contiguous())
        return returned if ctx.summands == 1 else returned / ctx.summands, None, None


def part_shape(shape: tuple[int, ...], placements: Placements, mesh: DeviceMesh) -> tuple[int, ...]:
    """The shape of a process's part of a tensor; parts are equal."""
    sizes = list(shape)
    for d, placement in enumerate(placements):
        if placement.is_shard():
            sizes[cast(Shard, placement).dim] //= mesh.size(d)
    return tuple(sizes)


@lru_cache(maxsize=4096)
def move(mesh: DeviceMesh, shape: tuple[int, ...], written: Placements, wanted: Argument, summands: int = 1) -> Move:
    """The move of a tensor of that shape, from the placements it was written with to an op's argument."""
    return Move(mesh, part_shape(shape, written, mesh), written, wanted, summands)


def _collectives(graph: fx.GraphModule) -> tuple[Collective, ...]:
    found = []
    for node in graph.graph.nodes:
        started = collective_of(node)
        if started is not None:
            kind, processes = started
            words = max(prod(value.meta["val"].shape) for value in (node, *node.all_input_nodes))
            found.append(Collective(kind, words, processes))
    return tuple(found)
