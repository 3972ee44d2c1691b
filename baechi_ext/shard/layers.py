"""Layers of networks as nodes of a shard graph: iteration spaces and tensors. What they cost, the rules say."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from baechi_ext.errors import ShardError
from baechi_ext.shard.graph import Axis, Edge, Node, ShardGraph, Tensor
from baechi_ext.shard.rules import Image, Product, Rules
from baechi_ext.shard.terms import Term


class Value(NamedTuple):
    """A tensor while a network is built: its shape, the names of its dimensions, and which output of which node it is (none: an input)."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    node: int | None = None
    output: int = 0


IMAGE = ("batch", "channels", "height", "width")


class Layers:
    """Builds a network layer by layer; each method adds a node and returns what it writes."""

    def __init__(self, name: str, rules: Rules) -> None:
        self.name = name
        self.rules = rules
        self._nodes: list[Node] = []
        self._edges: dict[tuple[int, ...], Edge] = {}

    def graph(self) -> ShardGraph:
        """The graph of the layers built so far."""
        return ShardGraph(self.name, tuple(self._nodes), tuple(self._edges.values()))

    def convolution(
        self, x: Value, channels: int, window: tuple[int, int], stride: int = 1, pad: tuple[int, int] = (0, 0), pointwise: int = 0
    ) -> Value:
        batch, in_channels, height, width = x.shape
        image = _windows((height, width), window, (stride, stride), pad)
        axes = [
            self._axis("batch", batch),
            self._axis("in_channels", in_channels),
            *(self._axis(n, size, splits=self.rules.splits_images) for n, size in zip(IMAGE[2:], image.result, strict=True)),
            *(self._axis(n, size, splits=self.rules.splits_kernels) for n, size in zip(("rows", "columns"), window, strict=True)),
            self._axis("channels", channels),
        ]
        p = Product((), (0, 2, 3), (6,), (1, 4, 5), pointwise, has_gradient=x.node is not None)
        weights = Tensor((channels, in_channels, *window), _one(6, 1, 4, 5))
        node = self._node("conv", axes, self.rules.convolution(p, image), [Tensor(x.shape, _one(0, 1, 2, 3))], weights=[weights])
        return self._add(node, [x], Value((batch, channels, *image.result), IMAGE), _one(0, 6, 2, 3))

    def pooling(self, x: Value, window: tuple[int, int], stride: int, pad: tuple[int, int] = (0, 0)) -> Value:
        _, _, height, width = x.shape
        image = _windows((height, width), window, (stride, stride), pad)
        splits = self.rules.splits_pooled_images
        axes = [self._axis(n, size) for n, size in zip(IMAGE[:2], x.shape[:2], strict=True)]
        axes += [self._axis(n, size, splits=splits) for n, size in zip(IMAGE[2:], image.result, strict=True)]
        same = _one(*range(4))
        node = self._node("pool", axes, self.rules.pooling((0, 1, 2, 3), image), [Tensor(x.shape, same)])
        return self._add(node, [x], Value((*x.shape[:2], *image.result), IMAGE), same)

    def layer_norm(self, x: Value) -> Value:
        last = len(x.shape) - 1
        scale = Tensor((2, x.shape[last]), ((), (last,)))
        return self._like("norm", [x], self.rules.layer_norm(tuple(range(len(x.shape))), last), [scale])

    def batch_norm(self, x: Value) -> Value:
        scale = Tensor((2, x.shape[1]), ((), (1,)))
        return self._like("batch_norm", [x], self.rules.batch_norm(tuple(range(len(x.shape)))), [scale])

    def softmax(self, x: Value) -> Value:
        last = len(x.shape) - 1
        return self._like("softmax", [x], self.rules.softmax(tuple(range(len(x.shape))), last, x.shape[last]))

    def cross_entropy(self, x: Value) -> Value:
        return self._like("cross_entropy", [x], self.rules.cross_entropy(tuple(range(len(x.shape)))))

    def elementwise(self, x: Value, y: Value, pointwise: int = 0) -> Value:
        return self._like("elementwise", [x, y], self.rules.elementwise(tuple(range(len(x.shape))), pointwise))

    def mean(self, x: Value, reduced: Sequence[int]) -> Value:
        kept = [i for i in range(len(x.shape)) if i not in reduced]
        axes = self._axes_of(x)
        terms = self.rules.mean(tuple(range(len(axes))), tuple(reduced))
        node = self._node("mean", axes, terms, [Tensor(x.shape, _one(*range(len(axes))))])
        return self._add(node, [x], Value(tuple(x.shape[i] for i in kept), tuple(x.names[i] for i in kept)), _one(*kept))

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        """The values one after the other along `axis`, which is not split."""
        first = values[0]
        axes = self._axes_of(first, unsplit=axis)
        same = _one(*range(len(axes)))
        shape = tuple(sum(v.shape[axis] for v in values) if i == axis else size for i, size in enumerate(first.shape))
        node = self._node("concat", axes, (), [Tensor(v.shape, same) for v in values])
        return self._add(node, values, Value(shape, first.names), same)

    def stack(self, values: Sequence[Value]) -> Value:
        """The values along a new first axis, which is not split."""
        first = values[0]
        axes = [Axis("stack", 1), *self._axes_of(first)]
        inner = _one(*range(1, len(axes)))
        node = self._node("stack", axes, (), [Tensor(v.shape, inner) for v in values])
        return self._add(node, values, Value((len(values), *first.shape), ("stack", *first.names)), _one(*range(len(axes))))

    def unstack(self, x: Value) -> list[Value]:
        """The parts of `x` along its first axis, which is not split."""
        axes = self._axes_of(x, unsplit=0)
        node = self._node("unstack", axes, (), [Tensor(x.shape, _one(*range(len(axes))))])
        part = Value(x.shape[1:], x.names[1:])
        first = self._add(node, [x], part, _one(*range(1, len(axes))), outputs=x.shape[0])
        return [first._replace(output=i) for i in range(x.shape[0])]

    def flatten(self, x: Value, shape: tuple[int, ...], names: tuple[str, ...]) -> Value:
        """`x` in another shape: as one long row, then as `shape`. Only what splits memory into whole pieces can be split."""
        size = prod(x.shape)
        across = tuple(range(len(x.shape)))
        node = self._node("ravel", self._axes_of(x), (), [Tensor(x.shape, _one(*across))], contiguous=True)
        row = self._add(node, [x], Value((size,), ("row",)), (across,))
        axes = [self._axis(n, s) for n, s in zip(names, shape, strict=True)]
        node = self._node("unravel", axes, (), [Tensor((size,), (tuple(range(len(axes))),))], contiguous=True)
        return self._add(node, [row], Value(shape, names), _one(*range(len(axes))))

    def linear(self, x: Value, units: int, name: str, pointwise: int = 0) -> Value:
        """A fully connected layer over the last dimension of `x`."""
        *rows, k = range(len(x.shape))
        n, k = k, k + 1
        axes = [*(self._axis(x.names[i], x.shape[i]) for i in rows), self._axis(name, units), self._axis(f"in_{x.names[-1]}", x.shape[-1])]
        p = Product((), tuple(rows), (n,), (k,), pointwise, has_gradient=x.node is not None)
        weights = Tensor((units, x.shape[-1]), _one(n, k))
        node = self._node("linear", axes, self.rules.product(p), [Tensor(x.shape, _one(*rows, k))], weights=[weights])
        return self._add(node, [x], Value((*x.shape[:-1], units), (*x.names[:-1], name)), _one(*rows, n))

    def einsum(self, equation: str, x: Value, y: Value, pointwise: int = 0) -> Value:
        """A product of two tensors; `y` without a name is weights. Letters of the equation stand for dimensions in order."""
        operands, out = equation.split("->")
        left, right = operands.split(",")
        size = dict(zip(left + right, x.shape + y.shape, strict=True))
        name = dict(zip(right + left, y.names + x.names, strict=True))
        letters = out + "".join(c for c in left if c in right and c not in out)
        axes = [self._axis(name[c], size[c]) for c in letters]
        inputs = [Tensor(v.shape, _one(*map(letters.index, s))) for v, s in ((x, left), (y, right))]
        node = self._node("einsum", axes, self.rules.product(_product_of(letters, left, right, out, (x, y), pointwise)), inputs)
        if y.node is None:
            node = replace(node, weights=(inputs[1],))
        return self._add(node, [x, y], Value(tuple(size[c] for c in out), tuple(name[c] for c in out)), _one(*map(letters.index, out)))

    def embedding(self, x: Value, vocabulary: int, features: int) -> Value:
        """A row of a table for each number of `x`."""
        if not self.rules.lookup:
            one_hot = Value((*x.shape, vocabulary), (*x.names, "vocabulary"))
            return self.einsum("abc,cd->abd", one_hot, Value((vocabulary, features), ("vocabulary", "features")))
        rows = tuple(range(len(x.shape)))
        d, v = len(rows), len(rows) + 1
        axes = [*self._axes_of(x), self._axis("features", features), self._axis("vocabulary", vocabulary)]
        terms = self.rules.lookup_table(rows, d, v)
        node = self._node("embedding", axes, terms, [Tensor(x.shape, _one(*rows))], weights=[Tensor((vocabulary, features), _one(v, d))])
        return self._add(node, [x], Value((*x.shape, features), (*x.names, "features")), _one(*rows, d))

    def lstm(self, x: Value, layers: int) -> Value:
        """A stack of LSTM layers as wide as `x`, all in one node; steps are not split, layers follow each other as a wavefront."""
        batch, steps, units = x.shape
        axes = [
            self._axis("layers", layers),
            self._axis("sequence", steps, splits=False),
            self._axis("batch", batch),
            self._axis("units", units),
            self._axis("in_units", units),
        ]
        weights = Tensor((layers, 4 * units, 2 * units), _one(0, 3, 4))
        node = self._node("lstm", axes, self.rules.lstm(layers, steps), [Tensor(x.shape, _one(2, 1, 4))], weights=[weights])
        return self._add(node, [x], Value(x.shape, x.names), _one(2, 1, 3))

    def _like(self, op: str, values: Sequence[Value], terms: tuple[Term, ...], weights: Iterable[Tensor] = ()) -> Value:
        x = values[0]
        axes = self._axes_of(x)
        same = _one(*range(len(axes)))
        node = self._node(op, axes, terms, [Tensor(x.shape, same) for _ in values], weights=weights)
        return self._add(node, values, Value(x.shape, x.names), same)

    def _axis(self, name: str, size: int, *, splits: bool = True) -> Axis:
        return Axis(name, size, splits, self.rules.smallest)

    def _axes_of(self, x: Value, unsplit: int | None = None) -> list[Axis]:
        images = self.rules.splits_pooled_images or not set(IMAGE) <= set(x.names)
        splits = {name: images or name not in IMAGE[2:] for name in x.names}
        sizes = [1 if i == unsplit else size for i, size in enumerate(x.shape)]
        return [self._axis(name, size, splits=splits[name]) for name, size in zip(x.names, sizes, strict=True)]

    def _node(
        self,
        op: str,
        axes: list[Axis],
        terms: tuple[Term, ...],
        inputs: list[Tensor],
        weights: Iterable[Tensor] = (),
        *,
        contiguous: bool = False,
    ) -> Node:
        return Node(f"{op}_{len(self._nodes)}", op, tuple(axes), tuple(inputs), (), terms, tuple(weights), contiguous)

    def _add(self, node: Node, values: Sequence[Value], out: Value, axes: tuple[tuple[int, ...], ...], outputs: int = 1) -> Value:
        index = len(self._nodes)
        written = (Tensor(out.shape, axes),) * outputs
        self._nodes.append(replace(node, outputs=written))
        for i, value in enumerate(values):
            if value.node is None:
                continue
            key = (value.node, index, i) if self.rules.parallel_edges else (value.node, index)
            self._edges[key] = Edge(value.node, index, value.output, i)
        return out._replace(node=index)


def _product_of(letters: str, left: str, right: str, out: str, values: tuple[Value, Value], pointwise: int) -> Product:
    def axes(chosen: Iterable[str]) -> tuple[int, ...]:
        return tuple(sorted(letters.index(c) for c in chosen))

    both = set(left) & set(right)
    x, y = values
    return Product(
        batch=axes(both & set(out)),
        m=axes(set(left) - both),
        n=axes(set(right) - both),
        k=axes(both - set(out)),
        pointwise=pointwise,
        has_weights=y.node is None,
        has_gradient=x.node is not None,
    )


def _windows(shape: tuple[int, int], window: tuple[int, int], stride: tuple[int, int], pad: tuple[int, int]) -> Image:
    height, width = ((size - w + 2 * p) // s + 1 for size, w, s, p in zip(shape, window, stride, pad, strict=True))
    if min(height, width) < 1:
        raise ShardError(f"a window of {window} does not fit an image of {shape}; make the image larger")
    return Image(shape, window, stride, (height, width))


def _one(*axes: int) -> tuple[tuple[int, ...], ...]:
    """Each dimension split as one axis is."""
    return tuple((a,) for a in axes)
