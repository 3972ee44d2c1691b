"""The state of a generator of random numbers as text, for JSON."""

import base64
import binascii

import torch

from baechi_ext.errors import CheckpointError


def encoded(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode("ascii")


def decoded(text: str) -> torch.Tensor:
    """Raises CheckpointError where the text is no such state."""
    try:
        return torch.tensor(list(base64.b64decode(text, validate=True)), dtype=torch.uint8)
    except binascii.Error as e:
        raise CheckpointError(f"a random state is damaged: {e}; remove this checkpoint to go on from the one before it") from e
