"""Residual networks (He et al. 2016), with fresh weights whatever is asked for."""

from functools import partial
from typing import Any

import torch
from torch import nn


class _Block(nn.Module):
    """Two convolutions of 3 x 3, or one between two of 1 x 1, beside a shortcut."""

    def __init__(self, before: int, width: int, stride: int, expansion: int) -> None:
        super().__init__()
        after = width * expansion
        kernels = (3, 3) if expansion == 1 else (1, 3, 1)
        widths = (before, width, after) if expansion == 1 else (before, width, width, after)
        strides = (stride, 1) if expansion == 1 else (1, stride, 1)
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, k, s, k // 2, bias=False) for a, b, k, s in zip(widths[:-1], widths[1:], kernels, strides, strict=True)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths[1:])
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or before != after:
            self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x
        for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            out = norm(conv(out))
            if index + 1 < len(self.convs):
                out = self.relu(out)
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """The network, its parts under torchvision's names."""

    def __init__(self, depths: tuple[int, ...], expansion: int, num_classes: int = 1000, **_: Any) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        before = 64
        for index, depth in enumerate(depths):
            width = 64 * 2**index
            blocks = []
            for position in range(depth):
                blocks.append(_Block(before, width, 2 if index and not position else 1, expansion))
                before = width * expansion
            setattr(self, f"layer{index + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(before, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


resnet18 = partial(ResNet, (2, 2, 2, 2), 1)
resnet50 = partial(ResNet, (3, 4, 6, 3), 4)


class VGG16_Weights:  # noqa: N801 - torchvision's name
    """A name that torchmetrics imports, as it does the next one; no script here asks for what they stand for."""


def vgg16(*_: Any, **__: Any) -> nn.Module:
    raise NotImplementedError("VGG is not among the stand-ins")
