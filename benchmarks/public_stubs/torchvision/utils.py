"""Grids of pictures."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image


def save_image(tensor: torch.Tensor, fp: str | Path, nrow: int = 8, normalize: bool = False, **_: Any) -> None:
    """Writes one picture of all, `nrow` in a row."""
    batch = tensor.detach().cpu().float().expand(-1, 3, -1, -1)
    if normalize:
        low, high = batch.min(), batch.max()
        batch = (batch - low) / (high - low).clamp(min=1e-5)
    columns = min(nrow, len(batch))
    batch = torch.cat([batch, batch.new_zeros(-len(batch) % columns, *batch.shape[1:])])
    grid = torch.cat([torch.cat(list(row), dim=2) for row in batch.split(columns)], dim=1)
    Image.fromarray((grid.clamp(0, 1) * 255).byte().permute(1, 2, 0).numpy()).save(fp)
