"""Counts of captured ops: floating-point operations by the formulas of torch.utils.flop_counter, and bytes that have to move."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

from baechi_ext.capture.torch_joint import UPDATE, Binding, BoundOp
from baechi_ext.ir.op_graph import Op, OpGraph

if TYPE_CHECKING:
    from torch import fx

_LOOKS_UP = ("aten.embedding", "aten.index.Tensor", "aten.gather", "aten.index_select")
"""Ops that read as much of their first tensor as they write."""
_WRITTEN_OUT = ("aten", "prims")
"""Namespaces whose ops are known: those without a formula do hardly more than move bytes."""


def with_counts(graph: OpGraph, binding: Binding) -> OpGraph:
    """The graph with `flop` and `moved_bytes` of each op.

    An op from outside of torch for which no formula is registered (torch.utils.flop_counter.register_flop_formula) has no `flop`.
    """
    from torch.utils.flop_counter import flop_registry

    sizes = {state: _bytes(node) for node, state in binding.state_nodes.items()}
    return graph.replace_ops([_counted(op, bound, flop_registry, sizes) for op, bound in zip(graph.ops, binding.ops, strict=True)])


def _counted(op: Op, bound: BoundOp, formulas: Mapping[Any, Callable[..., int]], sizes: Mapping[str, int]) -> Op:
    if bound.node is not None:
        return replace(op, flop=_flop(bound.node, formulas), moved_bytes=_moved(bound.node, op))
    if (
        op.phase == UPDATE
    ):  # reads gradient and parameter and writes that; its persistent bytes, the optimizer's state, are read and written
        size = max((sizes.get(name, 0) for name in bound.parameters), default=0)
        return replace(op, flop=0, moved_bytes=2 * (size + op.persistent_bytes) + sum(map(_bytes, bound.gradients)))
    return replace(op, flop=0, moved_bytes=0)  # nothing is computed: it hands a tensor over


def _flop(node: "fx.Node", formulas: Mapping[Any, Callable[..., int]]) -> int | None:
    from torch.fx import map_arg

    formula = formulas.get(getattr(node.target, "overloadpacket", None))
    if formula is not None:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        return int(formula(*args, **kwargs, out_val=node.meta["val"]))
    known = isinstance(node.target, FunctionType) or getattr(node.target, "namespace", "") in _WRITTEN_OUT
    return 0 if known else None


def _moved(node: "fx.Node", op: Op) -> int | float:
    read: Sequence[fx.Node] = node.all_input_nodes
    if op.op in _LOOKS_UP and read:
        return 2 * op.output_bytes + sum(map(_bytes, read[1:]))
    return op.output_bytes + sum(map(_bytes, read))


def _bytes(node: "fx.Node") -> int:
    """The bytes of a value, of which an expanded one has fewer than its numbers would take."""
    value: Any = node.meta.get("val")
    values: Sequence[Any] = value if isinstance(value, tuple | list) else [value]
    found = [v for v in values if hasattr(v, "untyped_storage")]
    return sum(min(v.numel() * v.element_size(), v.untyped_storage().nbytes()) for v in found)
