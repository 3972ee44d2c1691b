"""A captured forward graph as a shard graph: a node for each call, by its rule; edges for the tensors between them.

Nobody sends what every device can make for itself: inputs of the step are read as they are needed, and what is computed from constants
alone, or is whole numbers, is computed by every device ("prepared"). A parameter that several calls read is held by the first, and goes
from each to the next, with its gradient on the way back: nothing moves where they split it alike. Those with the same loops are a layer in
several pieces, and are split alike (ties).
"""

import contextlib
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

from baechi_ext.shard.graph import Axis, Edge, Node, ShardGraph, Tensor
from baechi_ext.shard.rules import Rules
from baechi_ext.shard.terms import Compute
from runtime.sharding.forward import ForwardGraph
from runtime.sharding.known import only_shape_is_read, rule_of
from runtime.sharding.loops import Loops, Read, UnknownFormError, Value
from runtime.sharding.op_names import name_of

PREPARED, UNKNOWN = "prepared", "unknown"
"""What the ops of nodes are called that every device computes whole: for nothing, or since nothing else is known of them."""


@dataclass(frozen=True)
class CapturedGraph:
    """The graph; `reads[node]`: for each tensor that the call reads, in the order of its arguments, the FX node it comes from and how the
    loops run over it (a node's own `inputs` are those that are no parameters, its `weights` the parameters that it reads first).

    `unknown` are the nodes whose ops are not known, by their ops' names.
    """

    graph: ShardGraph
    reads: dict[str, tuple[tuple[str, Tensor], ...]]
    unknown: dict[str, str]

    @property
    def flop(self) -> float:
        """Operations of a step on one device."""
        return sum(node_flop(node) for node in self.graph.nodes)

    @property
    def unknown_flop(self) -> float:
        """Those of ops that are not known."""
        return sum(node_flop(node) for node in self.graph.nodes if node.name in self.unknown)


def node_flop(node: Node) -> float:
    """Operations of a node on one device."""
    return sum(term.flop * prod(node.sizes[a] for a in term.axes) for term in node.terms if isinstance(term, Compute))


def shard_graph(forward: ForwardGraph) -> ShardGraph:
    """The captured graph's nodes and edges alone."""
    return captured_graph(forward).graph


def captured_graph(forward: ForwardGraph, *, batch: int | None = None, splits_images: bool = False) -> CapturedGraph:
    """The shard graph of a forward graph. The first dimension of an input that is `batch` long is called so, or the first of all.

    Raises ShardError where there is nothing to shard.
    """
    walk = _Walk(forward, Rules(splits_images=splits_images), batch)
    for node in forward.nodes:
        walk.visit(node)
    graph = ShardGraph(forward.name, tuple(walk.nodes), tuple(walk.edges), tuple(tuple(t) for t in walk.ties.values() if len(t) > 1))
    return CapturedGraph(graph, walk.reads, walk.unknown)


@dataclass
class _Walk:
    forward: ForwardGraph
    rules: Rules
    batch: int | None
    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    reads: dict[str, tuple[tuple[str, Tensor], ...]] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    """FX node -> its Value; a list of them where it writes several tensors."""
    made: dict[fx.Node, tuple[int, int]] = field(default_factory=dict)
    """FX node -> the shard node that writes it, and which of its outputs it is; a parameter: the call that read it last."""
    ties: dict[int, list[int]] = field(default_factory=dict)
    """The calls of a layer, by its first one."""
    layers: dict[int, int] = field(default_factory=dict)
    """A call's first one."""
    prepared: dict[fx.Node, bool] = field(default_factory=dict)
    """What every device has, or makes for itself; whether it depends on the step's inputs."""

    def __post_init__(self) -> None:
        calls = self.forward.nodes
        uses = Counter(read for node in calls for read in node.all_input_nodes)
        for node in self.forward.program.graph.nodes:
            value = node.meta.get("val")
            if node.op == "placeholder" and isinstance(value, torch.Tensor):
                weight = node.name in self.forward.parameters
                shape = tuple(value.shape)
                names = _weight_names(shape) if weight else self._names(value)
                self.values[node] = Value(node, shape, names, weight, weight and value.requires_grad, max(uses[node], 1))
                if not weight:
                    self.prepared[node] = node.name in self.forward.inputs

    def _names(self, tensor: torch.Tensor) -> tuple[str, ...]:
        """Of an input's dimensions."""
        shape, flat = tuple(tensor.shape), "features" if tensor.is_floating_point() else "sequence"
        place = shape.index(self.batch) if self.batch in shape else 0
        rest = ("channels", "height", "width") if len(shape) == 4 else (flat,) if len(shape) == 2 else ("sequence", "features")
        names = iter(rest if len(shape) - 1 == len(rest) else [f"dim{i}" for i in range(1, len(shape))])
        return tuple("batch" if i == place else next(names) for i in range(len(shape)))

    def visit(self, node: fx.Node) -> None:
        """Adds what the call is."""
        if node.target is operator.getitem:
            source, place = node.args
            self.values[node] = replace(self.values[source][place], source=node)
            self.made[node] = (self.made[source][0], place)
            if source in self.prepared:
                self.prepared[node] = self.prepared[source]
            return
        written = _tensors(node.meta.get("val"))
        if not written:
            return
        operands = [self.values[read] for read in node.all_input_nodes if read in self.values and not only_shape_is_read(node)]
        gradient = name_of(node) != "detach" and any(o.gradient for o in operands)
        loops = Loops(self._arguments(node), [tuple(t.shape) for t in written], self.rules, gradient=gradient)
        if not gradient and all(o.source in self.prepared for o in operands):
            from_input = any(self.prepared[o.source] for o in operands)
            if not from_input or not any(t.is_floating_point() for t in written):
                self.prepared[node] = from_input
        if node in self.prepared:
            _whole(loops, PREPARED, operands, sum(prod(shape) for shape in loops.shapes))
        elif not _described(node, loops, operands):
            self.unknown[node.name] = name_of(node)
            loops = Loops(loops.arguments, loops.shapes, self.rules, gradient=gradient)
            _whole(loops, UNKNOWN, operands, _flop_of(node, loops.shapes, gradient=gradient))
        self._add(node, loops, [gradient and t.is_floating_point() for t in written])

    def _add(self, node: fx.Node, loops: Loops, gradients: Sequence[bool]) -> None:
        """The node, its edges, and what it writes."""
        index = len(self.nodes)
        before = [self.made[r.value.source][0] for r in loops.reads if r.value.weight and r.value.source in self.made]
        alike = [self.layers[v] for v in before if _form(self.nodes[v].op, self.nodes[v].axes) == _form(loops.op, loops.axes)]
        self.layers[index] = alike[0] if alike else index
        self.ties.setdefault(self.layers[index], []).append(index)
        inputs: list[Tensor] = []
        weights: list[Tensor] = []
        outputs = [w.tensor for w in loops.writes]
        for read in _once(loops.reads):
            source = read.value.source
            if read.value.weight and source not in self.made:
                weights.append(read.tensor)
            else:
                if source in self.made and source not in self.prepared:
                    self.edges.append(Edge(self.made[source][0], index, self.made[source][1], len(inputs)))
                inputs.append(read.tensor)
            if read.value.weight and read.value.uses > 1:
                self.made[source] = (index, len(outputs))
                outputs.append(read.tensor)
        self.reads[node.name] = tuple((r.value.source.name, r.tensor) for r in loops.reads)
        self.nodes.append(Node(node.name, loops.op, tuple(loops.axes), tuple(inputs), tuple(outputs), tuple(loops.terms), tuple(weights)))
        values = [Value(node, s, w.names, gradient=g) for w, s, g in zip(loops.writes, loops.shapes, gradients, strict=True)]
        self.values[node] = values[0] if isinstance(node.meta["val"], torch.Tensor) else values
        self.made[node] = (index, 0)

    def _arguments(self, node: fx.Node) -> dict[str, Any]:
        """The call's arguments by their names in the schema, tensors as values, defaults included."""
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            return {}
        names = [argument.name for argument in schema.arguments]
        given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        defaults = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
        arguments = {name: self._argument(value) for name, value in (defaults | given).items()}
        return arguments | ({"transposed": True} if name_of(node).startswith("conv_transpose") else {})

    def _argument(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self.values.get(value)
        return [self._argument(v) for v in value] if isinstance(value, list | tuple) else value


def _form(op: str, axes: Sequence[Axis]) -> tuple[str, list[tuple[int, bool]]]:
    """What calls of one layer have in common."""
    return op, [(axis.size, axis.splits) for axis in axes]


def _described(node: fx.Node, loops: Loops, operands: Sequence[Value]) -> bool:
    """Whether the op's rule says all about the call: what each operand is to it, but of view_as and the like."""
    rule = rule_of(node)
    if rule is None:
        return False
    try:
        rule(loops)
    except UnknownFormError:
        return False
    read = {r.value.source for r in loops.reads}
    by_shape = name_of(node).endswith("_as")
    return len(loops.writes) == len(loops.shapes) and (by_shape or all(o.source in read for o in operands))


def _whole(loops: Loops, op: str, operands: Sequence[Value], flop: float) -> None:
    """A call that every device makes on whole tensors."""
    loops.op = op
    loops.compute(flop, [])
    for value in operands:
        loops.read(value, [None] * len(value.shape))
    for shape in loops.shapes:
        names = next((o.names for o in operands if len(o.shape) == len(shape)), None)
        loops.write([None] * len(shape), names)


def _flop_of(node: fx.Node, shapes: Sequence[tuple[int, ...]], *, gradient: bool) -> float:
    """What torch counts for the call, with twice as much backward, and an operation for each number that is written."""
    counted = 0
    fakes = _tensors(node.meta.get("val"))
    mode = getattr(fakes[0], "fake_mode", None)
    arguments = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    if mode is not None:
        with contextlib.suppress(Exception), mode, FlopCounterMode(display=False) as counter:
            node.target(*arguments[0], **arguments[1])
            counted = counter.get_total_flops()
    return (3.0 if gradient else 1.0) * (counted + sum(map(prod, shapes)))


def _tensors(value: Any) -> list[torch.Tensor]:
    found = list(value) if isinstance(value, list | tuple) else [value]
    return [t for t in found if isinstance(t, torch.Tensor)]


def _once(reads: Sequence[Read]) -> list[Read]:
    """The reads, a parameter's only once."""
    first = {r.value.source: r for r in reversed(reads) if r.value.weight}
    return [r for r in reads if not r.value.weight or first[r.value.source] is r]


def _weight_names(shape: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(["units", "in_units"][: len(shape)] if len(shape) <= 2 else [f"dim{i}" for i in range(len(shape))])
