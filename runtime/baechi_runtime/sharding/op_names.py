"""The op of a call: its name, without its overload, and whether it works in place, which makes no other op of it."""

from functools import cache
from typing import Any

import torch
from torch import fx


def name_of(call: fx.Node) -> str:
    """The op's name: conv2d for aten::conv2d.padding, relu for aten::relu_; as Python has it where it is no op of torch's."""
    return parts_of(call)[1]


def op_name(call: fx.Node) -> str:
    """The name with its namespace: aten.conv2d."""
    return ".".join(filter(None, parts_of(call)))


def parts_of(call: fx.Node) -> tuple[str, str]:
    """The namespace, which only ops of torch's have, and the name."""
    return _parts(op_of(call))


def is_pointwise(call: fx.Node) -> bool:
    """True if torch marks the op as pointwise; one that works in place goes by the one that does not, as not all of them are marked."""
    return torch.Tag.pointwise in getattr(plain(op_of(call)), "tags", ())


def op_of(call: fx.Node) -> Any:
    """The op itself, which has a schema if it is one of torch's."""
    return call.target


def argument_at(call: fx.Node, place: int) -> Any:
    """One of the call's arguments, which is there: a node, or a value."""
    return call.args[place]


def in_place(op: Any) -> bool:
    """True if an op writes its result over its first argument."""
    schema = getattr(op, "_schema", None)
    return schema is not None and schema.is_mutable and schema.name.endswith("_")


@cache
def plain(op: Any) -> Any:
    """The op; where it works in place, the one that does not, if there is one."""
    if not in_place(op):
        return op
    namespace, name = op._schema.name[:-1].split("::")
    return getattr(getattr(getattr(torch.ops, namespace), name, None), op._overloadname, op)


@cache
def _parts(op: Any) -> tuple[str, str]:
    op = plain(op)
    namespace = getattr(op, "namespace", None)
    if namespace is None:
        return "", getattr(op, "__name__", str(op))
    return namespace, op.name().split("::")[1].split(".")[0]
