"""The transforms that training scripts use, of PIL pictures and of tensors. Chance is taken from torch's generator.

torchvision has them in two modules of this one, `transforms` and `functional`; here both are this one.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance

functional = transforms = sys.modules[__name__]
sys.modules[f"{__name__}.functional"] = functional


def _chance() -> float:
    return float(torch.rand(()))


def _crop(picture: Any, top: int, left: int, height: int, width: int) -> Any:
    return picture.crop((left, top, left + width, top + height))


@dataclass
class Compose:
    transforms: Sequence[Callable]

    def __call__(self, picture: Any) -> Any:
        for transform in self.transforms:
            picture = transform(picture)
        return picture


class ToTensor:
    """Channels first, bytes as numbers from 0 to 1."""

    def __call__(self, picture: Any) -> torch.Tensor:
        array = np.array(picture)
        array = array[:, :, None] if array.ndim == 2 else array
        tensor = torch.from_numpy(array.transpose(2, 0, 1).copy())
        return tensor.float() / 255 if tensor.dtype == torch.uint8 else tensor


class ToPILImage:
    """The picture of numbers from 0 to 1."""

    def __call__(self, tensor: torch.Tensor) -> Any:
        array = (tensor.clamp(0, 1) * 255).byte().permute(1, 2, 0).numpy()
        return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


@dataclass
class Lambda:
    function: Callable

    def __call__(self, picture: Any) -> Any:
        return self.function(picture)


@dataclass
class Normalize:
    """Each channel less its mean, by its deviation."""

    mean: Any
    std: Any

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        mean, std = (torch.as_tensor(v, dtype=tensor.dtype).reshape(-1, 1, 1) for v in (self.mean, self.std))
        return (tensor - mean) / std


@dataclass
class Resize:
    """A picture of that size; of one number, its shorter side."""

    size: int | Sequence[int]

    def __call__(self, picture: Any) -> Any:
        (width, height), size = picture.size, self.size
        if isinstance(size, int):
            size = (size, size * width // height) if height <= width else (size * height // width, size)
        return picture.resize((size[1], size[0]), Image.Resampling.BILINEAR)


@dataclass
class CenterCrop:
    size: int

    def __call__(self, picture: Any) -> Any:
        width, height = picture.size
        return _crop(picture, (height - self.size) // 2, (width - self.size) // 2, self.size, self.size)


class RandomCrop:
    def __init__(self, size: int | Sequence[int], padding: int = 0) -> None:
        self.size, self.padding = (size, size) if isinstance(size, int) else size, padding

    def __call__(self, picture: Any) -> Any:
        wide = Image.new(picture.mode, (picture.width + 2 * self.padding, picture.height + 2 * self.padding))
        wide.paste(picture, (self.padding, self.padding))
        top, left = int(_chance() * (wide.height - self.size[0] + 1)), int(_chance() * (wide.width - self.size[1] + 1))
        return _crop(wide, top, left, *self.size)


@dataclass
class RandomResizedCrop:
    size: int

    def __call__(self, picture: Any) -> Any:
        width, height = picture.size
        side = (0.08 + _chance() * 0.92) ** 0.5
        tall, wide = max(1, int(side * height)), max(1, int(side * width))
        top, left = int(_chance() * (height - tall + 1)), int(_chance() * (width - wide + 1))
        return Resize((self.size, self.size))(_crop(picture, top, left, tall, wide))


@dataclass
class RandomHorizontalFlip:
    p: float = 0.5

    def __call__(self, picture: Any) -> Any:
        return picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if _chance() < self.p else picture


class RandomApply:
    def __init__(self, transforms: Sequence[Callable], p: float = 0.5) -> None:
        self.transforms, self.p = Compose(transforms), p

    def __call__(self, picture: Any) -> Any:
        return self.transforms(picture) if _chance() < self.p else picture


@dataclass
class RandomGrayscale:
    p: float = 0.1

    def __call__(self, picture: Any) -> Any:
        return picture.convert("L").convert(picture.mode) if _chance() < self.p else picture


class ColorJitter:
    """Changes brightness, contrast and saturation; hue stays."""

    def __init__(self, brightness: float = 0, contrast: float = 0, saturation: float = 0, hue: float = 0) -> None:
        self.by = (brightness, contrast, saturation)

    def __call__(self, picture: Any) -> Any:
        for enhancer, by in zip((ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color), self.by, strict=True):
            picture = enhancer(picture).enhance(max(0.0, 1 + (2 * _chance() - 1) * by))
        return picture
