"""Synthetic images for the models that classify them."""

import numpy as np


def synthetic(batch_size: int, size: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Random images (batch, size, size, 3) and labels (batch,), drawn from numpy's global seed as Keras draws weights from its own."""
    images = np.random.standard_normal((batch_size, size, size, 3)).astype(np.float32)
    return images, np.random.randint(classes, size=batch_size, dtype=np.int32)
