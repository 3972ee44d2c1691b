"""NASNet-A of keras.applications (Zoph et al. 2018), fresh weights: stem, N normal cells, a reduction cell, N, a reduction cell, N.

Keras has the networks for ImageNet only, whose stem is a convolution of stride 2 and two reduction cells.
"""

from dataclasses import dataclass

import keras
import numpy as np

# The network with its sizes free; keras.applications.nasnet exports two fixed ones.
from keras.src.applications.nasnet import NASNet

from baechi_ext.errors import OptionError
from baechi_runtime.models.tensorflow.images import synthetic

CLASSES, SMALLEST_IMAGE = 1000, 32


@dataclass(frozen=True, slots=True)
class Options:
    """By default the paper's 4 @ 1056 (mobile). None: 8 images of 224 pixels, 4 cells and 44 filters, or `large`: 2 of 331, 6 and 168."""

    batch_size: int | None = None
    image_size: int | None = None
    """Height and width in pixels."""
    nasnet_cells: int | None = None
    """N, the normal cells between reductions."""
    nasnet_filters: int | None = None
    """F, the filters of the first cells; the last ones end in 24 F channels."""
    large: bool = False
    """6 @ 4032."""


def build(options: Options) -> tuple[keras.Model, tuple[np.ndarray, ...]]:
    """The model, which returns logits, random images and labels. Raises OptionError for images or filters it cannot take."""
    batch, size, cells, filters = (2, 331, 6, 168) if options.large else (8, 224, 4, 44)
    batch, size = options.batch_size or batch, options.image_size or size
    cells, filters = options.nasnet_cells or cells, options.nasnet_filters or filters
    if size < SMALLEST_IMAGE:
        raise OptionError(f"--image_size={size} is too small for nasnet; it takes {SMALLEST_IMAGE} pixels or more")
    if filters % 4:
        raise OptionError(f"--nasnet_filters={filters} does not suit nasnet; it takes a multiple of 4")
    model = NASNet(
        input_shape=(size, size, 3),
        penultimate_filters=24 * filters,
        num_blocks=cells,
        stem_block_filters=96 if options.large else 32,
        skip_reduction=options.large,
        weights=None,
        classes=CLASSES,
        classifier_activation=None,
    )
    return model, synthetic(batch, size, CLASSES)
