"""Data sets of seeded random images: each class has a pattern of its own, and each image noise, so that there is something to learn."""

from collections.abc import Callable
from pathlib import Path
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


class _Pairs(Dataset):
    """Pairs of a picture and its class, both after the script's transforms."""

    transform: Callable | None
    target_transform: Callable | None

    def pair(self, picture: Any, target: Any) -> tuple[Any, Any]:
        picture = picture if self.transform is None else self.transform(picture)
        return picture, target if self.target_transform is None else self.target_transform(target)


class _Images(_Pairs):
    """Seeded images, as many as the environment asks for."""

    shape: tuple[int, ...] = (32, 32, 3)
    number_of_classes = 10

    def __init__(
        self, root: str = "", train: bool = True, transform: Callable | None = None, target_transform: Callable | None = None, **_: Any
    ) -> None:
        self.root, self.train, self.transform, self.target_transform = root, train, transform, target_transform
        self.data, self.targets = images(length(train), self.shape, self.number_of_classes, seed=1 + train)
        self.classes = [str(name) for name in range(self.number_of_classes)]
        self.class_to_idx = {name: index for index, name in enumerate(self.classes)}

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.pair(Image.fromarray(np.asarray(self.data[index])), int(self.targets[index]))


class CIFAR10(_Images):
    """60,000 photographs of 32 x 32 elsewhere."""

    @property
    def train_data(self) -> np.ndarray:
        """The bytes, under the name that they once had."""
        return self.data


class CIFAR100(_Images):
    """A hundred classes."""

    number_of_classes = 100


class SVHN(_Images):
    """House numbers elsewhere."""


class STL10(_Images):
    """Photographs of 96 x 96 elsewhere."""

    shape = (96, 96, 3)

    def __init__(self, root: str = "", split: str = "train", **rest: Any) -> None:
        super().__init__(root, split != "test", **rest)


class MNIST(_Images):
    """Grey pictures, whose bytes and classes are tensors."""

    shape = (28, 28)

    def __init__(self, root: str = "", train: bool = True, *rest: Any, **more: Any) -> None:
        super().__init__(root, train, *rest, **more)
        self.data, self.targets = torch.from_numpy(self.data), torch.tensor(self.targets)
        self.train_data = self.test_data = self.data
        self.train_labels = self.test_labels = self.targets


class FashionMNIST(MNIST):
    """Clothes elsewhere."""


class FakeData(_Images):
    """Random images, which torchvision itself has for trials."""

    def __init__(
        self, size: int = 0, image_size: tuple[int, int, int] = (3, 224, 224), num_classes: int = 10, transform: Callable | None = None
    ) -> None:
        channels, height, width = image_size
        self.shape, self.number_of_classes = (height, width, channels), num_classes
        super().__init__(transform=transform)


class ImageFolder(_Pairs):
    """The pictures of a folder's folders, one class each."""

    def __init__(self, root: str, transform: Callable | None = None, target_transform: Callable | None = None) -> None:
        self.root, self.transform, self.target_transform = root, transform, target_transform
        self.classes = sorted(path.name for path in Path(root).iterdir() if path.is_dir())
        self.class_to_idx = {name: index for index, name in enumerate(self.classes)}
        self.samples = [(str(p), i) for i, name in enumerate(self.classes) for p in sorted((Path(root) / name).iterdir())]
        self.imgs, self.targets = self.samples, [index for _, index in self.samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        path, target = self.samples[index]
        return self.pair(Image.open(path).convert("RGB"), target)
