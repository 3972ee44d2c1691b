"""The program of a process in a step: the forward graph on its parts, with the moves between calls, written out as a graph of its own.

Layouts say all there is to know of a call before the first step: which parts it reads, how these get there, and what runs on them. So a
step is a line of Python for each call and each move, and a value goes when its last reader is done.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.fx.node import map_arg

from baechi_runtime.sharding.captured import ForwardGraph
from baechi_runtime.sharding.layout import Argument, Layout, Placements
from baechi_runtime.sharding.local_ops import LocalCall
from baechi_runtime.sharding.moves import Collective, Move, move
from baechi_runtime.sharding.op_names import argument_at, in_place, op_name, op_of
from baechi_runtime.sharding.rules import arguments, run_by_rule


class Program:
    """The program, of the layouts of calls by their names; a call without one runs whole on every process.

    `run` takes this process's parts of all placeholders, in their order, and gives the loss, the same on every process. `held`: how weights
    and buffers are split, by the module's names: as they are read first. `summed`: the mesh dimensions over which a weight's gradient is
    left in partial sums. `readers`: the call that reads a weight or buffer first. `moves`: those of a step.
    """

    def __init__(self, forward: ForwardGraph, layouts: Mapping[str, Layout], mesh: DeviceMesh) -> None:
        self.forward, self.layouts, self.mesh = forward, layouts, mesh
        self.whole: Placements = (Replicate(),) * mesh.ndim
        self.names = forward.parameters | forward.buffers
        self.held: dict[str, Placements] = {}
        self.summed: dict[str, tuple[int, ...]] = {}
        self.readers: dict[str, str] = {}
        self.moves: list[PlannedMove] = []
        for call in forward.nodes:
            for argument, node in zip(self.layout(call).arguments, arguments(call), strict=True):
                name = self.names.get(node.name)
                if name is not None and name not in self.held:
                    self.held[name] = argument.placements
                    self.summed[name] = _sums(argument)
                    self.readers[name] = call.name
        self._differentiable = differentiable(forward)
        self._graph = fx.Graph()
        placeholders = forward.program.graph.find_nodes(op="placeholder")
        self._own = {node: self._graph.placeholder(node.name) for node in placeholders}
        self._values: dict[fx.Node, Any] = dict(self._own)
        self._places: dict[fx.Node, Any] = {node: self.placements(self.names.get(node.name, "")) for node in placeholders}
        """Placements of each value; a list of them where a call has several results."""
        self._moved: dict[tuple[fx.Node, Argument], fx.Node] = {}
        for call in filter(computes, forward.nodes):
            self._write(call)
        graph = self._graph
        graph.output(self._read(forward.loss, Argument(self.whole, self.whole), forward.loss.name))
        self.run: Callable[..., Tensor] = fx.GraphModule(nn.Module(), graph).forward

    def placements(self, name: str) -> Placements:
        """Placements of a weight or buffer; what has no name among these is whole."""
        return self.held.get(name, self.whole)

    def layout(self, call: fx.Node) -> Layout:
        """The layout of a call: how it reads and writes."""
        if call.name in self.layouts:
            return self.layouts[call.name]
        results = call.meta.get("val")
        outputs = (self.whole,) * (len(results) if isinstance(results, list | tuple) else 1)
        return Layout((None,) * self.mesh.ndim, (Argument(self.whole, self.whole),) * len(arguments(call)), outputs)

    def _write(self, call: fx.Node) -> None:
        read = arguments(call)
        if any(isinstance(self._places[node], list) for node in read):  # an element of several results
            self._values[call] = self._graph.call_function(op_of(call), map_arg(call.args, self._values.__getitem__))
            self._places[call] = self._places[read[0]][argument_at(call, 1)]
            return
        layout = self.layout(call)
        wanted = iter(layout.arguments)
        args, kwargs = map_arg((call.args, call.kwargs), lambda node: self._read(node, next(wanted), call.name))
        self._values[call] = self._graph.call_function(runner(call, layout, self.mesh), args, kwargs)
        self._places[call] = list(layout.outputs) if isinstance(call.meta.get("val"), list | tuple) else layout.outputs[0]
        if in_place(op_of(call)):
            self._overwrite(argument_at(call, 0), call)

    def _read(self, node: fx.Node, wanted: Argument, reader: str) -> fx.Node:
        """A value as the call of that name wants it; calls that want it alike share it, and its gradient is added up once."""
        places = self._places[node]
        summed = self.summed.get(self.names.get(node.name, ""), ())
        if wanted.placements == places and (_sums(wanted) == summed if summed else wanted.gradient == places):
            return self._values[node]
        if (node, wanted) not in self._moved:
            tensor = node.meta["val"]
            summands = prod(self.mesh.size(d) for d in summed)
            planned = move(self.mesh, tuple(tensor.shape), places, wanted, summands)
            gradient = node in self._differentiable and tensor.is_floating_point()
            self.moves.append(PlannedMove(planned, tensor.element_size(), gradient, reader))
            if gradient:
                planned.back  # noqa: B018 - traced now, not in the first step
            self._moved[node, wanted] = self._graph.call_function(_as_function(planned), (self._values[node],))
        return self._moved[node, wanted]

    def _overwrite(self, node: fx.Node, call: fx.Node) -> None:
        """Take what was written in place as the value from now on; a buffer keeps it for good."""
        self._values[node], self._places[node] = self._values[call], self._places[call]
        for key in [key for key in self._moved if key[0] is node]:
            del self._moved[key]
        if node.name in self.forward.buffers:
            held = self.held[self.names[node.name]]
            self._graph.call_function(_keep, (self._own[node], self._read(node, Argument(held, held), call.name)))


@dataclass(frozen=True)
class PlannedMove:
    """A move of a step: the bytes of a number, whether a gradient comes back, and the call that reads what was moved first."""

    move: Move
    number_bytes: int
    gradient: bool
    reader: str

    @property
    def messages(self) -> tuple[Collective, ...]:
        """The messages of a step."""
        return (*self.move.sent, *(self.move.returned if self.gradient else ()))


def runner(call: fx.Node, layout: Layout, mesh: DeviceMesh) -> Callable[..., Any]:
    """The function that runs on the parts: mostly the op itself."""
    local, run = LocalCall(call, layout, mesh), run_by_rule(call)
    if run is None or all(axis is None for axis in layout.assignment):
        return local.target

    def run_parts(*args: Any, **kwargs: Any) -> Any:
        return run(local, *args, **kwargs)

    return run_parts


def computes(call: fx.Node) -> bool:
    """False if a call only checks what was known when the graph was captured."""
    return not op_name(call).startswith("aten._assert")


def differentiable(forward: ForwardGraph) -> set[fx.Node]:
    """The values that get gradients, as far as they are of floating-point numbers."""
    found = {node for node in forward.program.graph.find_nodes(op="placeholder") if node.name in forward.parameters}
    for call in forward.nodes:
        if any(node in found for node in arguments(call)) and not op_name(call).startswith("aten.detach"):
            found.add(call)
    return found


def _sums(argument: Argument) -> tuple[int, ...]:
    """The mesh dimensions over which the gradient comes in partial sums."""
    return tuple(d for d, placement in enumerate(argument.gradient) if placement.is_partial())


def _as_function(planned: Move) -> Callable[[Tensor], Tensor]:
    """The move with a name, as a graph wants to have what it calls."""

    def move_part(part: Tensor) -> Tensor:
        return planned(part)

    return move_part


@torch.no_grad()
def _keep(own: Tensor, value: Tensor) -> None:
    own.copy_(value)
