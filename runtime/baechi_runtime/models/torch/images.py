"""Synthetic images for the models that classify them."""

import torch
from torch import Tensor

from baechi_ext.errors import OptionError


def labelled(model: str, batch_size: int, size: int, *, smallest: int, classes: int) -> tuple[Tensor, Tensor]:
    """Random images (batch, 3, size, size) and labels (batch,). Raises OptionError for images smaller than the model takes."""
    if size < smallest:
        raise OptionError(f"--image_size={size} is too small for {model}; it takes {smallest} pixels or more")
    return torch.randn(batch_size, 3, size, size), torch.randint(classes, (batch_size,))
