"""Autocast around a placed call, which is not to reach into it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def without_autocast() -> Iterator[None]:
    """Within, ops compute in the types that they are given: a captured graph holds its casts, and autocast would make others in it, in what
    it was told to leave alone as well. It is a thread's own, so a device's thread has none."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
