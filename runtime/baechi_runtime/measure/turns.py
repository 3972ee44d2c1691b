"""The live contract on speed: in the first steps placed and plain take turns, and the slower one is dropped.

A step is the time from one call to the next: all that the user's loop does is in it, in both ways alike. A loop may call a module several
times in one of its own steps, so the turns are in blocks of four, placed-plain-plain-placed or the other way round: calls that come by twos
fall to both alike. Which way round follows the Thue-Morse sequence, so that every eighth step, or every sixteenth, does so, too: an epoch's
last one has the validation in it.

Placed steps that are faster on a machine too noisy to say by how much go on with a block now and then, until it is clear. Steps of one
module are timed at a time in a process, as each would be part of another's.
"""

import math
import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baechi_runtime.measure.samples import NOISY_SPREAD, Ratio, Samples

PLACED, PLAIN = "placed", "plain"
PER_BLOCK = 2
"""Steps of either kind in a block."""
BLOCKS = 4
"""Number of blocks that decide if all of them say the same, and clearly enough for the report's verdict; otherwise there are more."""
MOST_BLOCKS = 10
"""Number of blocks after which the faster is known, however the noise; further ones, with rests in between, say how much faster placed
ones are."""
LAST_BLOCK = 40
"""The number of blocks after which it stays unclear."""
REST_SHARE = 0.1
"""The share of a script's time that plain steps of blocks with rests in between may cost."""
GONE = 40
"""The number of steps of other kinds in a row after which the kind of call that takes turns is taken to come no more."""
_VAIN = 40
"""The number of steps in a row that something disturbed, after which the timing is left to others."""
_LEFT_SECONDS = 30.0
"""Turns that nobody has asked for so long are left to others."""
_PLAINLY = (1.5, 1.15)
"""Factors by which plain steps must be faster in the first block, or in each of the first two, to decide at once."""
_timed: "list[Turns]" = []
"""Those whose steps are timed: one at a time in a process."""
_alone: "weakref.WeakSet[Turns]" = weakref.WeakSet()
"""Those of which placed steps alone are timed."""


@dataclass(eq=False)
class Turns:
    """Decides which of the two runs the next step."""

    placed_us: list[float] = field(default_factory=list)
    plain_us: list[float] = field(default_factory=list)
    decided: str = ""
    """PLACED or PLAIN; empty while they take turns."""
    rest: int = 0
    """Placed steps that are still to run before the next block."""
    alone: bool = False
    """Placed steps alone are timed, as many as would take turns at most: they are kept, whatever they take."""
    _begun: float | None = None
    _asked: float = 0.0
    _vain: int = 0
    """Steps in a row that have no time."""

    def __post_init__(self) -> None:
        if self.alone:
            _alone.add(self)

    def now(self) -> str:
        """PLACED or PLAIN, if that is known without timing the step that begins; otherwise empty."""
        if not self.decided and self.rest:
            self.rest -= 1
            return PLACED
        return self.decided

    def join(self) -> bool:
        """True if its steps may be timed now; otherwise those of others are."""
        first = next(iter(_timed), None)  # which may leave just now, in another thread
        if first is not None and (time.perf_counter() - first._asked > _LEFT_SECONDS or first._vain > _VAIN):
            _timed.clear()  # whose steps these were is no longer called, or never undisturbed
            first = None
        if first is None:
            _timed.append(self)
            first = self
        self._asked = time.perf_counter()
        if first is not self:
            self.disturbed()
        return first is self

    def leave(self) -> None:
        """Leave the timing of steps to others."""
        if self in _timed:
            _timed.clear()

    @property
    def meanwhile(self) -> str:
        """The kind of the steps that run while those of others are timed: the faster kind, once it is known."""
        return PLACED if len(self.placed_us) >= PER_BLOCK * MOST_BLOCKS else PLAIN

    def begin(self, settle: Callable[[], object] = tuple) -> str:
        """Begin a step. `settle` waits for the devices: a step's time has all of its work in it. Returns what runs it."""
        if known := self.now():
            return known
        settle()
        now = time.perf_counter()
        if self._begun is None:
            self._vain += 1
        else:
            self._take((now - self._begun) * 1e6)
            self._vain = 0
        self._begun = None if self.rest else now
        return self.now() or self._mode()

    def prepared(self) -> None:
        """Leave out of the time of the step under way what came up to now, such as moving variables to where it runs."""
        if self._begun is not None:
            self._begun = time.perf_counter()

    def disturbed(self) -> None:
        """Discard the time of the step under way: something else was done in it, such as verifying."""
        self._begun = None

    def disturb_all(self) -> None:
        """Discard the time of the step under way, here and where steps are timed."""
        self.disturbed()
        disturb_timed()

    def _mode(self) -> str:
        if self.alone:
            return PLACED
        block, position = divmod(len(self.placed_us) + len(self.plain_us), 2 * PER_BLOCK)
        first = PLACED if block.bit_count() % 2 == 0 else PLAIN
        return first if position in (0, 3) else ({PLACED, PLAIN} - {first}).pop()

    def _take(self, step_us: float) -> None:
        (self.placed_us if self._mode() == PLACED else self.plain_us).append(step_us)
        if self.alone:
            self.decided = PLACED if len(self.placed_us) == PER_BLOCK * MOST_BLOCKS else ""
        elif (len(self.placed_us) + len(self.plain_us)) % (2 * PER_BLOCK) == 0:
            self.decided = self._decision()

    def _decision(self) -> str:
        """The kind that is kept from now on; empty where more blocks are needed, for which `rest` is set once the faster kind is known."""
        blocks = [slice(i, i + PER_BLOCK) for i in range(0, len(self.placed_us), PER_BLOCK)]
        ratios = [sum(self.placed_us[block]) / max(sum(self.plain_us[block]), 1e-3) for block in blocks]
        if len(ratios) <= len(_PLAINLY) and min(ratios) > _PLAINLY[len(ratios) - 1]:
            return PLAIN
        if len(ratios) >= MOST_BLOCKS:
            if self.saved_us <= 0:
                return PLAIN
            if len(ratios) >= LAST_BLOCK or self._is_clear:
                return PLACED
            self.rest = math.ceil(PER_BLOCK * self.saved_us / (REST_SHARE * statistics.median(self.placed_us)))
        elif len(ratios) >= BLOCKS and sum(r < 1 for r in ratios) in (0, len(ratios)) and self._is_clear:
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
        return _mean_us(self.plain_us) - _mean_us(self.placed_us)

    @property
    def why_plain(self) -> str:
        """Why plain steps are kept, once that is decided: by the means of `saved_us`, or by all of the first few steps."""
        left_out = int(self.saved_us <= 0)
        plain, placed = (f"{_mean_us(us, left_out) / 1000:.1f} ms" if us else "nothing measured" for us in (self.plain_us, self.placed_us))
        return f"plain steps are faster: {plain} against {placed} placed; --keep_placed stays placed"


def disturb_timed() -> None:
    """Discard the time of the step under way where steps are timed."""
    for turns in (*_timed, *_alone):
        turns.disturbed()


def _mean_us(us: Sequence[float], left_out: int = 1) -> float:
    """The mean of all but the longest ones."""
    return statistics.fmean(sorted(us)[: max(1, len(us) - left_out)])
