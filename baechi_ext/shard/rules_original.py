"""The costs of layers in the original PaSE release, number by number, so that results can be compared with it.

A multiply-add is one operation, and a word is 8 bytes. Known quirks, which `rules` mends: a batch normalization is a layer normalization
over the batch axis; a convolution's input gradient is summed up as its unrolled (im2col) input; an embedding multiplies by one-hot rows;
an axis is split into parts of at least 4 (`smallest`), so that 64 devices can't share out a batch of 128; of two tensors between the same
two layers the last counts; pooling, elementwise layers and softmax count operations where products count multiply-adds.
"""

from dataclasses import dataclass

from baechi_ext.shard.rules import Image, Product, Rules, Terms
from baechi_ext.shard.terms import AllReduce, Axes, Compute, Exchange, Halo, Term


@dataclass(frozen=True)
class OriginalRules(Rules):
    """`smallest`: the least share of an axis, the release's cutoff: 4 for its convolutional networks, 1 for the others."""

    smallest: int = 4
    lookup: bool = False
    parallel_edges: bool = False
    splits_kernels: bool = True

    @property
    def splits_pooled_images(self) -> bool:
        return True

    def product(self, p: Product) -> Terms:
        """A (batched) matrix product: one in the forward pass, two in the backward pass, each with the sum over its reduced axes."""
        terms: list[Term] = [Compute(3.0, p.all)]
        if p.pointwise:
            terms.append(Compute(3.0 * p.pointwise, p.batch + p.m + p.n))
        return (
            *terms,
            AllReduce(1.0, p.batch + p.m + p.n, p.k, "output sum"),
            AllReduce(1.0, p.batch + p.m + p.k, p.n, "input gradient"),
            AllReduce(1.0, p.batch + p.n + p.k, p.m, "weight gradient", hides=p.has_weights),
        )

    def convolution(self, p: Product, image: Image) -> Terms:
        """A matrix product of the unrolled input."""
        return self.product(p)

    def pooling(self, axes: Axes, image: Image) -> Terms:
        reach = tuple(map(float, image.window))
        return Compute(1.0, axes), Halo(1.0, axes[:2], axes[2:], image.shape, reach)

    def layer_norm(self, axes: Axes, axis: int) -> Terms:
        others = tuple(a for a in axes if a != axis)
        return (
            Compute(16.0, axes),
            AllReduce(1.0, others, (axis,), "statistics", times=4.0),
            AllReduce(1.0, (axis,), others, "weight gradient", times=4.0, hides=True),
        )

    def batch_norm(self, axes: Axes) -> Terms:
        return self.layer_norm(axes, axes[0])

    def mean(self, axes: Axes, reduced: Axes) -> Terms:
        return (AllReduce(1.0, axes, reduced, "output sum"),)

    def softmax(self, axes: Axes, axis: int, size: int) -> Terms:
        rows = tuple(a for a in axes if a != axis)
        return (
            Compute(4.0 + size, axes),
            AllReduce(1.0, rows, (axis,), "statistics", times=2.0),
            AllReduce(float(size), rows, (axis,), "input gradient"),
        )

    def cross_entropy(self, axes: Axes) -> Terms:
        *rows, classes = axes
        return Compute(4.0, axes), Compute(2.0, tuple(rows)), Exchange(2.0, tuple(rows), (classes,), "statistics")

    def elementwise(self, axes: Axes, pointwise: int) -> Terms:
        return (Compute(1.0 + pointwise, axes),)

    def lstm(self, layers: int, steps: int) -> Terms:
        """All layers and steps as one product, batched over the layers: 4 gates, and a state beside the input."""
        return self._lstm(layers, steps, 24.0, 1.0)
