"""A traced TensorFlow step before it is cleaned: its nodes, what they make, and the variables that they use."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from baechi_ext.capture.tensorflow_cleanup import constant_node, new_name
from baechi_ext.capture.tensorflow_private import tensorflow, variable_of, with_calls_inlined
from baechi_ext.errors import CaptureError

if TYPE_CHECKING:
    import tensorflow as tf

READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp")
"""Ops that look at a variable and leave it as it is."""
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_HANDLES = "baechi_handles"
_MOST_BYTES = 2**31
"""The size from which tensors are more than a graph can hold."""


@dataclass(frozen=True)
class CapturedVariable:
    """A variable that a step uses."""

    placeholder: str
    """The node that stands for its resource."""
    shared_name: str
    """Its name, unique in the step."""
    dtype: "tf.DType"
    shape: tuple[int, ...]
    trainable: bool
    variable: "tf.Variable"

    @property
    def bytes(self) -> int:
        return int(self.dtype.size) * prod(self.shape)


@dataclass(frozen=True)
class Source:
    """The traced graph, in which what nested tf.functions do stands in place of their calls."""

    graph: "tf.Graph"
    """Knows the shapes of all tensors."""
    definition: "tf.compat.v1.GraphDef"
    inputs: tuple[str, ...]
    """Placeholders of the arguments."""
    outputs: tuple[str, ...]
    """Tensors."""
    variables: tuple[CapturedVariable, ...]

    @classmethod
    def of(cls, concrete: Any, what: str) -> "Source":
        """Makes one from a concrete function. Raises CaptureError for a resource that is not a variable of a fixed shape."""
        traced = concrete.graph
        variables = _variables(concrete, what)
        inlines = any(o.type in _CALLS for o in traced.get_operations())
        definition = with_calls_inlined(concrete) if inlines else traced.as_graph_def()
        values = {inner.op.name: outer for outer, inner in traced.captures}
        for name in (v.placeholder for v in variables):
            del values[name]
        used = [node for node in definition.node if node.name in values]
        _require_small({node.name: values[node.name] for node in used}, what)
        for node in used:
            node.CopyFrom(constant_node(node.name, values[node.name].numpy()))
        return cls(
            graph=_imported(definition, variables) if inlines else traced,
            definition=definition,
            inputs=tuple(i.op.name for i in concrete.inputs[: len(concrete.inputs) - len(concrete.captured_inputs)]),
            outputs=tuple(o.name for o in concrete.outputs),
            variables=variables,
        )

    @cached_property
    def nodes(self) -> "dict[str, tf.compat.v1.NodeDef]":
        return {node.name: node for node in self.definition.node}

    def operation(self, node: str) -> "tf.Operation":
        return self.graph.get_operation_by_name(node)

    def operations(self) -> "Iterable[tf.Operation]":
        return map(self.operation, self.nodes)

    def targets(self) -> tuple[str, ...]:
        """Nodes that change state, or do something else than making tensors."""
        return tuple(name for name in self.nodes if _has_effect(self.operation(name)))


def _require_small(tensors: Mapping[str, Any], what: str) -> None:
    """Raises CaptureError, with the largest one's name, where these are more than a graph holds."""
    sizes = {name: int(tensor.dtype.size) * prod(tensor.shape) for name, tensor in tensors.items()}
    if (total := sum(sizes.values())) >= _MOST_BYTES:
        name = max(sizes, key=sizes.__getitem__)
        others = f" and others, of {total} bytes in all" if len(sizes) > 1 else ""
        advice = "make it a tf.Variable (trainable=False), or an argument of the step"
        held = "a graph holds less than 2 GiB of such constants"
        raise CaptureError(f"{what} uses the tensor {name!r} of {sizes[name]} bytes{others}; {held}; {advice}")


def as_traced(concrete: Any, order: Sequence[int]) -> Callable[..., Any]:
    """The graph of a concrete function without XLA, as a tf.function: its tensors, in this order of theirs -> its flat results."""
    tf = tensorflow()
    graph = concrete.graph
    names = [concrete.inputs[i].name for i in order]
    wanted = [*(o.name for o in concrete.outputs), *(o.name for o in graph.control_outputs)]

    def run(*tensors: Any) -> list[Any]:
        here = tf.compat.v1.get_default_graph()
        for variable in graph.variables:
            here.watch_variable(variable)
        captured = {inner.name: here.capture(outer) for outer, inner in graph.captures}
        found = tf.graph_util.import_graph_def(graph.as_graph_def(), captured | dict(zip(names, tensors, strict=True)), wanted, name="")
        with tf.control_dependencies(found[len(concrete.outputs) :]):
            return [tf.identity(o) for o in found[: len(concrete.outputs)]]

    function: Callable[..., Any] = tf.function(run, autograph=False)
    return function


def _has_effect(operation: "tf.Operation") -> bool:
    """True for what a tf.function runs though nobody uses its result: all that has state, such as a check of a tensor, but reads and the
    ops that draw numbers by a seed of their own."""
    if not operation.op_def.is_stateful or operation.type in READS or operation.type in ("Placeholder", "VarHandleOp"):
        return False
    return all(attribute.name != "seed" for attribute in operation.op_def.attr)


def _variables(concrete: Any, what: str) -> tuple[CapturedVariable, ...]:
    tf = tensorflow()
    known = {id(v.handle): v for v in concrete.graph.variables}
    found: list[CapturedVariable] = []
    names: set[str] = set()
    for outer, inner in concrete.graph.captures:
        if inner.dtype not in (tf.resource, tf.variant):
            continue
        variable = known.get(id(outer))
        if variable is None and inner.dtype == tf.resource:
            variable = variable_of(outer)
        if variable is None:
            raise CaptureError(
                f"{what} uses a resource that is not a variable ({inner.op.name!r}), such as an iterator, a data set, a table or a "
                "summary writer; use it outside of the step, and give the step what was read"
            )
        if not variable.shape.is_fully_defined():
            raise CaptureError(f"variable {variable.name!r} has the shape {variable.shape}; placing needs variables of fixed shapes")
        name = new_name(variable.name.partition(":")[0], names)
        names.add(name)
        shape = tuple(variable.shape.as_list())
        found.append(CapturedVariable(inner.op.name, name, variable.dtype, shape, bool(variable.trainable), variable))
    return tuple(found)


def _imported(definition: "tf.compat.v1.GraphDef", variables: Sequence[CapturedVariable]) -> "tf.Graph":
    """A graph of these nodes that knows shapes: variables' handles, which do, stand for the placeholders of their resources."""
    tf = tensorflow()
    with tf.Graph().as_default() as graph:
        with tf.name_scope(_HANDLES):
            handles = {
                f"{v.placeholder}:0": tf.raw_ops.VarHandleOp(dtype=v.dtype, shape=v.shape, shared_name=v.shared_name) for v in variables
            }
        tf.import_graph_def(definition, input_map=handles, name="")
    return graph
