"""Python's cycle collector, kept from what is no garbage: large builds of values, and packages."""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Builds without the collector: for millions of small values in no cycle, which it would look through again and again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def importing() -> Iterator[None]:
    """Imports without the collector. What packages make stays for good: no collection looks through it, then or later, nor through all
    that the process held before. With torch a third of the import, and most of the second that Python takes to end, were such collections.
    """
    with without_collection():
        yield
    gc.freeze()
    if "triton" in sys.modules:  # when Python ends, it lists on stderr what of its own was never collected
        atexit.register(gc.unfreeze)
