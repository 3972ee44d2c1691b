"""wide_towers: four independent convolutional towers, joined at the end by one linear layer. The simplest model that is worth splitting."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from baechi_runtime.models.torch.images import labelled

TOWERS, CHANNELS, LAYERS, CLASSES = 4, 96, 4, 10
SMALLEST_IMAGE = 2


@dataclass(frozen=True, slots=True)
class Options:
    batch_size: int = 8
    image_size: int = 64
    """Height and width in pixels."""


def _conv_norm(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU()]


class WideTowers(nn.Module):
    """Images (batch, 3, size, size) -> logits (batch, 10). A tower: one 3x3 convolution of stride 2, four of stride 1, the spatial mean."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(*_conv_norm(3, CHANNELS, 2), *(m for _ in range(LAYERS) for m in _conv_norm(CHANNELS, CHANNELS, 1)))
            for _ in range(TOWERS)
        )
        self.join = nn.Linear(TOWERS * CHANNELS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.join(torch.cat([tower(x).mean(dim=(2, 3)) for tower in self.towers], dim=1))

    def expert_device(self, parameter: str) -> int:
        """Tower i on device i, taken modulo their number; what joins them on the last tower's."""
        part, _, rest = parameter.partition(".")
        return int(rest.partition(".")[0]) if part == "towers" else TOWERS - 1


def build(options: Options) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model, random images and labels. Raises OptionError for images that are too small."""
    model = WideTowers()
    return model, labelled("wide_towers", options.batch_size, options.image_size, smallest=SMALLEST_IMAGE, classes=CLASSES)
