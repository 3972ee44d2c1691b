"""What is tried where a module's call can't be captured as one graph."""

from collections.abc import Callable
from typing import Any

from torch import nn

from baechi_ext.errors import CaptureError

Runner = Callable[..., Any]
"""Takes the module's arguments and returns what the module returns."""


def next_rung(module: nn.Module, ordinary: Runner, error: CaptureError) -> Runner | None:
    """Another way to run the module's training calls on several devices, or None where there is none.

    `ordinary` runs the module as it is; `error` says why its call can't be captured.
    """
    del module, ordinary, error
    return None
