"""Calls of modules while a script runs: those from outside any other module's call, and how much they train."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from baechi_ext.capture.torch_dynamo import pass_over
from baechi_ext.capture.torch_private import inside_backward
from baechi_ext.errors import CaptureError

LARGE_ENOUGH = 1000
"""Parameters to be trained; a module with fewer is not worth a plan."""

Call = Callable[..., Any]


def trained_size(module: nn.Module) -> int:
    """So many parameters a call of the module would train now: none in eval mode, or while no gradients are recorded."""
    if not module.training or not torch.is_grad_enabled():
        return 0
    if isinstance(module, ParametrizationList):  # called wherever a weight is read
        return 0
    return sum(p.numel() for p in module.parameters() if p.requires_grad and not isinstance(p, nn.UninitializedParameter))


def never_trained(path: str, code: Any) -> CaptureError:
    """The error of a script that ended with this exit code before any training call that is large enough."""
    return CaptureError(
        f"{path} ended (exit code {code}) and had called no module of {LARGE_ENOUGH} parameters or more in training mode (model.train()) "
        "while gradients were recorded; train one, or give the script other arguments after --"
    )


@contextmanager
def outermost_calls(runner: Callable[[nn.Module, Call], Call]) -> Iterator[None]:
    """While it is entered, a call of a module goes to `runner(module, ordinary)`, which says what is called instead of `ordinary`, the
    module's own call. Calls inside of such a call, in a block's thread, in a backward pass, and in what the script gives to torch.compile,
    stay as they are.
    """
    plain, inside = nn.Module.__call__, threading.local()

    def through(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return plain(module, *args, **kwargs)

    def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return plain(module, *args, **kwargs)
        if getattr(inside, "now", False) or inside_backward():
            # Traces of ours follow this, too. The script's own compiler sees of torch's code what it sees without us.
            torchs_own = getattr(inside, "ours", True) and str(type(module).forward.__module__).startswith("torch.")
            return (through if torchs_own else plain)(module, *args, **kwargs)
        inside.now, ordinary = True, partial(plain, module)
        try:
            run = runner(module, ordinary)
            inside.ours = run is not ordinary
            return run(*args, **kwargs)
        finally:
            inside.now, inside.ours = False, True

    pass_over(call.__code__)  # else all modules behind graph breaks share its few traces; torch's own, which need them, share `through`'s
    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = plain  # type: ignore[method-assign]
