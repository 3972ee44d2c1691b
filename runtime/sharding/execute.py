"""A training step run split: each process runs every call of the forward graph on its parts, and autograd does backward.

Weights are DTensors, and DTensor plans how parts move; what runs is a program of plain ops on the parts themselves. Gradients of what is
read whole come as partial sums from the processes; those of weights are added up while backward goes on.
"""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from runtime.sharding.forward import ForwardGraph
from runtime.sharding.gradients import GradientSums
from runtime.sharding.layout import Layout, Placements
from runtime.sharding.program import Program


class ShardedStep:
    """The step of a module, split as `layouts` say, by the calls' names; a call without one runs whole on every process.

    `parameters` and `buffers` are DTensors by the module's own names, each split as its first reader wants it; `parts` are this process's
    parts of the parameters, in the same memory: an optimizer that treats each number by itself can as well run on these. Every process has
    to have the same weights in `module`, whose own tensors are left alone, the same inputs, and the same state of torch's random numbers.
    """

    def __init__(self, forward: ForwardGraph, module: nn.Module, layouts: Mapping[str, Layout], mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.program = Program(forward, layouts, mesh)
        places, summed = self.program.held, self.program.summed
        self.parameters = {
            name: nn.Parameter(self._split(p, places.get(name, self.program.whole)), requires_grad=p.requires_grad)
            for name, p in module.named_parameters()
        }
        self.buffers = {name: self._split(b, places.get(name, self.program.whole)) for name, b in module.named_buffers()}
        self.parts = {n: nn.Parameter(p.detach().to_local(), requires_grad=p.requires_grad) for n, p in self.parameters.items()}
        over = {name: dims for name, dims in reversed(summed.items()) if dims and name in self.parts and self.parts[name].requires_grad}
        self.sums = GradientSums(self.parts, over, mesh)
        self._placeholders = self._taken(forward)

    def run(self, *inputs: Tensor) -> Tensor:
        """The loss of one step, and gradients on the parameters, placed as these are."""
        loss = self.run_parts(*inputs)
        for name, part in self.parts.items():
            parameter = self.parameters[name]
            parameter.grad = None if part.grad is None else DTensor.from_local(part.grad, self.mesh, parameter.placements, run_check=False)
        return loss

    def run_parts(self, *inputs: Tensor) -> Tensor:
        """The loss of one step, and gradients on the parts alone."""
        for part in self.parts.values():
            part.grad = None
        loss = self.program.run(*(inputs[taken] if isinstance(taken, int) else taken for taken in self._placeholders))
        loss.backward()
        self.sums.finish()
        return loss.detach()

    def _split(self, tensor: Tensor, placements: Placements) -> DTensor:
        """Parts, copied, of what all processes have."""
        return distribute_tensor(tensor.detach().clone(), self.mesh, placements, src_data_rank=None)

    def _taken(self, forward: ForwardGraph) -> list[Tensor | int]:
        """What each placeholder is: a part, a constant, or the input of that number."""
        found: list[Tensor | int] = []
        for node in forward.program.graph.find_nodes(op="placeholder"):
            if node.name in forward.parameters:
                found.append(self.parts[forward.parameters[node.name]])
            elif node.name in forward.buffers:
                found.append(self.buffers[forward.buffers[node.name]].to_local())
            elif node.name in forward.constants:
                found.append(forward.constants[node.name])
            else:
                found.append(forward.inputs.index(node.name))
        return found
