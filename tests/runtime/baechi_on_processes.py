"""`baechi` on worker processes as torchrun starts them, for `forked_workers`: what it imports for a script is there already."""

from collections.abc import Callable
from functools import partial

import torch

from baechi_runtime.cli.main import main
from baechi_runtime.torch.calls import comparing  # noqa: F401


def prepared(_: int, *command_line: str) -> Callable[[], int]:
    """The command in each worker."""
    return partial(main, command_line)


torch.compiler.reset()  # imports TorchDynamo
