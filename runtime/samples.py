"""What was measured: raw samples, ratios of paired ones, and why a run is too noisy to conclude from."""

import math
import os
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOISY_LOAD = 0.10
"""Others taking more than this share of the cores spoil a measurement."""
NOISY_SPREAD = 0.15
"""So does a 95% interval of the median ratio wider than this share of the ratio."""
ENOUGH, TOO_FEW = 6, "fewer than 6 steps were measured"


@dataclass(frozen=True, slots=True)
class Samples:
    """Raw wall times of one variant, in the order they were taken; statistics are computed."""

    us: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.us)

    @property
    def min(self) -> float:
        return min(self.us)

    def to_json(self) -> dict[str, Any]:
        return {"median": self.median, "min": self.min, "samples": list(self.us)}


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times faster: the median of the ratios of paired samples, and an interval that holds the true median in 95 of 100 cases, or
    in all but the share `error` of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, slow: Samples, fast: Samples, error: float = 0.05) -> "Ratio":
        ratios = sorted(a / b for a, b in zip(slow.us, fast.us, strict=True))
        rank = _sign_test_rank(len(ratios), error)
        return cls(statistics.median(ratios), ratios[rank], ratios[-1 - rank])

    @classmethod
    def unpaired(cls, slow: Samples, fast: Samples, error: float = 0.05) -> "Ratio":
        """Of samples that were not taken in turn: the ratio of the medians, and its interval from theirs, which hold together."""
        slow_us, fast_us = sorted(slow.us), sorted(fast.us)
        i, j = _sign_test_rank(len(slow_us), error / 2), _sign_test_rank(len(fast_us), error / 2)
        return cls(slow.median / fast.median, slow_us[i] / fast_us[-1 - j], slow_us[-1 - i] / fast_us[j])

    @property
    def spread(self) -> float:
        """Width of the interval over the median."""
        return (self.high - self.low) / self.median

    def to_json(self) -> dict[str, float]:
        return {"median": self.median, "low": self.low, "high": self.high}

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def enough_samples(error: float) -> int:
    """The least number of samples whose whole range misses the median in no more than this share of all cases."""
    return math.ceil(1 + math.log2(1 / error))


def _sign_test_rank(n: int, error: float) -> int:
    """The largest k for which the k-th smallest and k-th largest (from 0) of n values miss the median in no more than this share of cases.

    0 where n is too small for that: the whole range.
    """
    below, k = 0.0, 0
    while k <= n // 2:
        below += math.comb(n, k) / 2**n
        if 2 * below > error:
            break
        k += 1
    return max(0, k - 1)


@dataclass(frozen=True, slots=True)
class Noise:
    """What may disturb the devices of a run."""

    load_of_others: float | None
    """CPU time of other processes on the cores that this run may use, over (those cores x wall time); None where the system does not
    tell."""
    oversubscribed: bool
    """More CPU devices than cores: devices take turns and no step time means anything."""

    def disturbances(self) -> list[str]:
        """What did, one reason each."""
        found = []
        if self.oversubscribed:
            found.append("there are more CPU devices than cores, so devices take turns")
        if self.load_of_others is not None and self.load_of_others > NOISY_LOAD:
            found.append(f"other processes took {self.load_of_others:.0%} of the cores (more than {NOISY_LOAD:.0%})")
        return found


@dataclass(frozen=True)
class Measurement:
    """Interleaved steps: `samples` by variant ("eager", "single", "placed", ...), how busy the devices were, and the noise meanwhile."""

    samples: Mapping[str, Samples]
    busy_us: Mapping[str, tuple[float, ...]]
    """Variant -> per device, the median over its steps; variants that do not tell are left out."""
    load_of_others: float | None
    """See `Noise`."""
    oversubscribed: bool

    def ratio(self, slow: str, fast: str = "placed") -> Ratio:
        return Ratio.of(self.samples[slow], self.samples[fast])

    def doubts(self) -> list[str]:
        """Why the run is too noisy to conclude from, one reason each; empty where it is not."""
        found = self.disturbances()
        spread = self.ratio("single").spread
        if spread > NOISY_SPREAD:
            found.append(f"the ratio's interval is {spread:.0%} wide (more than {NOISY_SPREAD:.0%})")
        if len(self.samples["placed"].us) < ENOUGH:
            found.append(TOO_FEW)
        return found

    def disturbances(self) -> list[str]:
        """What disturbed the devices meanwhile, one reason each."""
        return Noise(self.load_of_others, self.oversubscribed).disturbances()


class LoadOfOthers:
    """The share of the run's cores that goes to processes outside it, from its making to `share()`; what other guests steal included."""

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
    """How long `cores` have been busy since the system started, by the text of /proc/stat."""
    rows = {name: [int(f) for f in fields[:8]] for name, *fields in map(str.split, stat.splitlines()) if name.startswith("cpu")}
    ticks = [rows[f"cpu{core}"] for core in cores if f"cpu{core}" in rows]
    return sum(sum(t) - t[3] - t[4] for t in ticks) / os.sysconf("SC_CLK_TCK")
