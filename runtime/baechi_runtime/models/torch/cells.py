"""Building blocks for the cells of searched convolutional networks (Zoph et al. 2018; Pham et al. 2018). Padding is symmetric."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Grid:
    """The shape of an activation: its channels, and how often the image was halved."""

    channels: int
    halvings: int


class Norm(nn.BatchNorm2d):
    """BatchNorm that counts no batches: only a cumulative mean would need it, and it is an op more each time."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=0.001, momentum=0.0003)
        self.num_batches_tracked = None


def project(inputs: int, outputs: int) -> nn.Module:
    """ReLU, 1x1 convolution, BatchNorm."""
    return nn.Sequential(nn.ReLU(), nn.Conv2d(inputs, outputs, 1, bias=False), Norm(outputs))


def separable(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Module:
    """ReLU, depthwise and pointwise convolution, BatchNorm; twice, with the stride in the first."""

    def once(channels: int, stride: int) -> list[nn.Module]:
        depthwise = nn.Conv2d(channels, channels, kernel, stride, kernel // 2, groups=channels, bias=False)
        return [nn.ReLU(), depthwise, nn.Conv2d(channels, outputs, 1, bias=False), Norm(outputs)]

    return nn.Sequential(*once(inputs, stride), *once(outputs, 1))


def average(stride: int = 1) -> nn.Module:
    """3x3 average pooling."""
    return nn.AvgPool2d(3, stride, 1, count_include_pad=False)


class Halve(nn.Module):
    """Factorised reduction: every second pixel, and every second pixel shifted by one, each through a 1x1 convolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, 2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs // 2, 1, 2, bias=False)
        self.norm = Norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(x)
        shifted = functional.pad(x, (-1, 1, -1, 1))
        return self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))


def adjust(previous: Grid, current: Grid, filters: int) -> nn.Module:
    """Brings a cell's second input to the size of its first and to `filters` channels."""
    if previous.halvings != current.halvings:
        return Halve(previous.channels, filters)
    if previous.channels != filters:
        return project(previous.channels, filters)
    return nn.Identity()
