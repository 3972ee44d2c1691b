"""Pairs of sentences; PUBLIC_TRAIN and PUBLIC_TEST say how many."""

import random
from types import SimpleNamespace
from typing import Any

from public_seed import length

multi30k = SimpleNamespace(URL={})
"""Where the sentences are elsewhere."""


class Multi30k(list):
    """Sentences of made-up words, and the same words in reverse order in another language."""

    def __init__(self, split: str = "train", **_: Any) -> None:
        generator = random.Random(split)
        for _index in range(length(split == "train")):
            words = [generator.randrange(400) for _ in range(generator.randrange(6, 14))]
            self.append((" ".join(f"de{word}" for word in words), " ".join(f"en{word}" for word in reversed(words))))
