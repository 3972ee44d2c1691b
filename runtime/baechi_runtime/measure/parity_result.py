"""The distance of a placed step from the unplaced one: the value that is reported, and the error where it is too large."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from baechi_ext.errors import ParityError

UNPLACED_RANDOMNESS = "look for randomness outside torch in the model"
_FEW = 8


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of one tensor; see baechi_runtime.measure.comparator for the rules."""

    absolute: float = 0.0
    relative: float = 0.0
    why: str = ""
    """The reason for an infinite one: "missing", another shape, a NaN, ..."""


@dataclass(frozen=True, slots=True)
class Parity:
    """The largest differences over all compared tensors; relative to the largest magnitude in the unplaced step's tensor."""

    passed: bool
    max_abs_diff: float
    max_rel_diff: float
    worst: str
    compared: int
    tolerance: float
    beyond: tuple[tuple[str, Difference], ...] = field(default=(), repr=False)
    """The tensors that differ by more than the tolerance, with the worst first. They are in the error, not in reports."""

    @classmethod
    def of(cls, differences: Mapping[str, Difference], compared: int, tolerance: float) -> "Parity":
        """The parity that `differences`, by name, amount to; of equally large ones the first name is the worst."""
        ranked = sorted(differences.items(), key=lambda item: (-item[1].relative, item[0]))
        worst, most = (ranked[0][0], ranked[0][1].relative) if ranked else ("", 0.0)
        largest = max((d.absolute for d in differences.values()), default=0.0)
        beyond = tuple((name, d) for name, d in ranked if d.relative > tolerance)
        return cls(most <= tolerance, largest, most, worst, compared, tolerance, beyond)


def in_json(difference: float) -> float | None:
    """The difference as reports have it: JSON has no infinity, so null stands for it."""
    return difference if math.isfinite(difference) else None


def require_parity(parity: Parity, *, advice: str = UNPLACED_RANDOMNESS) -> None:
    """Raises ParityError where the check did not pass, with the worst few tensors, how far off they are, the tolerance, and what to do."""
    if parity.passed:
        return
    worst = parity.beyond[:_FEW] or [(parity.worst, Difference(parity.max_abs_diff, parity.max_rel_diff))]
    few = ", ".join(f"{name} ({d.why or f'{d.relative:.2g} relative'})" for name, d in worst)
    more = f" and {len(parity.beyond) - _FEW} more" if len(parity.beyond) > _FEW else ""
    raise ParityError(f"the placed step differs from the unplaced one (allowed {parity.tolerance:g}): {few}{more}; {advice}")
