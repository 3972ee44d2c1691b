"""Grids of pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image


def make_grid(
    tensor: torch.Tensor | Sequence[torch.Tensor], nrow: int = 8, padding: int = 2, normalize: bool = False, **_: Any
) -> torch.Tensor:
    """One picture of all, `nrow` in a row."""
    batch = torch.stack(list(tensor)) if not isinstance(tensor, torch.Tensor) else tensor
    batch = batch.detach().cpu().float()
    batch = batch[None] if batch.dim() == 3 else batch
    batch = batch.expand(-1, 3, -1, -1) if batch.shape[1] == 1 else batch
    if normalize:
        low, high = batch.min(), batch.max()
        batch = (batch - low) / (high - low).clamp(min=1e-5)
    number, channels, height, width = batch.shape
    columns = min(nrow, number)
    lines = -(-number // columns)
    grid = torch.zeros(channels, lines * (height + padding) + padding, columns * (width + padding) + padding)
    for index, picture in enumerate(batch):
        y, x = (index // columns) * (height + padding) + padding, (index % columns) * (width + padding) + padding
        grid[:, y : y + height, x : x + width] = picture
    return grid


def save_image(tensor: torch.Tensor | Sequence[torch.Tensor], fp: str | Path, **options: Any) -> None:
    """Writes such a grid."""
    options.pop("format", None)
    grid = make_grid(tensor, **options)
    Image.fromarray((grid.clamp(0, 1) * 255).byte().permute(1, 2, 0).numpy()).save(fp)
