"""A training step run split: each process runs every call of the forward graph on its parts, and autograd does backward.

Weights are DTensors, and DTensor plans how parts move; what runs is a program of plain ops on the parts themselves. Gradients of what is
read whole come as partial sums from the processes; those of weights are added up while backward goes on.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor, fx, nn
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

    Where the mesh runs no more than some calls, in `pieces`, it holds what these read, and whoever made the step runs them, between `begin`
    and `finish`.
    """

    def __init__(
        self,
        forward: ForwardGraph,
        module: nn.Module,
        layouts: Mapping[str, Layout],
        mesh: DeviceMesh,
        pieces: Sequence[Sequence[fx.Node]] | None = None,
    ) -> None:
        self.mesh = mesh
        self.program = Program(forward, layouts, mesh, None if pieces is None else [call for piece in pieces for call in piece])
        places, summed = self.program.held, self.program.summed
        self.parameters = {
            name: nn.Parameter(self._split(p, places.get(name, self.program.whole)), requires_grad=p.requires_grad)
            for name, p in module.named_parameters()
            if pieces is None or name in places
        }
        buffers = {name: b for name, b in module.named_buffers() if pieces is None or name in places}
        self.buffers = {name: self._split(b, places.get(name, self.program.whole)) for name, b in buffers.items()}
        self.parts = {n: nn.Parameter(p.detach().to_local(), requires_grad=p.requires_grad) for n, p in self.parameters.items()}
        over = {name: dims for name, dims in reversed(summed.items()) if dims and name in self.parts and self.parts[name].requires_grad}
        self.sums = GradientSums(self.parts, over, mesh, _read_in_several(forward, pieces or ()))
        self._placeholders = self._taken(forward)

    def run(self, *inputs: Tensor) -> Tensor:
        """The loss of one step, and gradients on the parameters, placed as these are."""
        loss = self.run_parts(*inputs)
        self.place_gradients()
        return loss

    def run_parts(self, *inputs: Tensor) -> Tensor:
        """The loss of one step, and gradients on the parts alone."""
        loss = self.program.run(*self.begin(inputs).values())
        loss.backward()
        self.finish()
        return loss.detach()

    def begin(self, inputs: Sequence[Tensor]) -> dict[fx.Node, Tensor]:
        """Drops the gradients; the parts of what the placeholders of the forward graph stand for, as far as they are held here."""
        for part in self.parts.values():
            part.grad = None
        return {node: inputs[taken] if isinstance(taken, int) else taken for node, taken in self._placeholders.items()}

    def finish(self) -> None:
        """Waits until the parts have their gradients."""
        self.sums.finish()

    def place_gradients(self) -> None:
        """Gives the parameters the gradients of their parts."""
        for name, part in self.parts.items():
            parameter = self.parameters[name]
            parameter.grad = None if part.grad is None else DTensor.from_local(part.grad, self.mesh, parameter.placements, run_check=False)

    def _split(self, tensor: Tensor, placements: Placements) -> DTensor:
        """Parts, copied, of what all processes have."""
        return distribute_tensor(tensor.detach().clone(), self.mesh, placements, src_data_rank=None)

    def _taken(self, forward: ForwardGraph) -> dict[fx.Node, Tensor | int]:
        """What each placeholder is: a part, a constant, or the input of that number; without those of what is not held."""
        found: dict[fx.Node, Tensor | int] = {}
        held = self.parts | {name: buffer.to_local() for name, buffer in self.buffers.items()}
        for node in forward.program.graph.find_nodes(op="placeholder"):
            name = self.program.names.get(node.name)
            if name is not None and name in held:
                found[node] = held[name]
            elif name is None:
                found[node] = forward.constants[node.name] if node.name in forward.constants else forward.inputs.index(node.name)
        return found


def _read_in_several(forward: ForwardGraph, pieces: Sequence[Sequence[fx.Node]]) -> set[str]:
    """The parameters that several pieces read."""
    readers = Counter(name for piece in pieces for name in {n.name for call in piece for n in call.all_input_nodes})
    return {name for own, name in forward.parameters.items() if readers[own] > 1}
