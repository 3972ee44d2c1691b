"""A stand-in for a tensor that a device still computes: what is done with it waits for it, but handing it to a block does not."""

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor

from baechi_ext.capture.torch_private import nest_of, parts_of


class Pending:
    """`settle()` is the tensor itself. torch's functions take the stand-in as they take a tensor; to `isinstance` it is none."""

    __slots__ = ("settle", "source")

    def __init__(self, settle: Callable[[], Tensor], source: Any) -> None:
        self.settle = settle
        self.source = source
        """Whose output it is, for who knows blocks."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        leaves, kind = parts_of((args, kwargs or {}))
        args, kwargs = nest_of(kind, [settled(leaf) for leaf in leaves])
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.settle(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in Pending.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.settle(), name, value)

    def __repr__(self) -> str:
        return repr(self.settle())

    def __hash__(self) -> int:
        return hash(self.settle())


def settled(value: Any) -> Any:
    """The tensor that a stand-in stands for; anything else as it is."""
    return value.settle() if type(value) is Pending else value


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: Pending, *args: Any) -> Any:
        return getattr(self.settle(), name)(*map(settled, args))

    return method


for _name in ("bool", "int", "float", "index", "complex", "len", "iter", "getitem", "setitem", "contains", "format", "array"):
    setattr(Pending, f"__{_name}__", _forwarded(f"__{_name}__"))
for _name in ("neg", "pos", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Pending, f"__{_name}__", _forwarded(f"__{_name}__"))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"):
    _do = getattr(operator, f"__{_name}__")
    setattr(Pending, f"__{_name}__", lambda self, other, do=_do: do(self.settle(), settled(other)))
    setattr(Pending, f"__r{_name}__", lambda self, other, do=_do: do(settled(other), self.settle()))
    _in_place = getattr(operator, f"__i{_name}__")
    setattr(Pending, f"__i{_name}__", lambda self, other, do=_in_place: do(self.settle(), settled(other)))
