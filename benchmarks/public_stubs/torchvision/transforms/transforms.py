"""The transforms as objects. What they leave to chance they take from torch's generator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import ImageEnhance

from torchvision.transforms import functional as F

__all__ = [
    "CenterCrop", "ColorJitter", "Compose", "Grayscale", "Lambda", "Normalize", "RandomApply", "RandomCrop", "RandomGrayscale",
    "RandomHorizontalFlip", "RandomResizedCrop", "Resize", "ToPILImage", "ToTensor",
]  # fmt: skip


def _chance() -> float:
    return float(torch.rand(()))


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)  # type: ignore[return-value]


@dataclass
class Compose:
    """One after the other."""

    transforms: Sequence[Callable]

    def __call__(self, picture: Any) -> Any:
        for transform in self.transforms:
            picture = transform(picture)
        return picture


class ToTensor:
    def __call__(self, picture: Any) -> torch.Tensor:
        return F.to_tensor(picture)


class ToPILImage:
    def __call__(self, picture: Any) -> Any:
        return F.to_pil_image(picture)


@dataclass
class Lambda:
    function: Callable

    def __call__(self, picture: Any) -> Any:
        return self.function(picture)


@dataclass
class Normalize:
    mean: Any
    std: Any
    inplace: bool = False

    def __call__(self, picture: torch.Tensor) -> torch.Tensor:
        return F.normalize(picture, self.mean, self.std)


class Resize:
    def __init__(self, size: int | Sequence[int], *_: Any, **__: Any) -> None:
        self.size = size

    def __call__(self, picture: Any) -> Any:
        return F.resize(picture, self.size if isinstance(self.size, int) else tuple(self.size))


class CenterCrop:
    def __init__(self, size: int | Sequence[int]) -> None:
        self.size = _pair(size)

    def __call__(self, picture: Any) -> Any:
        height, width = F.size_of(picture)
        return F.crop(picture, (height - self.size[0]) // 2, (width - self.size[1]) // 2, *self.size)


class RandomCrop:
    def __init__(self, size: int | Sequence[int], padding: int = 0, **_: Any) -> None:
        self.size, self.padding = _pair(size), padding

    def __call__(self, picture: Any) -> Any:
        picture = F.pad(picture, self.padding) if self.padding else picture
        height, width = F.size_of(picture)
        top, left = int(_chance() * (height - self.size[0] + 1)), int(_chance() * (width - self.size[1] + 1))
        return F.crop(picture, top, left, *self.size)


class RandomResizedCrop:
    def __init__(self, size: int | Sequence[int], scale: Sequence[float] = (0.08, 1.0), *_: Any, **__: Any) -> None:
        self.size, self.scale = _pair(size), scale

    def __call__(self, picture: Any) -> Any:
        height, width = F.size_of(picture)
        side = (self.scale[0] + _chance() * (self.scale[1] - self.scale[0])) ** 0.5
        tall, wide = max(1, int(side * height)), max(1, int(side * width))
        top, left = int(_chance() * (height - tall + 1)), int(_chance() * (width - wide + 1))
        return F.resize(F.crop(picture, top, left, tall, wide), self.size)


@dataclass
class RandomHorizontalFlip:
    p: float = 0.5

    def __call__(self, picture: Any) -> Any:
        return F.hflip(picture) if _chance() < self.p else picture


class RandomApply:
    def __init__(self, transforms: Sequence[Callable], p: float = 0.5) -> None:
        self.transforms, self.p = Compose(transforms), p

    def __call__(self, picture: Any) -> Any:
        return self.transforms(picture) if _chance() < self.p else picture


class Grayscale:
    def __init__(self, num_output_channels: int = 1) -> None:
        self.mode = "L" if num_output_channels == 1 else "RGB"

    def __call__(self, picture: Any) -> Any:
        return picture.convert("L").convert(self.mode)


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
