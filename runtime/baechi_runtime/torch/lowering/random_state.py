"""The states of generators of random numbers: as text, for JSON, and put back after a step that is not to be seen."""

import base64
import binascii
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from baechi_ext.errors import CheckpointError


@contextmanager
def as_it_was(step: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Puts the state of a step, a TrainingStep or a CallStep, and torch's generators back; gives what the step's state was."""
    saved: dict[str, torch.Tensor] = step.snapshot()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()):
        try:
            yield saved
        finally:
            step.restore(saved)


def encoded(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode("ascii")


def decoded(text: str) -> torch.Tensor:
    """Raises CheckpointError where the text is no such state."""
    try:
        return torch.tensor(list(base64.b64decode(text, validate=True)), dtype=torch.uint8)
    except binascii.Error as e:
        raise CheckpointError(f"a random state is damaged: {e}; remove this checkpoint to go on from the one before it") from e
