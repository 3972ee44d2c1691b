"""The costs of layers: the original's rules with its quirks mended. A multiply-add is two operations, a word is 4 bytes.

Statistics of a batch normalization are sums over all but the channels; an input gradient has the size of the input; an embedding is a
lookup; a softmax's backward pass is linear; a mean adds its elements up and sums what is left of them over devices; a cross entropy, whose
classes are split, sums its rows' maxima, sums and labels. What each backward pass repeats is counted everywhere.
"""

from dataclasses import dataclass
from typing import NamedTuple

from baechi_ext.shard.terms import AllReduce, Axes, Compute, Feedback, Halo, Term

Terms = tuple[Term, ...]


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
    """The image that a window moves over: height and width (`shape`), the `window`, how far it moves at once (`stride`), and how far
    apart the places are that it reads (`dilation`)."""

    shape: tuple[int, int]
    window: tuple[int, int]
    stride: tuple[int, int]
    result: tuple[int, int]
    dilation: tuple[int, int] = (1, 1)

    @property
    def reach(self) -> tuple[float, float]:
        """The rows and columns that a part's windows read beyond the part."""
        r, s = (max(d * (w - 1) + 1 - step, 0) for w, step, d in zip(self.window, self.stride, self.dilation, strict=True))
        return float(r), float(s)


@dataclass(frozen=True)
class Rules:
    """`splits_images`: height and width of images are split, too, and the rims of the parts exchanged."""

    smallest: int = 1
    splits_images: bool = False
    lookup: bool = True
    parallel_edges: bool = True
    splits_kernels: bool = False

    @property
    def splits_pooled_images(self) -> bool:
        return self.splits_images

    def product(self, p: Product) -> Terms:
        """One product in the forward pass, and one for each gradient, each with the sum over its reduced axes."""
        terms: list[Term] = [Compute(6.0 if p.has_gradient else 4.0, p.all)]
        if p.pointwise:
            terms.append(Compute(3.0 * p.pointwise, p.batch + p.m + p.n))
        terms.append(AllReduce(1.0, p.batch + p.m + p.n, p.k, "output sum"))
        if p.has_gradient:
            terms.append(AllReduce(1.0, p.batch + p.m + p.k, p.n, "input gradient"))
        kind = "weight gradient" if p.has_weights else "input gradient"
        return *terms, AllReduce(1.0, p.batch + p.n + p.k, p.m, kind, hides=p.has_weights)

    def convolution(self, p: Product, image: Image) -> Terms:
        """The same, where the input gradient is an image; parts of images read each other's rims, and send the gradients back."""
        batch, height, width = p.m
        channels = p.k[:1]
        per_result = image.shape[0] * image.shape[1] / (image.result[0] * image.result[1])
        rest = [t for t in self.product(p) if t.kind != "input gradient"]
        if p.has_gradient:
            rest.append(AllReduce(per_result, p.m + channels, p.n, "input gradient"))
        if self.splits_images:
            rest.append(Halo(2.0 if p.has_gradient else 1.0, (batch, *channels), (height, width), image.shape, image.reach))
        return tuple(rest)

    def pooling(self, axes: Axes, image: Image) -> Terms:
        compute = Compute(2.0 * image.window[0] * image.window[1], axes)
        return (compute, Halo(2.0, axes[:2], axes[2:], image.shape, image.reach)) if self.splits_images else (compute,)

    def layer_norm(self, axes: Axes, axis: int) -> Terms:
        """Mean and variance, and what the backward pass needs of each row; gradients of scale and bias."""
        others = tuple(a for a in axes if a != axis)
        return (
            Compute(16.0, axes),
            AllReduce(2.0, others, (axis,), "statistics", times=2.0),
            AllReduce(2.0, (axis,), others, "weight gradient", hides=True),
        )

    def batch_norm(self, axes: Axes) -> Terms:
        """Two sums a channel forward and two backward, which are the gradients of scale and bias and go into the input gradient."""
        others = (axes[0], *axes[2:])
        return Compute(16.0, axes), AllReduce(2.0, (axes[1],), others, "statistics", times=2.0)

    def mean(self, axes: Axes, reduced: Axes) -> Terms:
        kept = tuple(a for a in axes if a not in reduced)
        return Compute(2.0, axes), AllReduce(1.0, kept, reduced, "output sum")

    def softmax(self, axes: Axes, axis: int, size: int) -> Terms:
        """Maximum and sum of a row forward, a product backward."""
        rows = tuple(a for a in axes if a != axis)
        return Compute(8.0, axes), AllReduce(1.0, rows, (axis,), "statistics", times=3.0)

    def cross_entropy(self, axes: Axes) -> Terms:
        """Maximum, sum and label of each row."""
        *rows, classes = axes
        return Compute(6.0, axes), AllReduce(1.0, tuple(rows), (classes,), "statistics", times=3.0)

    def elementwise(self, axes: Axes, pointwise: int) -> Terms:
        return (Compute(1.0 + 2.0 * pointwise, axes),)

    def lookup_table(self, rows: Axes, features: int, vocabulary: int) -> Terms:
        """Rows that a device does not have are zeros, and summed up over the parts of the vocabulary; gradients are added to the table."""
        return (
            Compute(2.0, (*rows, features)),
            AllReduce(1.0, (*rows, features), (vocabulary,), "output sum"),
            AllReduce(1.0, (vocabulary, features), rows, "weight gradient", hides=True),
        )

    def lstm(self, layers: int, steps: int) -> Terms:
        """4 gates of an input and a state, a step after the other: each step's sums are messages of their own."""
        return self._lstm(layers, steps, 48.0, float(steps))

    def _lstm(self, layers: int, steps: int, flop: float, messages: float) -> Terms:
        layer, step, batch, n, k = range(5)
        return (
            Compute(flop, (layer, step, batch, n, k)),
            Compute(36.0, (layer, step, batch, n)),
            AllReduce(4.0, (layer, step, batch, n), (k,), "output sum", messages=messages),
            AllReduce(2.0, (layer, step, batch, k), (n,), "input gradient", messages=messages),
            AllReduce(8.0, (layer, n, k), (step, batch), "weight gradient", hides=True),
            Feedback((batch, n), (batch, k), times=float(layers * steps)),
        )
