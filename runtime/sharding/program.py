"""What a process runs in a step: the forward graph on its parts, with the moves between calls, written out as a graph of its own.

Layouts say all that is to know of a call before the first step: which parts it reads, how these get there, and what runs on them. So a step
is a line of Python for each call and each move, and a value goes when its last reader is done.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.fx.node import map_arg

from runtime.sharding.align import origin
from runtime.sharding.forward import ForwardGraph
from runtime.sharding.layout import Argument, Layout, Placements
from runtime.sharding.local_ops import LocalCall, as_is
from runtime.sharding.moves import Collective, Move, move
from runtime.sharding.op_names import in_place, op_name
from runtime.sharding.rules import arguments, rule_of

Noting = Callable[[str, Callable[..., Any]], Callable[..., Any]]


class Program:
    """The program, of the layouts of calls by their names; a call without one runs whole on every process.

    `run` takes this process's parts of all placeholders, in their order, and gives the loss, the same on every process. `held`: how weights
    and buffers are split, by the module's names: as they are read first. `summed`: the mesh dimensions over which a weight's gradient is
    left in partial sums. `readers`: the call that reads a weight or buffer first. `moves`: those of a step.

    Where the mesh runs no more than some `calls`, there is no `run`, but pieces of these.
    """

    def __init__(
        self, forward: ForwardGraph, layouts: Mapping[str, Layout], mesh: DeviceMesh, calls: Sequence[fx.Node] | None = None
    ) -> None:
        self.forward, self.layouts, self.mesh = forward, layouts, mesh
        self.whole: Placements = (Replicate(),) * mesh.ndim
        self.names = forward.parameters | forward.buffers
        self.held: dict[str, Placements] = {}
        self.summed: dict[str, tuple[int, ...]] = {}
        self.readers: dict[str, str] = {}
        self.moves: list[PlannedMove] = []
        self._first_readers(forward.nodes if calls is None else calls)
        if calls is None:
            placeholders = forward.program.graph.find_nodes(op="placeholder")
            writer = _Writer(self, placeholders, forward.nodes)
            loss = writer.read(forward.loss, Argument(self.whole, self.whole), forward.loss.name)
            self.run: Callable[..., Tensor] = writer.function(loss)

    def piece(self, calls: Sequence[fx.Node], writes: Sequence[fx.Node], noting: Noting | None = None) -> "PieceOfProgram":
        """Some of the calls, whose parts of the values in `writes` are wanted. `noting`: what becomes of each function that is run, with
        the name of the call that it is of."""
        own = set(calls)
        reads = tuple(dict.fromkeys(node for call in calls for node in arguments(call) if node not in own))
        writer = _Writer(self, reads, calls, noting)
        return PieceOfProgram(reads, writer.function(tuple(writer.values[node] for node in writes)))

    def reader(self, node: fx.Node) -> Callable[[Tensor], Tensor]:
        """From a process's part of a value to the whole."""
        writer = _Writer(self, (node,), ())
        return writer.function(writer.read(node, Argument(self.whole, self.whole), node.name))

    def places(self, node: fx.Node) -> Placements:
        """How a value is split where it is written; what is given, where it is held."""
        if node.op == "placeholder":
            return self.held.get(self.names.get(node.name, ""), self.whole)
        call, output = origin(node)
        return self.layout(call).outputs[output]

    def layout(self, call: fx.Node) -> Layout:
        """How a call reads and writes."""
        layout = self.layouts.get(call.name)
        return whole_layout(call, self.mesh.ndim) if layout is None else layout

    def _first_readers(self, calls: Sequence[fx.Node]) -> None:
        for call in calls:
            for argument, node in zip(self.layout(call).arguments, arguments(call), strict=True):
                name = self.names.get(node.name)
                if name is not None and name not in self.held:
                    self.held[name] = argument.placements
                    self.summed[name] = _sums(argument)
                    self.readers[name] = call.name


@dataclass(frozen=True)
class PlannedMove:
    """A move of a step: the bytes of a number, whether a gradient comes back, and the call that reads what was moved first."""

    move: Move
    number_bytes: int
    gradient: bool
    reader: str

    @property
    def messages(self) -> tuple[Collective, ...]:
        """Those of a step."""
        return (*self.move.sent, *(self.move.returned if self.gradient else ()))


@dataclass(frozen=True)
class PieceOfProgram:
    """What a piece `reads` that is written elsewhere, or given; from parts of it `run` makes those of what the piece writes."""

    reads: tuple[fx.Node, ...]
    run: Callable[..., tuple[Tensor, ...]]


def whole_layout(call: fx.Node, dims: int) -> Layout:
    """The layout of a call that every process of a mesh with so many dimensions computes whole."""
    whole: Placements = (Replicate(),) * dims
    results = call.meta.get("val")
    outputs = (whole,) * (len(results) if isinstance(results, list | tuple) else 1)
    return Layout((None,) * dims, (Argument(whole, whole),) * len(arguments(call)), outputs)


def runner(call: fx.Node, layout: Layout, mesh: DeviceMesh) -> Callable[..., Any]:
    """What runs on the parts: mostly the op itself."""
    local, rule = LocalCall(call, layout, mesh), rule_of(call)
    if rule is None or rule.run is as_is or all(axis is None for axis in layout.assignment):
        return local.target
    run = rule.run

    def run_parts(*args: Any, **kwargs: Any) -> Any:
        return run(local, *args, **kwargs)

    return run_parts


def computes(call: fx.Node) -> bool:
    """Whether a call is no check of what was known when the graph was captured."""
    return not op_name(call).startswith("aten._assert")


def differentiable(forward: ForwardGraph) -> set[fx.Node]:
    """The values that get gradients, as far as they are of floating-point numbers."""
    found = {node for node in forward.program.graph.find_nodes(op="placeholder") if node.name in forward.parameters}
    for call in forward.nodes:
        if any(node in found for node in arguments(call)) and not op_name(call).startswith("aten.detach"):
            found.add(call)
    return found


class _Writer:
    """Writes calls down as a graph, which begins with parts of what they read."""

    def __init__(
        self, program: Program, given: Sequence[fx.Node], calls: Sequence[fx.Node], noting: Noting | None = None
    ) -> None:
        self.program, self.graph = program, fx.Graph()
        self._noting: Noting = noting or (lambda _, function: function)
        self.values: dict[fx.Node, Any] = {}
        self.places: dict[fx.Node, Any] = {}
        """How each value is split; a list where there are several."""
        self.moved: dict[tuple[fx.Node, Argument], fx.Node] = {}
        forward = program.forward
        self.differentiable = differentiable(forward)
        for node in given:
            self.values[node] = self.graph.placeholder(node.name)
            self.places[node] = program.places(node)
        self.own = dict(self.values)
        for call in calls:
            if computes(call):
                self._call(call)

    def function(self, result: Any) -> Callable[..., Any]:
        """What is written, as a function to this result."""
        self.graph.output(result)
        return fx.GraphModule(nn.Module(), self.graph).forward

    def _call(self, call: fx.Node) -> None:
        read = arguments(call)
        if any(isinstance(self.places[node], list) for node in read):  # an element of several results
            self.values[call] = self.graph.call_function(call.target, map_arg(call.args, self.values.__getitem__))
            self.places[call] = self.places[read[0]][call.args[1]]
            return
        wanted = iter(self.program.layout(call).arguments)
        args, kwargs = map_arg((call.args, call.kwargs), lambda node: self.read(node, next(wanted), call.name))
        run = runner(call, self.program.layout(call), self.program.mesh)
        self.values[call] = self.graph.call_function(self._noting(call.name, run), args, kwargs)
        outputs = self.program.layout(call).outputs
        self.places[call] = list(outputs) if isinstance(call.meta.get("val"), list | tuple) else outputs[0]
        if in_place(call):
            self._overwrite(call.args[0], call)

    def read(self, node: fx.Node, wanted: Argument, reader: str) -> fx.Node:
        """A value as the call of that name wants it; calls that want it alike share it, and its gradient is added up once."""
        places = self.places[node]
        summed = self.program.summed.get(self.program.names.get(node.name, ""), ())
        if wanted.placements == places and (_sums(wanted) == summed if summed else wanted.gradient == places):
            return self.values[node]
        if (node, wanted) not in self.moved:
            tensor = node.meta["val"]
            planned = move(self.program.mesh, tuple(tensor.shape), places, wanted)
            gradient = node in self.differentiable and tensor.is_floating_point()
            self.program.moves.append(PlannedMove(planned, tensor.element_size(), gradient, reader))
            if gradient:
                planned.back  # noqa: B018 - traced now, not in the first step
            function = _in_parts(planned, prod(self.program.mesh.size(d) for d in summed))
            self.moved[node, wanted] = self.graph.call_function(self._noting(reader, function), (self.values[node],))
        return self.moved[node, wanted]

    def _overwrite(self, node: fx.Node, call: fx.Node) -> None:
        """What was written in place is the value from now on, in a buffer for good."""
        self.values[node], self.places[node] = self.values[call], self.places[call]
        for key in [key for key in self.moved if key[0] is node]:
            del self.moved[key]
        if node.name in self.program.forward.buffers:
            held = self.program.held[self.program.names[node.name]]
            self.graph.call_function(_keep, (self.own[node], self.read(node, Argument(held, held), call.name)))


def _sums(argument: Argument) -> tuple[int, ...]:
    """The mesh dimensions over which the gradient comes in partial sums."""
    return tuple(d for d, placement in enumerate(argument.gradient) if placement.is_partial())


def _in_parts(planned: Move, summands: int) -> Callable[[Tensor], Tensor]:
    """The move as a function; of a weight whose other readers' gradients are left in so many summands it gives as many."""

    def move_part(part: Tensor) -> Tensor:
        return planned(part)

    def move_weight(part: Tensor) -> Tensor:
        return planned(_Summand.apply(part, summands))

    return move_part if summands == 1 else move_weight


class _Summand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, summands: int) -> Tensor:
        ctx.summands = summands
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.summands, None


@torch.no_grad()
def _keep(own: Tensor, value: Tensor) -> None:
    own.copy_(value)
