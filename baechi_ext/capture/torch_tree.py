"""A flat list of the tensors that a module takes or returns, and the shape of the rest: tuples, dicts, dataclasses, objects of tensors."""

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baechi_ext.capture.torch_private import tree_flatten, tree_unflatten
from baechi_ext.errors import CaptureError

if TYPE_CHECKING:
    import torch

_DEPTH = 8
"""Objects nested deeper than this are taken to go round in circles."""


@dataclass(frozen=True)
class Tree:
    """A value without its tensors."""

    spec: Any
    leaves: tuple[Any, ...]
    """_TENSOR for a tensor, an _Object, or the value itself."""

    def fill(self, tensors: "Sequence[torch.Tensor]") -> Any:
        """The value, with these tensors."""
        return self._filled(iter(tensors))

    def _filled(self, tensors: "Iterator[torch.Tensor]") -> Any:
        return tree_unflatten([_filled(leaf, tensors) for leaf in self.leaves], self.spec)


@dataclass(frozen=True)
class _Object:
    """A dataclass or another object whose attributes are trees."""

    type: type
    names: tuple[str, ...]
    attributes: Tree


_TENSOR = object()


def _filled(leaf: Any, tensors: "Iterator[torch.Tensor]") -> Any:
    if leaf is _TENSOR:
        return next(tensors)
    if not isinstance(leaf, _Object):
        return leaf
    made: Any = object.__new__(leaf.type)
    for name, value in zip(leaf.names, leaf.attributes._filled(tensors), strict=True):
        object.__setattr__(made, name, value)
    return made


def flatten(value: Any, what: str) -> "tuple[list[torch.Tensor], Tree]":
    """The tensors of a value, in order, and its tree. `what` is what the value is called in errors.

    Raises CaptureError for what holds tensors in a way that can't be seen.
    """
    import torch

    tensors: list[torch.Tensor] = []
    plain = (bool, int, float, complex, str, bytes, type(None), type, range, torch.Size, torch.dtype, torch.device, torch.layout)

    def leaf_of(value: Any, depth: int) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return _TENSOR
        if isinstance(value, (*plain, types.FunctionType, types.BuiltinFunctionType)):
            return value
        attributes = getattr(value, "__dict__", None)
        if attributes is None or isinstance(value, (torch.nn.Module, set, frozenset)) or depth > _DEPTH:
            raise CaptureError(
                f"{what} has a part of type {type(value).__module__}.{type(value).__qualname__}, in which no tensors can be told apart; "
                "use tensors, numbers, tuples, lists, dicts and dataclasses"
            )
        return _Object(type(value), tuple(attributes), tree_of(list(attributes.values()), depth + 1))

    def tree_of(value: Any, depth: int) -> Tree:
        leaves, spec = tree_flatten(value)
        return Tree(spec, tuple(leaf_of(leaf, depth) for leaf in leaves))

    return tensors, tree_of(value, 0)
