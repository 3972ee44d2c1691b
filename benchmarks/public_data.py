"""Files that stand in for public data: seeded words, pictures and graphs, as the scripts expect them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image


def words(path: Path, *, lines: int, vocabulary: int = 500, seed: int = 0, pair: bool = False, end: str = "") -> None:
    """Sentences of made-up words, each likely after the one before it; with `pair` two of them in a line, between them a tab."""
    generator = np.random.default_rng(seed)
    names = [f"w{index:04d}" for index in range(vocabulary)]

    def sentence() -> str:
        at = int(generator.integers(vocabulary))
        found = []
        for _ in range(int(generator.integers(6, 16))):
            found.append(names[at])
            at = (3 * at + int(generator.integers(4))) % vocabulary
        return " ".join(found) + end

    rows = [f"{sentence()}\t{sentence()}" if pair else sentence() for _ in range(lines)]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def letters(path: Path, *, characters: int, seed: int = 0, begin: str = "") -> None:
    """Text of letters, spaces and full stops, each likely after the one before it."""
    generator = np.random.default_rng(seed)
    alphabet = "abcdefghijklmnopqrstuvwxyz .\n"
    steps = generator.integers(0, 5, characters).tolist()
    at, found = 0, []
    for step in steps:
        at = (7 * at + step) % len(alphabet)
        found.append(alphabet[at])
    path.write_text(begin + "".join(found), encoding="utf-8")


def pictures(path: Path, *, number: int, height: int, width: int, seed: int = 0, masks: bool = False) -> None:
    """Pictures of coloured rectangles in a folder; with `masks` which pixels are in one, as a picture of two values."""
    generator = np.random.default_rng(seed)
    path.mkdir(parents=True, exist_ok=True)
    for index in range(number):
        pixels = np.full((height, width) if masks else (height, width, 3), 0 if masks else 30, np.uint8)
        for _ in range(4):
            y, x = (int(generator.integers(0, side * 3 // 4)) for side in (height, width))
            tall, wide = (int(generator.integers(side // 8, side // 4)) for side in (height, width))
            colour = generator.integers(60, 256, 3)
            pixels[y : y + tall, x : x + wide] = 255 if masks else colour
        Image.fromarray(pixels).save(path / f"{index:03d}.png")


def cora(path: Path, *, cites: str, features: int = 1433, seed: int = 0) -> None:
    """Papers as in the data set Cora: a name, words or not, and one of 7 subjects; those that the file `cites` beside it names."""
    names = sorted({word for line in (path.parent / cites).read_text(encoding="ascii").splitlines() for word in line.split()}, key=int)
    generator = np.random.default_rng(seed)
    subjects = generator.integers(0, 7, len(names))
    likely = generator.random((7, features)) * 0.03
    has = generator.random((len(names), features)) < likely[subjects]
    has[:, 0] = True
    rows = ("\t".join([name, *map(str, row.astype(int)), f"subject_{at}"]) for name, row, at in zip(names, has, subjects, strict=True))
    path.write_text("\n".join(rows) + "\n", encoding="ascii")


def array(path: Path, *, shape: list[int], seed: int = 0) -> None:
    """An array of numbers from 0 to 1, for numpy.load."""
    np.save(path, np.random.default_rng(seed).random(shape))


WRITERS: dict[str, Callable[..., None]] = {w.__name__: w for w in (words, letters, pictures, cora, array)}
"""Writers by the `kind` in the data of `benchmarks/public_scripts.json`."""
