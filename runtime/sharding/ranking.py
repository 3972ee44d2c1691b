"""Whether what was predicted to be faster is faster."""

from collections.abc import Sequence
from itertools import combinations


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Kendall's tau-b of two orders: 1 the same, -1 the reverse; None where one of them is no order (fewer than two, or all equal)."""
    agree = ties_p = ties_m = 0
    pairs = list(combinations(range(len(predicted)), 2))
    for i, j in pairs:
        p, m = _sign(predicted[i] - predicted[j]), _sign(measured[i] - measured[j])
        agree += p * m
        ties_p += not p
        ties_m += not m
    scale = (len(pairs) - ties_p) * (len(pairs) - ties_m)
    return agree / scale**0.5 if scale else None


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)
