"""What is tried where a module's call can't be captured as one graph: its submodules, in blocks; the reason for it goes along."""

from collections.abc import Callable
from typing import Any

from torch import nn

from baechi_ext.errors import CaptureError
from runtime.calls.blocks.placed_blocks import BlockSettings, PlacedBlocks

Runner = Callable[..., Any]
"""Takes the module's arguments and returns what the module returns."""


def next_rung(module: nn.Module, ordinary: Runner, settings: BlockSettings, error: CaptureError) -> PlacedBlocks | None:
    """Another way to run the module's training calls on several devices, or None where there is none.

    `ordinary` runs the module as it is; `error` says why its call can't be captured. Where that other way can't be gone either, its
    first call raises a CaptureError that says both.
    """
    if len(settings.executor.devices) < 2:
        return None
    return PlacedBlocks(module, ordinary, settings, str(error))
