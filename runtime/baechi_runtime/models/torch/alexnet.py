"""AlexNet in the variant for one device (Krizhevsky 2014, arXiv 1404.5997, "One weird trick"), 61,100,840 parameters at 224 pixels."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from baechi_ext.errors import OptionError

CLASSES, UNITS = 1000, 4096
SMALLEST_IMAGE = 63


@dataclass(frozen=True, slots=True)
class Options:
    batch_size: int = 32
    image_size: int = 224
    """Height and width in pixels. The first linear layer grows with them."""
    dropout: float = 0.5
    """Before the first two linear layers."""


def _side(image_size: int) -> int:
    """Height and width of what the convolutions leave: one convolution of stride 4, and three poolings."""
    side = (image_size + 4 - 11) // 4 + 1
    for _ in range(3):
        side = (side - 3) // 2 + 1
    return side


class AlexNet(nn.Sequential):
    """Images (batch, 3, size, size) -> logits (batch, classes)."""

    def __init__(self, image_size: int, dropout: float) -> None:
        super().__init__(
            *(nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)),
            nn.Flatten(),
            *(nn.Dropout(dropout), nn.Linear(256 * _side(image_size) ** 2, UNITS), nn.ReLU()),
            *(nn.Dropout(dropout), nn.Linear(UNITS, UNITS), nn.ReLU()),
            nn.Linear(UNITS, CLASSES),
        )


def build(options: Options) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model, random images and labels. Raises OptionError for images that are too small."""
    size = options.image_size
    if size < SMALLEST_IMAGE:
        raise OptionError(f"--image_size={size} is too small for alexnet; it takes {SMALLEST_IMAGE} pixels or more")
    images, labels = torch.randn(options.batch_size, 3, size, size), torch.randint(CLASSES, (options.batch_size,))
    return AlexNet(size, options.dropout), (images, labels)
