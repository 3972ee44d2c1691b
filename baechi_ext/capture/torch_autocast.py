"""Autocast around a call."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Autocast = tuple[tuple[str, "torch.dtype", bool], ...]
"""Per kind of device the dtype of autocast, and whether it is on: torch.autocast's arguments."""


def autocast_now() -> Autocast:
    """Autocast around the caller."""
    import torch

    kinds = ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)
    return tuple((kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds)


@contextmanager
def under(autocast: Autocast) -> Iterator[None]:
    """Within, autocast is that; as it is, where nothing is said of it."""
    import torch

    with ExitStack() as stack:
        for state in autocast:
            stack.enter_context(torch.autocast(*state))
        yield


@contextmanager
def without_autocast() -> Iterator[None]:
    """Within, ops compute in the types that they are given: a captured graph holds its casts, and autocast would make others in it, in what
    it was told to leave alone as well. It is a thread's own, so a device's thread has none."""
    import torch

    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
