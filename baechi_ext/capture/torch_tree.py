"""A flat list of the tensors that a module takes or returns, and the shape of the rest: tuples, dicts, dataclasses, objects of tensors."""

import dataclasses
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baechi_ext.capture.torch_private import tree_flatten, tree_unflatten
from baechi_ext.errors import CaptureError

if TYPE_CHECKING:
    import torch

_DEPTH = 8
"""Objects nested deeper than this are taken to go round in circles."""


@dataclass(frozen=True)
class TensorLeaf:
    """The tensor of this number."""

    index: int


@dataclass(frozen=True)
class InputLeaf:
    """A tensor that a module returns as it was given it, by its number."""

    index: int


@dataclass(frozen=True)
class ValueLeaf:
    """A number, a string, None or the like. The type tells 1 from True."""

    type: type
    value: Any


@dataclass(frozen=True)
class ObjectLeaf:
    """A dataclass or another object whose attributes are trees."""

    type: type
    names: tuple[str, ...]
    attributes: "Tree"

    def fill(self, tensors: "Sequence[torch.Tensor]", inputs: "Sequence[torch.Tensor]") -> Any:
        made: Any = object.__new__(self.type)
        for name, value in zip(self.names, self.attributes.fill(tensors, inputs), strict=True):
            object.__setattr__(made, name, value)
        return made


Leaf = TensorLeaf | InputLeaf | ValueLeaf | ObjectLeaf


@dataclass(frozen=True)
class Tree:
    """A value without its tensors; equal trees of equal tensors are equal values."""

    spec: Any
    leaves: tuple[Leaf, ...]

    def fill(self, tensors: "Sequence[torch.Tensor]", inputs: "Sequence[torch.Tensor]" = ()) -> Any:
        """The value, with these tensors."""
        return tree_unflatten([_filled(leaf, tensors, inputs) for leaf in self.leaves], self.spec)

    def map(self, function: Callable[[Leaf], Leaf]) -> "Tree":
        """The same tree with other leaves, those of its objects' attributes included."""
        leaves = [
            dataclasses.replace(leaf, attributes=leaf.attributes.map(function)) if isinstance(leaf, ObjectLeaf) else function(leaf)
            for leaf in self.leaves
        ]
        return Tree(self.spec, tuple(leaves))


def _filled(leaf: Leaf, tensors: "Sequence[torch.Tensor]", inputs: "Sequence[torch.Tensor]") -> Any:
    if isinstance(leaf, TensorLeaf):
        return tensors[leaf.index]
    if isinstance(leaf, InputLeaf):
        return inputs[leaf.index]
    return leaf.value if isinstance(leaf, ValueLeaf) else leaf.fill(tensors, inputs)


def flatten(value: Any, what: str) -> "tuple[list[torch.Tensor], Tree]":
    """The tensors of a value, in order, and its tree. `what` is what the value is called in errors.

    Raises CaptureError for what holds tensors in a way that can't be seen.
    """
    tensors: list[torch.Tensor] = []
    return tensors, _tree(value, tensors, what, 0)


def _tree(value: Any, tensors: "list[torch.Tensor]", what: str, depth: int) -> Tree:
    leaves, spec = tree_flatten(value)
    return Tree(spec, tuple(_leaf(leaf, tensors, what, depth) for leaf in leaves))


def _leaf(value: Any, tensors: "list[torch.Tensor]", what: str, depth: int) -> Leaf:
    import torch

    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return TensorLeaf(len(tensors) - 1)
    plain = (bool, int, float, complex, str, bytes, type(None), type, range, torch.Size, torch.dtype, torch.device, torch.layout)
    if isinstance(value, (*plain, types.FunctionType, types.BuiltinFunctionType)):
        return ValueLeaf(type(value), value)
    attributes = getattr(value, "__dict__", None)
    if attributes is None or isinstance(value, (torch.nn.Module, set, frozenset)) or depth > _DEPTH:
        raise CaptureError(
            f"{what} has a part of type {type(value).__module__}.{type(value).__qualname__}, in which no tensors can be told apart; "
            "use tensors, numbers, tuples, lists, dicts and dataclasses"
        )
    names = tuple(attributes)
    return ObjectLeaf(type(value), names, _tree([attributes[name] for name in names], tensors, what, depth + 1))
