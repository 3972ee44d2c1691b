"""A training step run split: each process runs every call of the forward graph on its parts, and autograd does backward.

Weights are DTensors, and DTensor plans how parts move; what runs is a program of plain ops on the parts themselves. Gradients of what is
read whole come as partial sums from the processes; those of weights are added up while backward goes on.
"""

from collections.abc import Mapping
from typing import cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from baechi_runtime.sharding.captured import ForwardGraph
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
