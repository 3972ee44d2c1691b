"""The transforms that training scripts use, of PIL pictures and of tensors."""

from torchvision.transforms import functional, transforms
from torchvision.transforms.functional import InterpolationMode
from torchvision.transforms.transforms import *  # noqa: F403 - all that it lists

__all__ = ["InterpolationMode", "functional", "transforms", *transforms.__all__]
