"""Measurements: raw samples, ratios of paired ones, and why a run is too noisy to conclude from."""

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, structs

Number = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
"""A finite number of at least 0, as reports have most."""
Time = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
"""A finite number of more than 0, as a step takes."""
NOISY_LOAD = 0.10
"""Others taking more than this share of the cores spoil a measurement."""
NOISY_SPREAD = 0.15
"""So does an interval of the median ratio wider than this share of the ratio."""
ERROR = 0.05
"""The share of cases in which an interval may miss what it is of: those of 95%."""


class Samples(Struct, frozen=True):
    """Raw wall times of one variant, in the order they were taken, with their statistics; in a file that does not keep them all, their
    median is one. Raises ValueError where there is none."""

    samples: Sequence[Time] = ()
    median: Number = 0.0
    min: Number = 0.0

    def __post_init__(self) -> None:
        if not len(self.samples) and not self.median:
            raise ValueError("expected steps")
        us = list(self.samples) or [self.median]
        for name, value in (("samples", us), ("median", statistics.median(us)), ("min", min(us))):
            structs.force_setattr(self, name, value)

    @property
    def us(self) -> tuple[float, ...]:
        return tuple(self.samples)

    def summed(self, size: int, count: int) -> "Samples":
        """The times of `count` blocks of `size` steps each, from the first on."""
        return Samples(tuple(sum(self.us[i * size : (i + 1) * size]) for i in range(count)))


def samples_by_name(**us: Sequence[float]) -> dict[str, Samples]:
    """The samples of these times, without those of which there are none."""
    return {name: Samples(tuple(times)) for name, times in us.items() if times}


class Ratio(Struct, frozen=True):
    """A speedup: the median of the ratios of paired samples, and an interval that holds the true median in 95 of 100 cases, or
    in all but the share `error` of them."""

    median: Number
    low: Number
    high: Number

    @classmethod
    def of(cls, slow: Samples, fast: Samples, error: float = ERROR) -> "Ratio":
        ratios = sorted(a / b for a, b in zip(slow.us, fast.us, strict=True))
        rank = _sign_test_rank(len(ratios), error)
        return cls(statistics.median(ratios), ratios[rank], ratios[-1 - rank])

    @classmethod
    def unpaired(cls, slow: Samples, fast: Samples, error: float = ERROR) -> "Ratio":
        """The ratio of the medians of samples that were not taken in turn; its interval is from theirs, which hold together."""
        slow_us, fast_us = sorted(slow.us), sorted(fast.us)
        i, j = _sign_test_rank(len(slow_us), error / 2), _sign_test_rank(len(fast_us), error / 2)
        return cls(slow.median / fast.median, slow_us[i] / fast_us[-1 - j], slow_us[-1 - i] / fast_us[j])

    @classmethod
    def of_script(cls, plain: Samples, placed: Samples, per_block: int) -> "Ratio":
        """The speedup of a script's steps: by blocks of this many steps of either kind, so that a machine that is slower for a while counts
        in both alike; where there are fewer than ENOUGH blocks, or steps were not taken so (0), of the medians."""
        blocks = min(len(plain.us), len(placed.us)) // per_block if per_block else 0
        if blocks < ENOUGH:
            return cls.unpaired(plain, placed)
        return cls.of(plain.summed(per_block, blocks), placed.summed(per_block, blocks))

    @property
    def spread(self) -> float:
        """Width of the interval over the median."""
        return (self.high - self.low) / self.median

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def enough_samples(error: float) -> int:
    """The least number of samples whose whole range misses the median in no more than this share of all cases."""
    return math.ceil(1 + math.log2(1 / error))


def too_wide(gain: Ratio | None) -> list[str]:
    """The reason why a gain tells nothing where its interval is too wide; none where it is not, or nothing is known."""
    if gain is None or gain.spread <= NOISY_SPREAD:
        return []
    return [f"the ratio's interval is {gain.spread:.0%} wide (more than {NOISY_SPREAD:.0%})"]


def too_few(steps: int, error: float = ERROR) -> list[str]:
    """The reason why so many pairs of steps tell nothing where they are too few for an interval; none where they are enough."""
    least = enough_samples(error)
    return [] if steps >= least else [f"fewer than {least} steps were measured"]


ENOUGH = enough_samples(ERROR)
ENOUGH_APART = enough_samples(ERROR / 2)
"""With fewer samples of either kind, not taken in turn, an interval of their ratio tells nothing for sure."""
_OF_A_SCRIPT = ("eager", "placed")


@cache
def _sign_test_rank(n: int, error: float) -> int:
    """The largest k for which the k-th smallest and k-th largest (from 0) of n values miss the median in no more than this share of cases.

    0 where n is too small for that: the whole range.
    """
    below, ways, k = 0, 1, 0
    most = int(Fraction(error) * 2**n / 2)
    while k <= n // 2:
        below += ways
        if below > most:
            break
        ways, k = ways * (n - k) // (k + 1), k + 1
    return max(0, k - 1)


@dataclass(frozen=True)
class Noise:
    """Possible disturbances of a run's devices."""

    load_of_others: float | None
    """CPU time of other processes on the cores that this run's devices take, over (those cores x wall time); None where the system does
    not tell."""
    oversubscribed: bool
    """More CPU devices than cores: devices take turns and no step time means anything."""

    def disturbances(self) -> list[str]:
        """The disturbances that there were, one reason each."""
        found = []
        if self.oversubscribed:
            found.append("there are more CPU devices than cores, so devices take turns")
        if self.load_of_others is not None and self.load_of_others > NOISY_LOAD:
            found.append(f"other processes took {self.load_of_others:.0%} of the cores (more than {NOISY_LOAD:.0%})")
        return found


@dataclass(frozen=True)
class Measurement(Noise):
    """Steps by variant ("eager", "single", "placed", ...), how busy the devices were, and the noise meanwhile. Those of a script are
    `eager` and `placed` as far as they were timed."""

    samples: Mapping[str, Samples]
    busy_us: Mapping[str, tuple[float, ...]]
    """Variant -> per device, the median over its steps; variants that do not tell are left out."""
    per_block: int | None = None
    """None where each step of a variant is followed by one of the others. Of a script: steps of either kind in a block, 0 where they were
    not taken in blocks."""

    @property
    def in_turn(self) -> bool:
        return self.per_block is None

    def ratio(self, slow: str, fast: str = "placed") -> Ratio:
        return Ratio.of(self.samples[slow], self.samples[fast])

    @property
    def over_unplaced(self) -> Ratio | None:
        """The speedup over the unplaced step; None where too few steps were timed for an interval."""
        if self.per_block is None:
            return self.ratio("eager")
        if min(map(self._timed, _OF_A_SCRIPT)) < ENOUGH_APART:
            return None
        return Ratio.of_script(self.samples["eager"], self.samples["placed"], self.per_block)

    def _timed(self, name: str) -> int:
        return len(self.samples[name].us) if name in self.samples else 0

    def doubts(self, gain: Ratio | None = None) -> list[str]:
        """Why nothing can be concluded from the times, one reason each; empty where something can. `gain`: the one of the verdict, if
        not that over the unplaced step."""
        found = self.disturbances()
        if not self.in_turn:
            unplaced, placed = map(self._timed, _OF_A_SCRIPT)
            if self.per_block and placed > 1 and not unplaced:  # in turns the second step is a plain one
                found.append("plain steps were not timed, as --keep_placed takes no turns, so no speed-up is known")
            elif unplaced < ENOUGH_APART:
                found.append(f"fewer than {ENOUGH_APART} plain steps were timed ({unplaced}); let the script take more steps")
            if placed < ENOUGH_APART:
                found.append(f"fewer than {ENOUGH_APART} placed steps were timed ({placed})")
        return found + too_wide(gain or self.over_unplaced) + (too_few(self._timed("placed")) if self.in_turn else [])

    def reported(self) -> dict[str, Samples | None]:
        """The samples of every variant; None where nothing was timed."""
        return {**({} if self.in_turn else dict.fromkeys(_OF_A_SCRIPT)), **self.samples}


class LoadOfOthers:
    """The share of these cores that goes to processes outside it, from its making to `share()`; what other guests steal included."""

    def __init__(self, own_seconds: Callable[[], float], cores: Collection[int]) -> None:
        """`own_seconds` says what the run's processes have used so far. No cores, where the run has several machines of which one is seen
        from here: the share is not known then."""
        self._own_seconds = own_seconds
        self._cores = cores
        self._start = self._now()

    def _now(self) -> tuple[float, float, float] | None:
        """(seconds the cores were busy, seconds this run used, seconds on the clock). None where the system does not tell."""
        if not self._cores:
            return None
        try:
            busy = busy_seconds(Path("/proc/stat").read_text(encoding="ascii"), self._cores)
        except OSError:
            return None
        return busy, self._own_seconds(), time.monotonic()

    def share(self) -> float | None:
        end = self._now()
        if self._start is None or end is None:
            return None
        busy, own, wall = (b - a for a, b in zip(self._start, end, strict=True))
        return max(0.0, busy - own) / max(wall * len(self._cores), 1e-9)


def busy_seconds(stat: str, cores: Collection[int]) -> float:
    """Seconds that `cores` have been busy since the system started, by the text of /proc/stat."""
    rows = {name: [int(f) for f in fields[:8]] for name, *fields in map(str.split, stat.splitlines()) if name.startswith("cpu")}
    ticks = [rows[f"cpu{core}"] for core in cores if f"cpu{core}" in rows]
    return sum(sum(t) - t[3] - t[4] for t in ticks) / os.sysconf("SC_CLK_TCK")
