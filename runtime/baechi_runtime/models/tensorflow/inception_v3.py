"""Inception-V3 of keras.applications (Szegedy et al., CVPR 2016), fresh weights: 23,851,784 parameters, of which 34,432 aren't trained."""

from dataclasses import dataclass

import keras
import numpy as np

from baechi_ext.errors import OptionError
from baechi_runtime.models.tensorflow.images import synthetic

CLASSES, SMALLEST_IMAGE = 1000, 75


@dataclass(frozen=True, slots=True)
class Options:
    batch_size: int = 32
    image_size: int = 299
    """Height and width in pixels."""


def build(options: Options) -> tuple[keras.Model, tuple[np.ndarray, ...]]:
    """The model, which returns logits, random images and labels. Raises OptionError for images that are too small."""
    size = options.image_size
    if size < SMALLEST_IMAGE:
        raise OptionError(f"--image_size={size} is too small for inception_v3; it takes {SMALLEST_IMAGE} pixels or more")
    model = keras.applications.InceptionV3(weights=None, input_shape=(size, size, 3), classes=CLASSES, classifier_activation=None)
    return model, synthetic(options.batch_size, size, CLASSES)
