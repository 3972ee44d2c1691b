"""Removes from the graph of a traced TensorFlow step all that is there twice, or for the sake of tracing alone. No value changes.

A function's exit waits for all that changes state; run in a session these ops are targets beside the fetched outputs instead. An op
that hands its input on is left out, and what is known beforehand (shapes, sums of constants) is a constant. Reads of a variable between
which nobody writes it are one read, and so are small equal values of equal inputs, such as the step size that an optimizer works out
for each variable anew. A small constant stands beside each op that reads it, so that none of them is ever sent.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from baechi_ext.capture.tensorflow_private import tensorflow

if TYPE_CHECKING:
    import tensorflow as tf

    NodeDef: TypeAlias = tf.compat.v1.NodeDef

_PASSING_ON = {"Identity", "IdentityN", "StopGradient", "PreventGradient", "Snapshot"}
_COPIED_BYTES = 65536
"""Constants up to this size stand beside each of their readers."""
_KNOWN_BYTES = 1024
"""Larger values are neither worked out beforehand nor shared by ops that make the same: that may be on purpose, to save memory."""
_OF_SHAPES: dict[str, Callable[[Any], Any]] = {
    "Shape": lambda shape: shape.as_list(),
    "ShapeN": lambda shape: shape.as_list(),
    "Size": lambda shape: shape.num_elements(),
    "Rank": lambda shape: shape.rank,
}
_FOR_TRACING = ("_class", "_output_shapes", "_gradient_op_type")
"""Attributes that nothing looks at when a graph runs; a class may name a node that is no more."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of a graph by name, each after those that it reads from or waits for."""

    by_name: "dict[str, NodeDef]"
    outputs: tuple[str, ...]
    """Tensors, "node:0"."""
    targets: tuple[str, ...]
    """Nodes that have to run besides."""
    kept: tuple[str, ...]
    """Placeholders that stay though nobody reads them."""


def producer(reference: str) -> str:
    """The node that an entry of a node's inputs names: "a", "a:1" and "^a" are of node a."""
    return reference.removeprefix("^").partition(":")[0]


def tensor_name(reference: str) -> str:
    """A data input with its output's number: "a" is "a:0"."""
    return reference if ":" in reference else f"{reference}:0"


def is_wait(reference: str) -> bool:
    """True if an entry of a node's inputs is no tensor but a node to wait for."""
    return reference.startswith("^")


def clean(nodes: Nodes, graph: "tf.Graph") -> Nodes:
    """The nodes without what only tracing needs, and without those that no output and no target needs. `graph` has ops of the same
    names, and knows their shapes."""
    nodes = _Redirected(_in_order(_needed(_without_exit(nodes))), graph).nodes()
    return _with_constants_beside_readers(_in_order(_needed(_without_idle_waits(nodes, graph))))


def _without_exit(nodes: Nodes) -> Nodes:
    """Outputs are taken from before the identities of a function's exit, which wait for all its targets."""

    def before(output: str) -> str:
        while (node := nodes.by_name[producer(output)]).op == "Identity":
            output = tensor_name(node.input[0])
        return output

    return replace(nodes, outputs=tuple(map(before, nodes.outputs)))


def _needed(nodes: Nodes) -> Nodes:
    found: set[str] = set()
    todo = [*map(producer, nodes.outputs), *nodes.targets, *nodes.kept]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += map(producer, nodes.by_name[name].input)
    return replace(nodes, by_name={name: node for name, node in nodes.by_name.items() if name in found})


def _in_order(nodes: Nodes) -> Nodes:
    """Keeps the order given, but puts each node behind what it reads from or waits for."""
    ordered: dict[str, NodeDef] = {}
    for name in nodes.by_name:
        todo = [name]
        while todo:
            top = todo[-1]
            missing = [p for p in map(producer, nodes.by_name[top].input) if p not in ordered]
            if missing:
                todo += missing
            else:
                ordered[todo.pop()] = nodes.by_name[top]
    return replace(nodes, by_name=ordered)


class _Redirected:
    """The nodes without those for which another tensor stands: what is handed on, is known beforehand, or was made before.

    That is, for a read of a variable, by one that sees the same value, else by a node with equal inputs, if it is small. Writes wait for
    the reads before them and are waited for by those behind them, so what a read waits for says what it sees. A node that shares an input
    with another depends on nothing new when that one's result is sent to it.
    """

    def __init__(self, nodes: Nodes, graph: "tf.Graph") -> None:
        """`nodes` are in order."""
        self.given = nodes
        self.graph = graph
        self.fetched = set(map(producer, nodes.outputs))
        self.kept: dict[str, NodeDef] = {}
        self.instead: dict[str, str] = {}
        """Tensor -> the one that stands for it."""
        self.gone: dict[str, str] = {}
        """Node -> the one to wait for instead."""
        self.waits: dict[str, list[str]] = {}
        """Node that is gone -> what it waited for, as now all do that read from it or wait for it."""
        self.first: dict[tuple[object, ...], str] = {}

    def nodes(self) -> Nodes:
        for name, node in self.given.by_name.items():
            inputs = _without_repeated_waits(chain.from_iterable(map(self._read, node.input)))
            if found := self._found(node, inputs):
                self.instead |= found
                self.gone[name] = producer(next(iter(found.values())))
                if _is_handle(node):
                    self.waits[name] = list(filter(is_wait, inputs))
            else:
                self.kept[name] = _with_inputs(node, inputs)
        return Nodes(
            by_name=self.kept,
            outputs=tuple(self.instead.get(o, o) for o in self.given.outputs),
            targets=tuple(dict.fromkeys(self.gone.get(t, t) for t in self.given.targets)),
            kept=self.given.kept,
        )

    def _read(self, reference: str) -> list[str]:
        waits = self.waits.get(producer(reference), [])
        if is_wait(reference):
            return [f"^{self.gone.get(reference[1:], reference[1:])}", *waits]
        return [self.instead.get(tensor_name(reference), reference), *waits]

    def _found(self, node: "NodeDef", inputs: Sequence[str]) -> Mapping[str, str]:
        """The tensors that stand for a node's own; none for one that stays. `inputs` are what it reads by now."""
        if node.op in _PASSING_ON and (_is_handle(node) or not any(map(is_wait, inputs))):
            return {f"{node.name}:{i}": tensor_name(source) for i, source in enumerate(inputs) if not is_wait(source)}
        if node.op == "Const":
            return {}
        operation = self.graph.get_operation_by_name(node.name)
        if values := [] if node.name in self.fetched else _known_values(operation):
            return {f"{node.name}:{i}": self._constant(node.name, i, value) for i, value in enumerate(values)}
        if node.op != "ReadVariableOp" and not _is_small_value(operation):
            return {}
        data = tuple(self._value(i) for i in inputs if not is_wait(i))
        first = self.first.setdefault((node.op, _attributes(node), data, frozenset(filter(is_wait, inputs))), node.name)
        return {} if first == node.name else {f"{node.name}:{i}": f"{first}:{i}" for i in range(len(operation.outputs))}

    def _constant(self, name: str, output: int, value: Any) -> str:
        constant = constant_node(name if output == 0 else new_name(f"{name}_{output}", self.given.by_name, self.kept), value)
        self.kept[constant.name] = constant
        return f"{constant.name}:0"

    def _value(self, reference: str) -> str | bytes:
        """The value of an input that is a constant, else its name."""
        node = self.kept[producer(reference)]
        return _attributes(node) if node.op == "Const" else tensor_name(reference)


def _is_handle(node: "NodeDef") -> bool:
    """True for a node that hands on a variable itself, as a call that is inlined does, there behind what the call waits for."""
    return bool(node.op == "Identity" and node.attr["T"].type == tensorflow().resource.as_datatype_enum)


def _without_repeated_waits(inputs: Iterable[str]) -> list[str]:
    """A node waits once for another, and not at all for one that it reads from."""
    inputs = list(inputs)
    data = [i for i in inputs if not is_wait(i)]
    read = set(map(producer, data))
    return data + [i for i in dict.fromkeys(inputs) if is_wait(i) and i[1:] not in read]


def _known_values(operation: "tf.Operation") -> list[Any]:
    """The values of an op's outputs; none where one is not known, or is large."""
    tf = tensorflow()
    shapes = [t.shape for t in operation.inputs]
    if operation.type in _OF_SHAPES and all(shape.is_fully_defined() for shape in shapes):
        types = [t.dtype.as_numpy_dtype for t in operation.outputs]
        return [np.array(_OF_SHAPES[operation.type](shape), dtype) for shape, dtype in zip(shapes, types, strict=True)]
    if operation.type == "Cast" and (size_of(operation.outputs[0]) or _KNOWN_BYTES + 1) <= _KNOWN_BYTES:
        value = tf.get_static_value(operation.outputs[0])
        return [] if value is None else [value]
    return []


def constant_node(name: str, value: Any) -> "NodeDef":
    """A node that makes this array."""
    tf = tensorflow()
    proto = tf.make_tensor_proto(value)
    node: NodeDef = tf.compat.v1.NodeDef(name=name, op="Const")
    node.attr["dtype"].type = proto.dtype
    node.attr["value"].tensor.CopyFrom(proto)
    return node


def _attributes(node: "NodeDef") -> bytes:
    return b" ".join(key.encode() + b"=" + node.attr[key].SerializeToString() for key in sorted(node.attr) if key not in _FOR_TRACING)


def _is_small_value(operation: "tf.Operation") -> bool:
    """True if equal inputs make equal outputs, and these are small."""
    if operation.op_def.is_stateful or not operation.outputs or operation.type == "Placeholder":
        return False
    return all((size := size_of(t)) is not None and size <= _KNOWN_BYTES for t in operation.outputs)


def size_of(tensor: "tf.Tensor") -> int | None:
    """Bytes; None where the shape is known only when the step runs, or what the tensor holds has no fixed size."""
    if not tensor.dtype.size or not tensor.shape.is_fully_defined():
        return None
    return int(tensor.shape.num_elements() * tensor.dtype.size)


def _without_idle_waits(nodes: Nodes, graph: "tf.Graph") -> Nodes:
    """Nobody waits for what is there from the beginning, and what only computes waits for nothing but its inputs, where nobody waits
    for it in turn."""
    there = {f"^{name}" for name, node in nodes.by_name.items() if node.op in ("Const", "Placeholder") and not node.input}
    awaited = {i[1:] for node in nodes.by_name.values() for i in node.input if is_wait(i)}

    def inputs(name: str, node: "NodeDef") -> list[str]:
        if not any(map(is_wait, node.input)):
            return list(node.input)
        waits = name in awaited or graph.get_operation_by_name(name).op_def.is_stateful
        return [i for i in node.input if not is_wait(i) or waits and i not in there]

    return replace(nodes, by_name={name: _with_inputs(node, inputs(name, node)) for name, node in nodes.by_name.items()})


def stands_beside_readers(nodes: Nodes) -> frozenset[str]:
    """The small constants, each of which stands beside one reader in a clean graph."""
    fetched = {producer(o) for o in nodes.outputs}
    constants = {name: node for name, node in nodes.by_name.items() if node.op == "Const" and not node.input and name not in fetched}
    return frozenset(name for name, node in constants.items() if node.attr["value"].tensor.ByteSize() <= _COPIED_BYTES)


def _with_constants_beside_readers(nodes: Nodes) -> Nodes:
    shared = stands_beside_readers(nodes)
    kept: dict[str, NodeDef] = {}
    for name, node in nodes.by_name.items():
        own: dict[str, str] = {}
        for constant in dict.fromkeys(i for i in map(tensor_name, node.input) if producer(i) in shared):
            original = nodes.by_name[producer(constant)]
            copy = type(original)()
            copy.CopyFrom(original)
            if original.name in kept:
                copy.name = new_name(f"{name}/{original.name.rpartition('/')[2]}", nodes.by_name, kept)
            own[constant] = copy.name
            kept[copy.name] = copy
        if name not in shared:
            kept[name] = _with_inputs(node, [own.get(tensor_name(i), i) for i in node.input])
    return replace(nodes, by_name=kept)


def new_name(wish: str, *taken: Container[str]) -> str:
    """The name, or with a number behind it the first that is not taken."""
    name, number = wish, 0
    while any(name in names for names in taken):
        number += 1
        name = f"{wish}_{number}"
    return name


def _with_inputs(node: "NodeDef", inputs: Sequence[str]) -> "NodeDef":
    changed: NodeDef = type(node)()
    changed.CopyFrom(node)
    del changed.input[:]
    changed.input.extend(i.removesuffix(":0") for i in inputs)
    for key in _FOR_TRACING:
        if key in changed.attr:
            del changed.attr[key]
    return changed
