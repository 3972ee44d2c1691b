"""The grouping that a plan for servers begins with: a transfer between them takes some 0.1 ms from the devices, however small, and ops one
by one would pay that thousands of times."""

COARSE = "grain", "fusion"
"""Grouper and placer type, unless one is given."""
_AS_TOLD = ("single", "expert")
"""Methods that have nothing to gain from groups."""


def begins_coarse(method: str) -> bool:
    """True if the method gains from groups."""
    return method not in _AS_TOLD
