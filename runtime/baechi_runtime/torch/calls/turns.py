"""The live contract on speed: in the first steps placed and plain take turns, and the slower one is dropped.

A step is the time from one call to the next: all that the user's loop does is in it, in both ways alike. A loop may call a module several
times in one of its own steps, so the turns are in blocks of four, placed-plain-plain-placed and then the other way round: calls that come
by twos fall to both alike.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from baechi_runtime.measure.samples import NOISY_SPREAD, Ratio, Samples
from baechi_runtime.torch.lowering.devices import TorchDevice, settle

PLACED, PLAIN = "placed", "plain"
PER_BLOCK = 2
"""Steps of either kind in a block."""
BLOCKS = 4
"""Number of blocks that decide if all of them say the same, and clearly enough for the report's verdict; otherwise up to MOST_BLOCKS."""
MOST_BLOCKS = 10
_PLAINLY = (1.5, 1.15)
"""Factors by which plain steps must be faster in the first block, or in each of the first two, to decide at once."""


@dataclass
class Turns:
    """Decides which of the two runs the next step."""

    placed_us: list[float] = field(default_factory=list)
    plain_us: list[float] = field(default_factory=list)
    decided: str = ""
    """PLACED or PLAIN; empty while they take turns."""
    alone: bool = False
    """Placed steps alone are timed, as many as would take turns at most: they are kept, whatever they take."""
    _begun: float | None = None

    def begin(self, devices: Sequence[TorchDevice] = ()) -> str:
        """Begin a step on these devices, which are waited for: a step's time has all of its work in it. Returns what runs it."""
        if self.decided:
            return self.decided
        settle(devices)
        now = time.perf_counter()
        if self._begun is not None:
            self._take((now - self._begun) * 1e6)
        self._begun = now
        return self.decided or self._mode()

    def disturbed(self) -> None:
        """Discard the time of the step under way: something else was done in it, such as verifying."""
        self._begun = None

    def _mode(self) -> str:
        if self.alone:
            return PLACED
        block, position = divmod(len(self.placed_us) + len(self.plain_us), 2 * PER_BLOCK)
        first = PLACED if block % 2 == 0 else PLAIN
        return first if position in (0, 3) else ({PLACED, PLAIN} - {first}).pop()

    def _take(self, step_us: float) -> None:
        (self.placed_us if self._mode() == PLACED else self.plain_us).append(step_us)
        if self.alone:
            self.decided = PLACED if len(self.placed_us) == PER_BLOCK * MOST_BLOCKS else ""
        elif (len(self.placed_us) + len(self.plain_us)) % (2 * PER_BLOCK) == 0:
            self.decided = self._decision()

    def _decision(self) -> str:
        blocks = [slice(i, i + PER_BLOCK) for i in range(0, len(self.placed_us), PER_BLOCK)]
        ratios = [sum(self.placed_us[block]) / max(sum(self.plain_us[block]), 1e-3) for block in blocks]
        if len(ratios) <= len(_PLAINLY) and min(ratios) > _PLAINLY[len(ratios) - 1]:
            return PLAIN
        agree = sum(r < 1 for r in ratios) in (0, len(ratios))
        if len(ratios) >= MOST_BLOCKS or (len(ratios) >= BLOCKS and agree and self._is_clear):
            return PLACED if self.saved_us > 0 else PLAIN
        return ""

    @property
    def _is_clear(self) -> bool:
        """False while the ratio's interval is too wide to say how much is gained."""
        return Ratio.of_script(Samples(self.plain_us), Samples(self.placed_us), PER_BLOCK).spread <= NOISY_SPREAD

    @property
    def saved_us(self) -> float:
        """Microseconds that placing saves per step, by the means of all but the longest step of each kind; negative where it costs."""
        if not self.placed_us or not self.plain_us:
            return 0.0
        placed, plain = (statistics.fmean(sorted(us)[: max(1, len(us) - 1)]) for us in (self.placed_us, self.plain_us))
        return plain - placed
