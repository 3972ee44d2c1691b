"""Shapes of layers as cost rules look at them: the parts that the loops take."""

from typing import NamedTuple

from baechi_ext.shard.terms import Axes


class Product(NamedTuple):
    """A matrix product's axes: rows `m`, columns `n`, what is summed up `k`, and what both operands share, `batch`.

    `pointwise` functions follow it. `has_weights`: the second operand is parameters; `has_gradient`: the first one's gradient is needed.
    """

    batch: Axes
    m: Axes
    n: Axes
    k: Axes
    pointwise: int = 0
    has_weights: bool = True
    has_gradient: bool = True

    @property
    def all(self) -> Axes:
        return self.batch + self.m + self.n + self.k


class Image(NamedTuple):
    """The image that a window moves over: height and width (`shape`), the `window`, and how far it moves at once (`stride`)."""

    shape: tuple[int, int]
    window: tuple[int, int]
    stride: tuple[int, int]
    result: tuple[int, int]

    @property
    def reach(self) -> tuple[float, float]:
        """The rows and columns that a part's windows read beyond the part."""
        r, s = (max(w - step, 0) for w, step in zip(self.window, self.stride, strict=True))
        return float(r), float(s)
