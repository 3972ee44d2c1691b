"""How parts of a value get where an op wants them: DTensor says once with which ops, a step runs these ops on plain tensors.

DTensor's redistribution is traced, forward and backward, with tensors without values. What comes out are the chunks, copies and functional
collectives that it would run for parts of that shape; they are run without it, which would take longer than many an op.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from baechi_ext.capture.torch_private import collective_of, traced, valueless
from runtime.sharding.layout import Argument, Placements


@dataclass(frozen=True, slots=True)
class Collective:
    """A message among so many processes. `words`: the numbers that one puts in or gets out, the larger of both."""

    kind: str
    words: int
    processes: int


@dataclass(frozen=True, eq=False)
class Move:
    """From parts as they were written to parts as an op wants them, and the gradients' way back. Ops on plain local tensors."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor], Tensor]
    sent: tuple[Collective, ...]
    returned: tuple[Collective, ...]

    def __call__(self, part: Tensor) -> Tensor:
        return _Moved.apply(part, self) if part.requires_grad else self.forward(part.contiguous())


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, move: Move) -> Tensor:
        ctx.move = move
        return move.forward(part.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.move.backward(grad.contiguous()), None


def part_shape(shape: tuple[int, ...], placements: Placements, mesh: DeviceMesh) -> tuple[int, ...]:
    """The shape of a process's part of a tensor; parts are equal."""
    sizes = list(shape)
    for d, placement in enumerate(placements):
        if placement.is_shard():
            sizes[placement.dim] //= mesh.size(d)
    return tuple(sizes)


@lru_cache(maxsize=4096)
def move(mesh: DeviceMesh, shape: tuple[int, ...], written: Placements, wanted: Argument) -> Move:
    """The move of a tensor of that shape, from the placements it was written with to an op's argument."""
    part = part_shape(shape, written, mesh)

    def read(local: Tensor) -> Tensor:
        value = DTensor.from_local(local, mesh, written, run_check=False)
        if written != wanted.placements:
            value = value.redistribute(placements=wanted.placements)
        return value.to_local(grad_placements=wanted.gradient)

    with valueless():
        source = torch.empty(part, requires_grad=True)
        result = read(source)
        there = traced(read, source.detach())
        back = traced(lambda g: torch.autograd.grad(result, source, g, retain_graph=True)[0], torch.empty_like(result))
    return Move(there.forward, back.forward, _collectives(there), _collectives(back))


def _collectives(graph: fx.GraphModule) -> tuple[Collective, ...]:
    found = []
    for node in graph.graph.nodes:
        started = collective_of(node)
        if started is not None:
            kind, processes = started
            words = max(prod(value.meta["val"].shape) for value in (node, *node.all_input_nodes))
            found.append(Collective(kind, words, processes))
    return tuple(found)
