"""The transforms of one picture."""

from enum import Enum
from typing import Any

import numpy as np
import torch
from PIL import Image


class InterpolationMode(Enum):
    """Ways to change a picture's size."""

    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"


def to_tensor(picture: Any) -> torch.Tensor:
    """Channels first, bytes as numbers from 0 to 1."""
    array = np.array(picture)
    array = array[:, :, None] if array.ndim == 2 else array
    tensor = torch.from_numpy(array.transpose(2, 0, 1).copy())
    return tensor.float() / 255 if tensor.dtype == torch.uint8 else tensor


def to_pil_image(tensor: Any) -> Image.Image:
    """The picture of a tensor of numbers from 0 to 1."""
    if not isinstance(tensor, torch.Tensor):
        return Image.fromarray(np.asarray(tensor))
    array = (tensor.clamp(0, 1) * 255).byte().permute(1, 2, 0).numpy()
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


def normalize(tensor: torch.Tensor, mean: Any, std: Any) -> torch.Tensor:
    """Each channel less its mean, by its deviation."""
    mean, std = (torch.as_tensor(v, dtype=tensor.dtype).reshape(-1, 1, 1) for v in (mean, std))
    return (tensor - mean) / std


def size_of(picture: Any) -> tuple[int, int]:
    """Its height and width."""
    return tuple(picture.shape[-2:]) if isinstance(picture, torch.Tensor) else picture.size[::-1]


def resize(picture: Any, size: int | tuple[int, int]) -> Any:
    """A picture of that size; of one number, its shorter side."""
    height, width = size_of(picture)
    if isinstance(size, int):
        size = (size, size * width // height) if height <= width else (size * height // width, size)
    if isinstance(picture, torch.Tensor):
        return torch.nn.functional.interpolate(picture[None], size=tuple(size), mode="bilinear", antialias=True)[0]
    return picture.resize((size[1], size[0]), Image.Resampling.BILINEAR)


def crop(picture: Any, top: int, left: int, height: int, width: int) -> Any:
    """A part of a picture."""
    if isinstance(picture, torch.Tensor):
        return picture[..., top : top + height, left : left + width]
    return picture.crop((left, top, left + width, top + height))


def hflip(picture: Any) -> Any:
    """Left for right."""
    return picture.flip(-1) if isinstance(picture, torch.Tensor) else picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def pad(picture: Any, by: int) -> Any:
    """Black on all sides."""
    if isinstance(picture, torch.Tensor):
        return torch.nn.functional.pad(picture, (by, by, by, by))
    wide = Image.new(picture.mode, (picture.width + 2 * by, picture.height + 2 * by))
    wide.paste(picture, (by, by))
    return wide
