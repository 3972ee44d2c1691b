"""The model of a training script, captured to be sharded: the script runs to the first training call of a module that is large enough.

What the script makes of the module's outputs is its own: their mean stands for the loss, unless the module returns one.
"""

from typing import Any

import torch
from torch import Tensor, nn

from baechi_ext.capture.torch_tree import Tree, flatten
from runtime.as_main import EndedError, require_script, run_as_main
from runtime.calls.module_calls import LARGE_ENOUGH, Call, never_trained, outermost_calls, trained_size
from runtime.sharding.models import ShardedModel, module_of


class _FoundError(EndedError):
    """The script's module, where it is called."""

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
        with outermost_calls(_stopping):
            code = run_as_main(script, arguments)
    except _FoundError as found:
        tensors, tree = flatten(found.arguments, "what the module takes")
        called = _Called(found.module, tree)
        return module_of(called, [t.detach() for t in tensors], name=script.stem, splits_images=splits_images)
    raise never_trained(path, code)


def _stopping(module: nn.Module, ordinary: Call) -> Call:
    """What the module is called by: the first training call of one that is large enough ends the script."""
    if trained_size(module) < LARGE_ENOUGH:
        return ordinary

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise _FoundError(getattr(module, "_orig_mod", module), (args, kwargs))

    return stop
