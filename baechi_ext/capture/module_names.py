"""Which module's code an op comes from: noted on the nodes while a model is traced.

The calls of modules are watched by hooks, and torch notes on every node, those of its backward pass included, what is going on.
"""

import contextlib
from collections.abc import Iterator
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
    entered: list[contextlib.AbstractContextManager] = []

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
    """The name of the module that a node comes from; None where it comes from none of the model's."""
    return (node.meta.get("custom") or {}).get(_KEY)
