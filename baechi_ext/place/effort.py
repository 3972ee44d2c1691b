"""The effort that a search may take, and its clock."""

import sys
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Effort:
    """The most that a search may take, by either measure."""

    simulated_ops: float = float("inf")
    seconds: float = float("inf")
    """Compiling the search, where that has to be done, comes on top."""


def clock_seconds() -> float:
    """Seconds on a clock that stands still while kernels are compiled, which the first run does for all."""
    jit = sys.modules.get("baechi_ext.simulate.jit")
    return time.perf_counter() - (0.0 if jit is None else jit.compiling_seconds())
