"""Which tensor of a node of the shard graph each argument of its call is, and what of the node's space can be run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx
from torch.distributed.tensor import Partial

from baechi_ext.errors import ShardError
from baechi_ext.shard.graph import Node, ShardGraph, Tensor
from runtime.sharding.forward import ForwardGraph
from runtime.sharding.layout import Argument, Assignment, Layout, assignments, placements
from runtime.sharding.rules import RULES, arguments, op_name, splittable


@dataclass(frozen=True)
class Bound:
    """A call, its node, and the node's tensor for each of the call's arguments."""

    call: fx.Node
    node: Node
    tensors: tuple[Tensor, ...]

    @property
    def runnable(self) -> Node:
        """The node with no other axis split than those that its call can be split along."""
        free = splittable(self.call, self.node, self.tensors)
        axes = tuple(axis if i in free else replace(axis, splits=False) for i, axis in enumerate(self.node.axes))
        return replace(self.node, axes=axes)

    def assignments(self, configuration: Sequence[int], mesh: Sequence[int]) -> list[Assignment]:
        """All ways to lay a configuration out that can be run; none where it can't."""
        free = splittable(self.call, self.node, self.tensors)
        if any(parts > 1 and axis not in free for axis, parts in enumerate(configuration)):
            return []
        return assignments(replace(self.node, inputs=self.tensors), configuration, mesh)

    def layout(self, assignment: Assignment) -> Layout:
        read = tuple(Argument.of(tensor, assignment) for tensor in self.tensors)
        return Layout(assignment, read, tuple(placements(tensor, assignment, Partial()) for tensor in self.node.outputs))


def bind(forward: ForwardGraph, graph: ShardGraph) -> dict[str, Bound]:
    """What each node of the shard graph is in the forward graph, by name. Raises ShardError for a node that is no call."""
    calls = {call.name: call for call in forward.nodes}
    missing = [node.name for node in graph.nodes if node.name not in calls]
    if missing:
        raise ShardError(f"{missing[0]} of the shard graph {graph.name} is no call of {forward.name}; derive it from this model")
    return {node.name: Bound(calls[node.name], node, _tensors(forward, calls[node.name], node)) for node in graph.nodes}


def _tensors(forward: ForwardGraph, call: fx.Node, node: Node) -> tuple[Tensor, ...]:
    """The node's tensors in the order of the call's arguments; what the node does not mention is read along with the result, or whole."""
    weights, inputs = list(node.weights), list(node.inputs)
    found = []
    for argument in arguments(call):
        shape = _shape(argument)
        first = weights if argument.name in forward.parameters or argument.name in forward.buffers else inputs
        match = _taken(first, shape) or _taken(inputs if first is weights else weights, shape)
        if match is None:
            rule = RULES.get(op_name(call))
            match = _broadcast(node, shape) if rule is not None and rule.aligned else Tensor(shape, ((),) * len(shape))
        found.append(match)
    return tuple(found)


def _taken(tensors: list[Tensor], shape: tuple[int, ...]) -> Tensor | None:
    """The first tensor of that shape, which is then no longer there."""
    at = next((i for i, tensor in enumerate(tensors) if tensor.shape == shape), None)
    return None if at is None else tensors.pop(at)


def _shape(value: fx.Node) -> tuple[int, ...]:
    """A scalar is a tensor of one number in shard graphs."""
    return tuple(getattr(value.meta.get("val"), "shape", ())) or (1,)


def _broadcast(node: Node, shape: tuple[int, ...]) -> Tensor:
    """A tensor of that shape that is read element by element with the node's result."""
    result = node.outputs[0]
    skipped = len(result.shape) - len(shape)
    axes = (result.axes[skipped + i] if size == result.shape[skipped + i] else () for i, size in enumerate(shape))
    return Tensor(shape, tuple(axes))
