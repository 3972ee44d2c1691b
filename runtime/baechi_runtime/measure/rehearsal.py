"""A step predicted by a few real ones: so are a framework's own engines, and plans whose predictions are nearer to each other than they
are to what the plans take."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from baechi_runtime.measure.samples import LoadOfOthers
from baechi_runtime.measure.timing import StepTimes

_LEAST_STEPS, _MOST_STEPS, _SECONDS = 3, 100, 1.5
"""There are some steps, more where they are short."""
_FIRST_STEPS = 2
"""Steps that are not counted: they make what later ones have, buckets and the optimizer's state."""
_TELLING_SECONDS = 0.5
"""The system counts the time of others in hundredths of a second, so their share of less time is not known."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The way to predict a step by real ones. `as_profiled`: as placed ops are, without what others on the machine take meanwhile: by the
    clock, less their share of it, and by the processor's time at least; otherwise by the clock. A step that takes more than
    `enough_seconds` is not looked at for long."""

    as_profiled: bool = False
    enough_seconds: float = math.inf

    def placed_us(self, run: Callable[[], StepTimes], others: Callable[[], LoadOfOthers]) -> float:
        """Microseconds of a step that `run` runs; its values go on with it. `others` begins to count what others take of the cores."""

        def timed() -> Sequence[float]:
            times = run()
            return [times.wall_us / 1e6, max(times.busy_us, default=0.0) / 1e6]

        return 1e6 * self.typical(*self.steps(timed, others))

    def steps(self, timed: Callable[[], Sequence[float]], others: Callable[[], LoadOfOthers]) -> tuple[np.ndarray, float]:
        """A row of each step, which are its seconds by the clock and of the processor in front, and the share of the cores that others took
        meanwhile."""
        for _ in range(_FIRST_STEPS):
            timed()
        load, hopeless, spent = others(), False, 0.0
        rows: list[Sequence[float]] = []
        while not hopeless and len(rows) < _MOST_STEPS and (len(rows) < _LEAST_STEPS or spent < _SECONDS):
            rows.append(timed())
            wall, busy = rows[-1][:2]
            hopeless = (busy if self.as_profiled else wall) > self.enough_seconds
            spent += wall
        return np.array(rows), (load.share() or 0.0) if spent > _TELLING_SECONDS else 0.0

    def typical(self, rows: np.ndarray, share: float) -> float:
        """The seconds of a step, from such rows and that share."""
        wall, busy = np.median(rows[:, :2], axis=0)
        return float(min(wall, max(busy, wall * (1 - share))) if self.as_profiled else wall)
