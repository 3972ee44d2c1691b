"""The communication model: transfer time = us_per_byte * bytes + latency_us (Baechi, SoCC 2020, section 5: a linear fit)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from baechi_ext.errors import ProfileError
from baechi_ext.ir.cluster import Link


@dataclass(frozen=True, slots=True)
class LinkFit:
    """A least-squares line through (bytes, us) samples; `r_squared` is 1 for a perfect line."""

    us_per_byte: float
    latency_us: float
    r_squared: float

    def to_link(self) -> Link:
        return Link(us_per_byte=self.us_per_byte, latency_us=self.latency_us)

    def __str__(self) -> str:
        return f"{self.us_per_byte:.4g} us/B x bytes + {self.latency_us:.4g} us (r2 {self.r_squared:.3f})"


def fit_link(samples: Sequence[tuple[float, float]], scales_us: Sequence[float] | None = None) -> LinkFit:
    """The line through `(bytes, us)` samples that minimises the squared relative error, neither slope nor latency negative.

    Relative, because the samples span many orders of magnitude and an absolute fit is ruled by the largest transfer alone. Where
    the error of a sample goes by something other than the sample, as that of a difference does, `scales_us` says by what.
    Raises ProfileError where there are fewer than two sizes or a time is not positive.
    """
    if len({size for size, _ in samples}) < 2:
        raise ProfileError(f"a link fit needs samples of at least 2 sizes, got {len(samples)} samples; probe more sizes")
    if not all(us > 0 and math.isfinite(us) for _, us in samples):
        raise ProfileError("a link fit needs positive, finite times")
    weights = [1.0 / scale**2 for scale in scales_us or [us for _, us in samples]]
    slope, latency = _weighted_line(samples, weights)
    if slope < 0:
        slope, latency = 0.0, fmean([us for _, us in samples], weights)
    elif latency < 0:
        latency = 0.0
        slope = sum(w * x * y for (x, y), w in zip(samples, weights, strict=True)) / sum(
            w * x * x for (x, _), w in zip(samples, weights, strict=True)
        )
    mean = fmean([us for _, us in samples], weights)
    left = sum(w * (y - slope * x - latency) ** 2 for (x, y), w in zip(samples, weights, strict=True))
    all_ = sum(w * (y - mean) ** 2 for (_, y), w in zip(samples, weights, strict=True))
    return LinkFit(slope, latency, 1.0 - left / all_ if all_ > 0 else 1.0)


def bend_bytes(samples: Sequence[tuple[float, float]]) -> float | None:
    """The size from which another line fits, where two lines leave less than half of one line's relative squared error; else None.

    `samples` as for `fit_link`, at least three sizes on each side of a bend.
    """
    ordered = sorted(samples)
    one = _relative_error(ordered)
    found, least = None, one / 2
    for i in range(3, len(ordered) - 2):
        two = _relative_error(ordered[:i]) + _relative_error(ordered[i:])
        if two < least:
            found, least = ordered[i][0], two
    return found if one > _STRAIGHT * len(ordered) else None


_STRAIGHT = 0.05**2  # a line that is off by less than this (squared, relative) a sample has no bend worth naming


def _relative_error(samples: Sequence[tuple[float, float]]) -> float:
    fit = fit_link(samples)
    return sum(((us - fit.latency_us - size * fit.us_per_byte) / us) ** 2 for size, us in samples)


def _weighted_line(samples: Sequence[tuple[float, float]], weights: Sequence[float]) -> tuple[float, float]:
    x0 = fmean([x for x, _ in samples], weights)
    y0 = fmean([y for _, y in samples], weights)
    covariance = sum(w * (x - x0) * (y - y0) for (x, y), w in zip(samples, weights, strict=True))
    slope = covariance / sum(w * (x - x0) ** 2 for (x, _), w in zip(samples, weights, strict=True))
    return slope, y0 - slope * x0
