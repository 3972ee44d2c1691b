"""Stands in for torchtext: tokens, a vocabulary and seeded pairs of sentences. Importing it seeds the generators, as torchvision's does."""

import public_seed  # noqa: F401 - it seeds
