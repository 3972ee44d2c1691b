"""The model of a training script, captured to be sharded: the script runs to the first training call of a module that is large enough.

What the script makes of the module's outputs is its own: their mean stands for the loss, unless the module returns one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from baechi_ext.capture.torch_tree import Tree, flatten
from baechi_ext.errors import CaptureError
from runtime.as_main import require_script, run_as_main
from runtime.calls.script import LARGE_ENOUGH
from runtime.sharding.models import ShardedModel, module_of


class _FoundError(BaseException):
    """Ends the script where its module is called. No script's `except Exception` takes it for a failure of its own."""

    def __init__(self, module: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        super().__init__()
        self.module = module
        self.arguments = arguments


class _Called(nn.Module):
    """A module with the arguments of a call, but for tensors, and a loss."""

    baechi_model = "model"

    def __init__(self, model: nn.Module, arguments: Tree) -> None:
        super().__init__()
        self.model = model
        self._arguments = arguments

    def forward(self, *tensors: Tensor) -> Tensor:
        args, kwargs = self._arguments.fill(tensors)
        found, _ = flatten(self.model(*args, **kwargs), "what the module returns")
        trained = [t for t in found if t.requires_grad]
        means = [t.mean() for t in trained]
        return next((t for t in trained if not t.dim()), means[0] if len(means) == 1 else torch.stack(means).sum())


def script_model(path: str, arguments: tuple[str, ...], *, splits_images: bool = False) -> ShardedModel:
    """The module of the script's first training call, captured. What the script would do after that call it does not.

    Raises FileError where there is no script, CaptureError where it ends before, or the module can't be captured.
    """
    script = require_script(path)
    try:
        with _watched():
            code = run_as_main(script, arguments)
    except _FoundError as found:
        tensors, tree = flatten(found.arguments, "what the module takes")
        called = _Called(found.module, tree)
        return module_of(called, [t.detach() for t in tensors], name=script.stem, splits_images=splits_images)
    raise CaptureError(
        f"{path} ended (exit code {code}) and had called no module of {LARGE_ENOUGH} parameters or more in training mode (model.train()) "
        "while gradients were recorded; train one, or give the script other arguments behind --"
    )


@contextmanager
def _watched() -> Iterator[None]:
    """While it is entered, the first training call of a module that is large enough ends the script."""
    ordinary = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module.training and torch.is_grad_enabled():
            parameters = [p for p in module.parameters() if p.requires_grad and not isinstance(p, nn.UninitializedParameter)]
            if sum(p.numel() for p in parameters) >= LARGE_ENOUGH:
                raise _FoundError(getattr(module, "_orig_mod", module), (args, kwargs))
        return ordinary(module, *args, **kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = ordinary  # type: ignore[method-assign]
