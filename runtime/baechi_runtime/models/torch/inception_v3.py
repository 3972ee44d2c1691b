"""Inception-V3 without the auxiliary head (Szegedy et al., CVPR 2016, "Rethinking the Inception Architecture"): 23,834,568 parameters.

Weights are drawn as PyTorch does by default, where the authors' code draws from truncated normal distributions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from baechi_runtime.models.torch.images import labelled

CLASSES, SMALLEST_IMAGE = 1000, 75
FEATURES = 2048
"""Width of what the last layer reads."""


@dataclass(frozen=True, slots=True)
class Options:
    batch_size: int = 32
    image_size: int = 299
    """Height and width in pixels."""
    dropout: float = 0.5
    """Before the last layer."""


class ConvNorm(nn.Sequential):
    """Convolution without bias, BatchNorm (eps 0.001), ReLU."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1, padding: int | tuple[int, int] = 0
    ) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),
            nn.BatchNorm2d(outputs, eps=0.001),
            nn.ReLU(),
        )


class Concat(nn.Module):
    """The branches side by side on one input, their outputs joined along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def _pool(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), ConvNorm(inputs, outputs, 1))


def _block_35(inputs: int, pooled: int) -> nn.Module:
    """Figure 5: 35x35 grid, 5x5 factorised into two 3x3."""
    return Concat(
        ConvNorm(inputs, 64, 1),
        nn.Sequential(ConvNorm(inputs, 48, 1), ConvNorm(48, 64, 5, padding=2)),
        nn.Sequential(ConvNorm(inputs, 64, 1), ConvNorm(64, 96, 3, padding=1), ConvNorm(96, 96, 3, padding=1)),
        _pool(inputs, pooled),
    )


def _reduce_35(inputs: int) -> nn.Module:
    return Concat(
        ConvNorm(inputs, 384, 3, stride=2),
        nn.Sequential(ConvNorm(inputs, 64, 1), ConvNorm(64, 96, 3, padding=1), ConvNorm(96, 96, 3, stride=2)),
        nn.MaxPool2d(3, 2),
    )


def _row(inputs: int, outputs: int) -> nn.Module:
    return ConvNorm(inputs, outputs, (1, 7), padding=(0, 3))


def _column(inputs: int, outputs: int) -> nn.Module:
    return ConvNorm(inputs, outputs, (7, 1), padding=(3, 0))


def _block_17(inputs: int, width: int) -> nn.Module:
    """Figure 6: 17x17 grid, 7x7 factorised into 1x7 and 7x1."""
    return Concat(
        ConvNorm(inputs, 192, 1),
        nn.Sequential(ConvNorm(inputs, width, 1), _row(width, width), _column(width, 192)),
        nn.Sequential(ConvNorm(inputs, width, 1), _column(width, width), _row(width, width), _column(width, width), _row(width, 192)),
        _pool(inputs, 192),
    )


def _reduce_17(inputs: int) -> nn.Module:
    return Concat(
        nn.Sequential(ConvNorm(inputs, 192, 1), ConvNorm(192, 320, 3, stride=2)),
        nn.Sequential(ConvNorm(inputs, 192, 1), _row(192, 192), _column(192, 192), ConvNorm(192, 192, 3, stride=2)),
        nn.MaxPool2d(3, 2),
    )


def _split_3x3(inputs: int) -> nn.Module:
    return Concat(ConvNorm(inputs, 384, (1, 3), padding=(0, 1)), ConvNorm(inputs, 384, (3, 1), padding=(1, 0)))


def _block_8(inputs: int) -> nn.Module:
    """Figure 7: 8x8 grid, expanded filter banks."""
    return Concat(
        ConvNorm(inputs, 320, 1),
        nn.Sequential(ConvNorm(inputs, 384, 1), _split_3x3(384)),
        nn.Sequential(ConvNorm(inputs, 448, 1), ConvNorm(448, 384, 3, padding=1), _split_3x3(384)),
        _pool(inputs, 192),
    )


class InceptionV3(nn.Sequential):
    """Images (batch, 3, size, size), size at least 75 -> logits (batch, CLASSES)."""

    def __init__(self, dropout: float) -> None:
        super().__init__(
            ConvNorm(3, 32, 3, stride=2),
            ConvNorm(32, 32, 3),
            ConvNorm(32, 64, 3, padding=1),
            nn.MaxPool2d(3, 2),
            ConvNorm(64, 80, 1),
            ConvNorm(80, 192, 3),
            nn.MaxPool2d(3, 2),
            _block_35(192, 32),
            _block_35(256, 64),
            _block_35(288, 64),
            _reduce_35(288),
            _block_17(768, 128),
            _block_17(768, 160),
            _block_17(768, 160),
            _block_17(768, 192),
            _reduce_17(768),
            _block_8(1280),
            _block_8(2048),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(FEATURES, CLASSES),
        )


def build(options: Options) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model, random images and labels. Raises OptionError for images that are too small."""
    model = InceptionV3(options.dropout)
    return model, labelled("inception_v3", options.batch_size, options.image_size, smallest=SMALLEST_IMAGE, classes=CLASSES)
