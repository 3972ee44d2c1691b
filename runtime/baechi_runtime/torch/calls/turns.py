"""The live contract on speed: in the first steps placed and plain take turns, and the slower one is dropped; again later if steps change.

A step is the time from one call to the next: all that the user's loop does is in it, in both ways alike. A loop may call a module several
times in one of its own steps, so the turns are in blocks of four, placed-plain-plain-placed and then the other way round: calls that come
by twos fall to both alike.
"""

import statistics
import time
from collections import deque
from dataclasses import dataclass, field

PLACED, PLAIN = "placed", "plain"
BLOCKS = 4
"""Number of blocks that decide if all of them say the same; otherwise up to MOST_BLOCKS."""
MOST_BLOCKS = 6
_PLAINLY = (1.5, 1.15)
"""Factors by which plain steps must be faster in the first block, or in each of the first two, to decide at once."""
_WATCHED = 20
_WORSE = 1.3
"""Factor by which steps must take longer than the other kind did for the question to be asked again."""
_MOST_TRIALS = 3


@dataclass
class Turns:
    """Decides which of the two runs the next step."""

    trials: int = 1
    """Trials so far, this one included."""
    placed_us: list[float] = field(default_factory=list)
    plain_us: list[float] = field(default_factory=list)
    decided: str = ""
    """PLACED or PLAIN; empty while they take turns."""
    _begun: float | None = None
    _last: deque[float] = field(default_factory=lambda: deque(maxlen=_WATCHED))

    def begin(self) -> str:
        """Begin a step; returns what runs it."""
        now = time.perf_counter()
        if self._begun is not None:
            self._take((now - self._begun) * 1e6)
        self._begun = now
        return self.decided or self._mode()

    def disturbed(self) -> None:
        """Discard the time of the step under way: something else was done in it, such as verifying."""
        self._begun = None

    def _mode(self) -> str:
        block, position = divmod(len(self.placed_us) + len(self.plain_us), 4)
        first = PLACED if block % 2 == 0 else PLAIN
        return first if position in (0, 3) else ({PLACED, PLAIN} - {first}).pop()

    def _take(self, step_us: float) -> None:
        if self.decided:
            self._last.append(step_us)
            return
        (self.placed_us if self._mode() == PLACED else self.plain_us).append(step_us)
        if (len(self.placed_us) + len(self.plain_us)) % 4 == 0:
            self.decided = self._decision()

    def _decision(self) -> str:
        ratios = [sum(self.placed_us[i : i + 2]) / max(sum(self.plain_us[i : i + 2]), 1e-3) for i in range(0, len(self.placed_us), 2)]
        if len(ratios) <= len(_PLAINLY) and min(ratios) > _PLAINLY[len(ratios) - 1]:
            return PLAIN
        faster = sum(r < 1 for r in ratios)
        if len(ratios) >= MOST_BLOCKS or (len(ratios) >= BLOCKS and faster in (0, len(ratios))):
            return PLACED if self.saved_us > 0 else PLAIN
        return ""

    @property
    def saved_us(self) -> float:
        """Microseconds that placing saves per step, by the means of all but the longest step of each kind; negative where it costs."""
        if not self.placed_us or not self.plain_us:
            return 0.0
        placed, plain = (statistics.fmean(sorted(us)[: max(1, len(us) - 1)]) for us in (self.placed_us, self.plain_us))
        return plain - placed

    def changed(self) -> bool:
        """True if steps now take so much longer than the other kind did that the question is to be asked again."""
        if not self.decided or self.trials >= _MOST_TRIALS or len(self._last) < _WATCHED:
            return False
        other = self.plain_us if self.decided == PLACED else self.placed_us
        now = statistics.median(self._last)
        self._last.clear()
        return bool(other) and now > _WORSE * statistics.median(other)

    def again(self) -> "Turns":
        """A further trial."""
        return Turns(self.trials + 1)
