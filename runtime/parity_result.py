"""How far a placed step is from the unplaced one."""

from dataclasses import dataclass
from typing import Any

from baechi_ext.errors import ParityError


@dataclass(frozen=True, slots=True)
class Parity:
    """The largest differences over all compared tensors; relative to the largest magnitude in the unplaced step's tensor."""

    passed: bool
    max_abs_diff: float
    max_rel_diff: float
    worst: str
    compared: int
    tolerance: float

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "max_abs_diff": self.max_abs_diff,
            "max_rel_diff": self.max_rel_diff,
            "worst": self.worst,
            "compared": self.compared,
            "tolerance": self.tolerance,
        }


def require_parity(parity: Parity) -> None:
    """Raises ParityError, naming the worst tensor, where the check did not pass."""
    if not parity.passed:
        raise ParityError(
            f"the placed step differs from the unplaced one: {parity.worst} by {parity.max_rel_diff:.3g} relative "
            f"(allowed {parity.tolerance:g}); look for randomness outside torch in the model, or drop --relaxed_random"
        )
