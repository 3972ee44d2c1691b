"""Recording placed steps of a script as it runs: some of its ordinary steps are traced. They compute what all others do; none is added."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.tensorflow.placed_step import PlacedStep
from runtime.tensorflow.step_recorder import RUNS

WARM_UP = 1
"""So many steps behind the verified ones are not traced."""


class TracedCalls:
    """Runs the steps of one shape, and keeps the traces of the first ones behind a warm-up."""

    def __init__(self) -> None:
        self.traces: list[Any] = []
        self._begun = 0

    def run(self, step: PlacedStep, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """See PlacedStep.run."""
        self._begun += 1
        if not WARM_UP < self._begun <= WARM_UP + RUNS:
            return step.run(inputs)
        results, trace = step.traced(inputs)
        self.traces.append(trace)
        return results
