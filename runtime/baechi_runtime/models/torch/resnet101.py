"""ResNet-101 (He et al. 2016, "Deep residual learning for image recognition", table 1), 44,549,160 parameters.

As usually trained since: a bottleneck's stride is in its 3x3 convolution (ResNet v1.5).
"""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from baechi_runtime.models.torch.images import labelled

BLOCKS, EXPANSION, CLASSES = (3, 4, 23, 3), 4, 1000
SMALLEST_IMAGE = 32


@dataclass(frozen=True, slots=True)
class Options:
    batch_size: int = 8
    image_size: int = 224
    """Height and width in pixels."""
    resnet_filters: int = 64
    """Filters of the stem, and of the first stage's 3x3 convolutions; the last stage ends in 32 times as many channels."""


def _conv_norm(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a short cut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, filters: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * filters
        self.reduce = _conv_norm(inputs, filters, 1)
        self.conv = _conv_norm(filters, filters, 3, stride)
        self.expand = _conv_norm(filters, outputs, 1)
        self.shortcut = nn.Identity() if stride == 1 and inputs == outputs else _conv_norm(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.expand(functional.relu(self.conv(functional.relu(self.reduce(x)))))
        return functional.relu(y + self.shortcut(x))


class ResNet(nn.Sequential):
    """Images (batch, 3, size, size) -> logits (batch, classes)."""

    def __init__(self, filters: int, blocks: tuple[int, ...] = BLOCKS) -> None:
        layers: list[nn.Module] = [_conv_norm(3, filters, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        channels = filters
        for stage, count in enumerate(blocks):
            for i in range(count):
                layers.append(Bottleneck(channels, filters << stage, 2 if stage and i == 0 else 1))
                channels = EXPANSION * filters << stage
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def build(options: Options) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model, random images and labels. Raises OptionError for images that are too small."""
    images = labelled("resnet101", options.batch_size, options.image_size, smallest=SMALLEST_IMAGE, classes=CLASSES)
    return ResNet(options.resnet_filters), images
