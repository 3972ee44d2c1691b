"""A training step run split: each process runs every call of the forward graph on its parts, and autograd does backward.

Weights are DTensors, and DTensor plans how parts move; what runs is a program of plain ops on the parts themselves. Gradients of what is
read whole come as partial sums from the processes; those of weights are added up while backward goes on. Parity compares it with the step
that is not split, in double precision, where what is left is a mistake or 1e-10.
"""

import copy
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from baechi_runtime.measure.comparator import compare
from baechi_runtime.measure.parity_result import Parity
from baechi_runtime.models.training_step import TrainingStep
from baechi_runtime.sharding.captured import ForwardGraph, forward_graph
from baechi_runtime.sharding.gradients import GradientSums
from baechi_runtime.sharding.layout import Layout
from baechi_runtime.sharding.program import Program


class ShardedStep:
    """The step of a module, split as `layouts` say, by the calls' names; a call without one runs whole on every process.

    `parameters` and `buffers` are DTensors by the module's own names, each split as its first reader wants it; `parts` are this process's
    parts of the parameters, in the same memory: an optimizer that treats each number by itself can as well run on these. Every process has
    to have the same weights in `module`, whose own tensors are left alone, the same inputs, and the same state of torch's random numbers.
    """

    def __init__(self, forward: ForwardGraph, module: nn.Module, layouts: Mapping[str, Layout], mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.program = Program(forward, layouts, mesh)
        self.parameters = {
            name: nn.Parameter(self._split(name, p), requires_grad=p.requires_grad)
            for name, p in module.named_parameters()
        }
        self.buffers = {name: self._split(name, b) for name, b in module.named_buffers()}
        local = {name: cast(DTensor, p.detach()).to_local() for name, p in self.parameters.items()}
        self.parts = {n: nn.Parameter(local[n], requires_grad=p.requires_grad) for n, p in self.parameters.items()}
        trained = {name for name, part in self.parts.items() if part.requires_grad}
        over = {name: dims for name, dims in reversed(self.program.summed.items()) if dims and name in trained}
        self._sums = GradientSums(self.parts, over, mesh)
        self._placeholders = self._taken(forward)

    def run(self, *inputs: Tensor) -> Tensor:
        """Run one step; returns the loss, and leaves gradients on the parameters, placed as these are."""
        loss = self.run_parts(*inputs)
        for name, part in self.parts.items():
            parameter = self.parameters[name]
            places = cast(DTensor, parameter).placements
            parameter.grad = None if part.grad is None else DTensor.from_local(part.grad, self.mesh, places, run_check=False)
        return loss

    def run_parts(self, *inputs: Tensor) -> Tensor:
        """Run one step; returns the loss, and leaves gradients on the parts alone."""
        for part in self.parts.values():
            part.grad = None
        loss = self.program.run(*(inputs[taken] if isinstance(taken, int) else taken for taken in self._placeholders))
        loss.backward()
        self._sums.finish()
        return loss.detach()

    def _split(self, name: str, tensor: Tensor) -> DTensor:
        """Split a tensor that all processes have into parts, which are copies."""
        return distribute_tensor(tensor.detach().clone(), self.mesh, self.program.placements(name), src_data_rank=None)

    def _taken(self, forward: ForwardGraph) -> list[Tensor | int]:
        """Each placeholder's part, constant, or number of its input."""
        held = self.parts | {name: buffer.to_local() for name, buffer in self.buffers.items()}
        known: dict[str, Tensor | int] = {own: number for number, own in enumerate(forward.inputs)}
        known |= forward.constants | {own: held[name] for own, name in self.program.names.items()}
        return [known[node.name] for node in forward.program.graph.find_nodes(op="placeholder")]


TOLERANCE = 1e-8
"""Largest difference of the loss, a gradient or a buffer, over the largest number in it."""
SHARE = 1e-6
"""The part of the largest gradient that all are compared with at least: some are 0 but for rounding (of a key's bias, which softmax does
not see), and doubles are rounded less."""


def check_parity(step: TrainingStep, layouts: Mapping[str, Layout], mesh: DeviceMesh) -> Parity:
    """Runs a copy of the step whole and split, from the same weights and random numbers, and compares loss, gradients and buffers.

    Every process has to call it; each gets the same answer.
    """
    module = copy.deepcopy(step.module).double()
    inputs = [value.double() if value.is_floating_point() else value for value in step.inputs]
    split = ShardedStep(forward_graph(module, inputs, step.name), module, layouts, mesh)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(step.seed)
        loss = split.run(*inputs)
        actual = _named(loss, {n: p.grad for n, p in split.parameters.items()}, split.buffers)
        torch.manual_seed(step.seed)
        loss = module(*inputs)
        loss.backward()
    expected = _named(loss, {n: p.grad for n, p in module.named_parameters()}, dict(module.named_buffers()))
    return compare(expected, actual, TOLERANCE, share=SHARE)


def _named(loss: Tensor, gradients: Mapping[str, Tensor | None], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    named = {"loss": loss} | {f"gradient of {n}": g for n, g in gradients.items() if g is not None}
    named |= {f"new value of {n}": b for n, b in buffers.items()}
    return {n: (v.full_tensor() if isinstance(v, DTensor) else v).detach() for n, v in named.items()}
