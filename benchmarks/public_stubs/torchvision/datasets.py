"""Data sets of seeded random images: each class has a pattern of its own, and each image noise, so that there is something to learn."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from public_seed import length
from torch.utils.data import Dataset

NOISE = 40


def images(number: int, shape: tuple[int, ...], classes: int, seed: int) -> tuple[np.ndarray, list[int]]:
    """Bytes, one image of `shape` (height, width, channels) each, and their classes."""
    patterns = np.random.default_rng(0).integers(0, 256 - NOISE, (classes, *shape))
    generator = np.random.default_rng(seed)
    targets = generator.integers(0, classes, number)
    found = patterns[targets] + generator.integers(0, NOISE, (number, *shape))
    return found.astype(np.uint8), targets.tolist()


class _Images(Dataset):
    """Seeded images, as many as the environment asks for, and their classes, both after the script's transforms."""

    shape: tuple[int, ...] = (32, 32, 3)
    number_of_classes = 10

    def __init__(
        self, root: str = "", train: bool = True, transform: Callable | None = None, target_transform: Callable | None = None, **_: Any
    ) -> None:
        self.transform, self.target_transform = transform, target_transform
        self.data, self.targets = images(length(train), self.shape, self.number_of_classes, seed=1 + train)
        self.classes = [str(name) for name in range(self.number_of_classes)]

    @property
    def train_data(self) -> Any:
        """The bytes, under the name that they once had."""
        return self.data

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        picture, target = Image.fromarray(np.asarray(self.data[index])), int(self.targets[index])
        picture = picture if self.transform is None else self.transform(picture)
        return picture, target if self.target_transform is None else self.target_transform(target)


class CIFAR10(_Images):
    """60,000 photographs of 32 x 32 elsewhere."""


class CIFAR100(_Images):
    number_of_classes = 100


class MNIST(_Images):
    """Grey pictures, whose bytes and classes are tensors."""

    shape = (28, 28)

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.data, self.targets = torch.from_numpy(self.data), torch.tensor(self.targets)


class FakeData(_Images):
    """Random images, which torchvision itself has for trials."""

    def __init__(self, image_size: tuple[int, int, int], transform: Callable | None = None) -> None:
        channels, height, width = image_size
        self.shape, self.number_of_classes = (height, width, channels), 10
        super().__init__(transform=transform)
