"""wide_towers: four independent towers of large matrix products, joined at the end by one linear layer. The simplest model that is worth
splitting: much computing, and hardly a byte to send."""

import re
from dataclasses import dataclass

import keras
import numpy as np
from keras import layers

from baechi_ext.errors import OptionError
from baechi_runtime.models.tensorflow.images import synthetic

TOWERS, CLASSES = 4, 10


@dataclass(frozen=True, slots=True)
class Options:
    batch_size: int = 512
    image_size: int = 16
    """Height and width in pixels; all of an image is one row of the first product."""
    num_layers: int = 4
    """Layers of each tower, after the first one."""
    d_model: int = 1024
    """Units of each layer."""


class WideTowers(keras.Model):
    """Images (batch, size, size, 3) -> logits (batch, 10)."""

    @staticmethod
    def expert_device(name: str) -> int | None:
        """Tower i on device i, taken modulo their number; what joins them on the last tower's."""
        if found := re.search(r"tower_(\d+)", name):
            return int(found[1])
        return TOWERS - 1 if re.search(r"(^|/)join", name) else None


def build(options: Options) -> tuple[keras.Model, tuple[np.ndarray, ...]]:
    """The model, random images and labels. Raises OptionError for images that are too small."""
    size = options.image_size
    if size < 1:
        raise OptionError(f"--image_size={size} is too small for wide_towers; it takes 1 pixel or more")
    images = keras.Input((size, size, 3))
    pixels = layers.Flatten(name="pixels")(images)
    tops = []
    for tower in range(TOWERS):
        x = pixels
        for layer in range(1 + options.num_layers):
            x = layers.Dense(options.d_model, "relu", name=f"tower_{tower}_layer_{layer}")(x)
        tops.append(x)
    logits = layers.Dense(CLASSES, name="join")(layers.Concatenate(name="join_towers")(tops))
    return WideTowers(images, logits), synthetic(options.batch_size, size, CLASSES)
