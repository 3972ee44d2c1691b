"""A training step run split: each process runs every call of the forward graph on its parts, and autograd does backward.

Weights are DTensors. Before a call its arguments are redistributed to the placements that the call's layout asks for; the op itself runs
on local parts. What is read as it was written goes from call to call without DTensor, which would take longer than many an op. Gradients
of what is read whole come as partial sums from the processes; those of weights are added up together at the end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.fx.node import map_arg

from runtime.sharding.forward import ForwardGraph
from runtime.sharding.layout import Argument, Layout, Placements
from runtime.sharding.local_ops import LocalCall, as_is
from runtime.sharding.mesh import groups
from runtime.sharding.op_names import in_place
from runtime.sharding.rules import arguments, rule_of

_BUCKET_BYTES = 25 << 20
"""Gradients are added up in pieces of about this size, as DistributedDataParallel does."""


@dataclass(frozen=True, slots=True)
class Part:
    """This process's part of a value, and where all parts are."""

    local: Tensor
    placements: Placements


class ShardedStep:
    """The step of a module, split as `layouts` say, by the calls' names; a call without one runs whole on every process.

    `parameters` and `buffers` are DTensors by the module's own names, each split as its first reader wants it. Every process has to have
    the same weights in `module`, whose own tensors are left alone, the same inputs, and the same state of torch's random numbers.
    """

    def __init__(self, forward: ForwardGraph, module: nn.Module, layouts: Mapping[str, Layout], mesh: DeviceMesh) -> None:
        self.forward, self.layouts, self.mesh = forward, layouts, mesh
        self._whole: Placements = (Replicate(),) * mesh.ndim
        wanted = self._first_readers()
        self.parameters = {
            name: nn.Parameter(self._part(p.detach(), wanted.get(name, self._whole)), requires_grad=p.requires_grad)
            for name, p in module.named_parameters()
        }
        self.buffers = {name: self._part(b, wanted.get(name, self._whole)) for name, b in module.named_buffers()}
        self._last_read = _last_readers(forward)

    def run(self, *inputs: Tensor) -> Tensor:
        """The loss of one step, and gradients on the parameters, placed as these are."""
        for parameter in self.parameters.values():
            parameter.grad = None
        loss = self.loss(*inputs)
        loss.backward()
        self._add_up_gradients()
        return loss.detach()

    def loss(self, *inputs: Tensor) -> Tensor:
        """The loss, the same on every process."""
        values: dict[fx.Node, Any] = dict(self._placeholders(inputs))
        moved: dict[tuple[fx.Node, Argument], Tensor] = {}
        for call in self.forward.nodes:
            values[call] = self._call(call, values, moved)
            for node in self._last_read.get(call, ()):
                del values[node]
                for key in [key for key in moved if key[0] is node]:
                    del moved[key]
        return self._read(values[self.forward.loss], Argument(self._whole, self._whole))

    def _part(self, tensor: Tensor, placements: Placements) -> DTensor:
        """This process's part, a copy, of what all processes have."""
        return distribute_tensor(tensor.detach().clone(), self.mesh, placements, src_data_rank=None)

    def _first_readers(self) -> dict[str, Placements]:
        """How each parameter and buffer is read first."""
        names = self.forward.parameters | self.forward.buffers
        wanted: dict[str, Placements] = {}
        for call in self.forward.nodes:
            layout = self.layouts.get(call.name)
            for argument, node in zip(self._arguments(call, layout), arguments(call), strict=True):
                if node.name in names:
                    wanted.setdefault(names[node.name], argument.placements)
        return wanted

    def _arguments(self, call: fx.Node, layout: Layout | None) -> tuple[Argument, ...]:
        if layout is not None:
            return layout.arguments
        return (Argument(self._whole, self._whole),) * len(arguments(call))

    def _placeholders(self, inputs: Sequence[Tensor]) -> list[tuple[fx.Node, DTensor | Part]]:
        forward = self.forward
        given = dict(zip(forward.inputs, inputs, strict=True)) | forward.constants
        found: list[tuple[fx.Node, DTensor | Part]] = []
        for node in forward.program.graph.find_nodes(op="placeholder"):
            if node.name in forward.parameters:
                found.append((node, self.parameters[forward.parameters[node.name]]))
            elif node.name in forward.buffers:
                found.append((node, self.buffers[forward.buffers[node.name]]))
            else:
                found.append((node, Part(given[node.name], self._whole)))
        return found

    def _call(self, call: fx.Node, values: dict[fx.Node, Any], moved: dict[tuple[fx.Node, Argument], Tensor]) -> Any:
        layout = self.layouts.get(call.name)
        if any(isinstance(values[node], list) for node in arguments(call)):
            return call.target(*map_arg(call.args, values.__getitem__))  # an element of several results
        wanted = iter(self._arguments(call, layout))

        def local(node: fx.Node) -> Tensor:
            key = node, next(wanted)
            if key not in moved:
                moved[key] = self._read(values[node], key[1])
            return moved[key]

        args, kwargs = map_arg((call.args, call.kwargs), local)
        result = self._placed(self._run(call, layout, args, kwargs), layout)
        if in_place(call):
            values[call.args[0]] = result
            for key in [key for key in moved if key[0] is call.args[0]]:
                del moved[key]
            if call.args[0].name in self.forward.buffers:
                self._write(call.args[0], result)
        return result

    def _read(self, value: DTensor | Part, argument: Argument) -> Tensor:
        """This process's part as an op wants it; calls that want a value alike share it, and its gradient is added up once."""
        if isinstance(value, Part):
            same = argument.placements == value.placements
            if same and (argument.gradient == value.placements or not value.local.requires_grad):
                return value.local
            value = DTensor.from_local(value.local, self.mesh, value.placements, run_check=False)
        if value.placements != argument.placements:
            value = value.redistribute(placements=argument.placements)
        return value.to_local(grad_placements=argument.gradient)

    def _write(self, buffer: fx.Node, value: Part) -> None:
        own = self.buffers[self.forward.buffers[buffer.name]]
        with torch.no_grad():
            own.to_local().copy_(self._read(value, Argument(own.placements, own.placements)))

    def _run(self, call: fx.Node, layout: Layout | None, args: Any, kwargs: Any) -> Any:
        if layout is None:
            layout = Layout((None,) * self.mesh.ndim, self._arguments(call, None), (self._whole,))
        rule = rule_of(call)
        split = any(axis is not None for axis in layout.assignment)
        return (rule.run if rule is not None and split else as_is)(LocalCall(call, layout, self.mesh), *args, **kwargs)

    def _placed(self, result: Any, layout: Layout | None) -> Any:
        if isinstance(result, Tensor):
            return Part(result, self._whole if layout is None else layout.outputs[0])
        if isinstance(result, list | tuple):
            outputs = (self._whole,) * len(result) if layout is None else layout.outputs
            return [Part(r, p) if isinstance(r, Tensor) else r for r, p in zip(result, outputs, strict=True)]
        return result

    def _add_up_gradients(self) -> None:
        """Partial sums of gradients of weights become the gradients, many at once: a message each would take longer."""
        waiting: dict[tuple[tuple[int, ...], torch.dtype], list[nn.Parameter]] = {}
        for parameter in self.parameters.values():
            gradient = parameter.grad
            if gradient is None or gradient.placements == parameter.placements:
                continue
            over = tuple(d for d, placement in enumerate(gradient.placements) if placement.is_partial())
            rest = tuple(p if d in over else g for d, (p, g) in enumerate(zip(parameter.placements, gradient.placements, strict=True)))
            if rest == parameter.placements and all(parameter.placements[d].is_replicate() for d in over):
                waiting.setdefault((over, gradient.dtype), []).append(parameter)
            else:
                parameter.grad = gradient.redistribute(placements=parameter.placements)
        for (over, _), parameters in waiting.items():
            for bucket in _buckets(parameters):
                self._add_up(bucket, over)

    def _add_up(self, parameters: Sequence[nn.Parameter], over: tuple[int, ...]) -> None:
        parts = [p.grad.to_local() for p in parameters]
        flat = torch.cat([part.reshape(-1) for part in parts])
        for group in groups(self.mesh, over):
            dist.all_reduce(flat, group=group)
        for parameter, part, total in zip(parameters, parts, flat.split([part.numel() for part in parts]), strict=True):
            parameter.grad = DTensor.from_local(total.view(part.shape), self.mesh, parameter.placements, run_check=False)


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    found: list[list[nn.Parameter]] = [[]]
    size = 0
    for parameter in parameters:
        if size > _BUCKET_BYTES:
            found.append([])
            size = 0
        found[-1].append(parameter)
        size += parameter.grad.to_local().nbytes
    return found


def _last_readers(forward: ForwardGraph) -> dict[fx.Node, list[fx.Node]]:
    """After which call each value is not needed any more."""
    last: dict[fx.Node, fx.Node] = {}
    for call in forward.nodes:
        for node in (call, *call.all_input_nodes):
            last[node] = call
    last.pop(forward.loss)
    found: dict[fx.Node, list[fx.Node]] = {}
    for node, call in last.items():
        found.setdefault(call, []).append(node)
    return found
