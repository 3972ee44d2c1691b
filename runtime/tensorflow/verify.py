"""Whether a placed step computed what the unplaced one did: results and variables, compared.

Some variables are decided by rounding alone: Adam moves the bias before a normalisation, whose gradient ought to be 0, by what is left of
that 0, divided by its own size. Where variables differ, the unplaced step therefore runs again from values that are off by one unit in
their last place; what this changes as much is no fault of the placed step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from baechi_ext.errors import ParityError

TOLERANCE = 1e-5
PERTURBED_STEPS = 3
_MORE_THAN_ROUNDING = 4.0
"""Times what the perturbed steps changed."""
_FEW = 8

Values = Mapping[str, np.ndarray]


@dataclass
class Verification:
    """What was compared so far."""

    steps: int = 0
    compared: int = 0
    max_rel_diff: float = 0.0
    """Of what is decided by more than rounding."""
    rounding: set[str] = field(default_factory=set)
    """What is decided by rounding."""
    unplaced_us: list[float] = field(default_factory=list)
    """Wall times of the unplaced steps."""

    def to_json(self) -> dict[str, int | float]:
        found = {"steps": self.steps, "compared": self.compared, "max_rel_diff": self.max_rel_diff}
        return {**found, "decided_by_rounding": len(self.rounding)}

    def compare(self, expected: Values, actual: Values, perturbed: Callable[[int | None], Values]) -> None:
        """`perturbed(seed)`: what the unplaced step makes of values that are off by the last place, at random; None: of the very values.

        Raises ParityError, naming the results and variables that differ by more than the tolerance and by more than rounding does.
        """
        differences = {name: relative_difference(value, actual[name]) for name, value in expected.items()}
        wrong = {name: d for name, d in differences.items() if d > TOLERANCE}
        again = perturbed(None) if wrong else expected  # a step that differs by itself explains nothing
        same = [name for name in wrong if relative_difference(expected[name], again[name]) <= TOLERANCE]
        for seed in range(PERTURBED_STEPS if same else 0):
            other = perturbed(seed)
            noise = {name: _MORE_THAN_ROUNDING * relative_difference(expected[name], other[name]) for name in same}
            self.rounding.update(name for name in same if wrong[name] <= noise[name] < np.inf)
        self.max_rel_diff = max([self.max_rel_diff, *(d for name, d in differences.items() if name not in self.rounding)])
        self.compared += len(expected)
        self.steps += 1
        if said := [f"{name} ({d:.2g})" for name, d in wrong.items() if name not in self.rounding]:
            more = f" and {len(said) - _FEW} more" if len(said) > _FEW else ""
            raise ParityError(
                f"the placed step differs from the unplaced one (allowed {TOLERANCE:g}): {', '.join(said[:_FEW])}{more}; the step may "
                "depend on something that is no tensor and no variable, and changes from step to step. Take that out of it, or go on "
                "unplaced with fallback"
            )


def results_of(returned: Any) -> dict[str, np.ndarray]:
    """What a step returns, flat and by number; Python's numbers as the tensors that a graph makes of them."""
    values = [tf.convert_to_tensor(x) if isinstance(x, (bool, int, float)) else x for x in tf.nest.flatten(returned) if x is not None]
    return {f"result {i}": np.asarray(x) for i, x in enumerate(values)}


def off_by_the_last_place(value: np.ndarray, seed: int) -> np.ndarray:
    """Real numbers, each moved up or down to its neighbour; other values as they are."""
    if value.dtype.kind != "f":
        return value
    up = np.random.default_rng(seed).random(value.shape) < 0.5
    return np.nextafter(value, np.where(up, np.inf, -np.inf).astype(value.dtype))


def relative_difference(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference, beside 1 or the largest magnitude where that is more; infinite for other shapes and where one alone is
    no number. What ought to be 0, as a gradient before a normalisation, is rounding alone, so magnitudes below 1 don't count."""
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if a.size == 0 or np.array_equal(a, b):
        return 0.0
    if a.dtype.kind not in "fc":
        return float("inf")
    a, b = (x.astype(np.complex128 if a.dtype.kind == "c" else np.float64) for x in (a, b))
    alike = (a == b) | (np.isnan(a) & np.isnan(b))
    if not (np.isfinite(a) | alike).all() or not (np.isfinite(b) | alike).all():
        return float("inf")
    finite = np.isfinite(a)
    return float(np.abs(np.where(alike, 0.0, a - b)).max() / max(1.0, np.abs(a[finite]).max(initial=0.0)))
