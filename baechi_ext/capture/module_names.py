"""Which module's code an op comes from: noted on the nodes while a model is traced.

The calls of modules are watched by hooks, and torch notes on every node, those of its backward pass included, what is going on.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import fx

_KEY = "baechi_module"


def known_model(module: "torch.nn.Module") -> "tuple[torch.nn.Module, str]":
    """The part of a step that a person calls their model, and what its parameters' names begin with in the step.

    It is the submodule that the step names by `baechi_model`, or else the step itself.
    """
    inner = getattr(module, "baechi_model", None)
    return (module, "") if inner is None else (module.get_submodule(inner), f"{inner}.")


@contextlib.contextmanager
def noting_modules(model: "torch.nn.Module") -> "Iterator[None]":
    """While it is entered, nodes that are traced in this thread know the innermost module of `model` that they come from."""
    from torch.fx import traceback
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

    names = {id(part): name for name, part in model.named_modules()}
    entered: list[contextlib.AbstractContextManager[object]] = []

    def enter(part: "torch.nn.Module", *_: object) -> None:
        if id(part) in names:
            note = traceback.annotate({_KEY: names[id(part)]})
            note.__enter__()
            entered.append(note)

    def leave(part: "torch.nn.Module", *_: object) -> None:
        if id(part) in names:
            entered.pop().__exit__(None, None, None)

    hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
    try:
        with traceback.preserve_node_meta():
            try:
                yield
            finally:
                while entered:  # those that an error got out of
                    entered.pop().__exit__(None, None, None)
    finally:
        for hook in hooks:
            hook.remove()


def module_of(node: "fx.Node") -> str | None:
    """The name of the module that a node comes from; None where it comes from none of the model's.

    Nodes of a graph that TorchDynamo made carry the module's path in the frame that it compiled, those of a backward pass that of
    their forward op.
    """
    noted: str | None = (node.meta.get("custom") or {}).get(_KEY)
    if noted is not None:
        return noted
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return name_in_frame(next(reversed(stack.values()))[0]) if stack else None


def classes_of_modules(nodes: "Iterable[fx.Node]") -> dict[str, str]:
    """The class of each module that TorchDynamo noted on nodes, by its name."""
    stacks = (node.meta.get("nn_module_stack") or {} for node in nodes)
    found = {name_in_frame(path): kind for stack in stacks for path, kind in stack.values()}
    return {name: getattr(kind, "__name__", str(kind)).rpartition(".")[2] for name, kind in found.items() if name is not None}


def name_in_frame(path: str) -> str | None:
    """The dotted name of what Dynamo calls `L['self'].layers[0].weight` or `L['self']._modules['layers']`, below the frame's own module;
    None for the module itself, and for what belongs to no local variable."""
    begin, found, rest = path.partition("]")
    if not found or not begin.startswith("L["):
        return None
    rest = re.sub(r"\[['\"]?([^'\"\]]*)['\"]?\]", r".\1", rest)
    return ".".join(part for part in rest.split(".") if part and part not in _KINDS) or None


_KINDS = ("_modules", "_parameters", "_buffers")
