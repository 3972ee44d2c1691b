"""AlexNet in the variant for one device (Krizhevsky 2014, arXiv 1404.5997, "One weird trick"), 61,100,840 parameters at 224 pixels."""

from dataclasses import dataclass

from torch import Tensor, nn

from baechi_runtime.models.torch.images import labelled

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
    images = labelled("alexnet", options.batch_size, options.image_size, smallest=SMALLEST_IMAGE, classes=CLASSES)
    return AlexNet(options.image_size, options.dropout), images
