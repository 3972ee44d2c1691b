"""Stands in for torchvision: seeded random images, the transforms that training scripts use, and networks without weights from elsewhere.

Importing it seeds the generators, which some scripts leave unseeded.
The variables PUBLIC_TRAIN and PUBLIC_TEST say how many images a data set has.
"""

import public_seed  # noqa: F401 - it seeds

from torchvision import datasets, models, transforms, utils

__all__ = ["datasets", "models", "transforms", "utils"]
