"""Python's and NumPy's global generators of random numbers, kept as a user's script has them."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def python_generators_kept() -> Iterator[None]:
    """Python's and NumPy's own generators are afterwards as they were: packages that are imported, and searches, draw from them."""
    numpy = sys.modules.get("numpy")
    before, of_numpy = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
