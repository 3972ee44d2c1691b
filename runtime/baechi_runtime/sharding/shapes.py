"""Calls that compute nothing: views, permutations, parts and joints of tensors. What they cost is the transfers that splits of
others make them need."""

from collections.abc import Iterator, Sequence
from math import gcd, prod

from baechi_runtime.sharding.loops import SPATIAL, Dims, Loops, UnknownFormError, Value, spread

VIEW = "view"


def same(loops: Loops) -> None:
    """Copies: the result has the operand's shape and axes."""
    x = loops.operand
    if x.shape != loops.shape:
        raise UnknownFormError("a copy of another shape")
    axes = loops.axes_of(x)
    _view(loops, x, axes, axes)


def _view(loops: Loops, x: Value, read: Dims, written: Dims, names: Sequence[str] | None = None) -> None:
    """Read a tensor along these axes, and write each result along those."""
    loops.op = VIEW
    loops.read(x, read)
    for _ in loops.shapes:
        loops.write(written, names)


def reshape(loops: Loops) -> None:
    """Dimensions that are joined or parted are split as the first of them is: memory goes to devices in whole pieces."""
    x = loops.operand
    loops.op = VIEW
    read: list[int | None] = [None] * len(x.shape)
    written: list[int | None] = [None] * len(loops.shape)
    names = [f"dim{i}" for i in range(len(loops.shape))]
    for before, after in _groups(x.shape, loops.shape):
        if not before or not after:
            continue
        i, j = before[0], after[0]
        names[j] = x.names[i]
        if len(before) == len(after) == 1:
            read[i] = written[j] = loops.axis(x.names[i], x.shape[i])
            continue
        read[i] = written[j] = loops.axis(x.names[i], gcd(x.shape[i], loops.shape[j]))
        names[j] = "places" if names[j] in SPATIAL else names[j]
        for b in after[1:]:
            names[b] = f"{names[j]}_inner"
        loops.axis(f"{x.names[i]}_inner", max(prod(x.shape[b] for b in before) // loops.axes[-1].size, 1), splits=False)
    loops.read(x, read, summed=False)
    loops.write(written, names, summed=False)


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """The dimensions of two shapes of one tensor in the smallest groups that hold the same numbers; those of length 1 are in none."""
    left = [i for i, size in enumerate(before) if size != 1]
    right = [j for j, size in enumerate(after) if size != 1]
    while left and right:
        ins, outs = [left.pop(0)], [right.pop(0)]
        while (have := prod(before[i] for i in ins)) != (want := prod(after[j] for j in outs)):
            if not (left if have < want else right):
                raise UnknownFormError("shapes that hold different numbers")
            (ins if have < want else outs).append((left if have < want else right).pop(0))
        yield ins, outs


def permute(loops: Loops) -> None:
    """`permute` by its dimensions; `transpose` and its like swap the two that they name, or the first two."""
    x = loops["self"]
    order = list(range(len(x.shape)))
    if loops["dims"] is not None:
        order = [d % len(order) for d in loops["dims"]]
    elif len(order) > 1:
        a, b = [v for v in loops.arguments.values() if isinstance(v, int)] or (0, 1)
        order[a], order[b] = order[b], order[a]
    axes = loops.axes_of(x)
    _view(loops, x, axes, [axes[i] for i in order])


def expand(loops: Loops) -> None:
    """The gradient of what is repeated is a sum."""
    x = loops["self"]
    names = [f"dim{i}" for i in range(len(loops.shape) - len(x.names))] + list(x.names)
    axes = [loops.axis(name, size) for name, size in zip(names, loops.shape, strict=True)]
    _view(loops, x, spread(loops, x, axes), axes)


def broadcast(loops: Loops) -> None:
    """Several tensors, all expanded to one shape."""
    values = loops["tensors"]
    loops.op = VIEW
    widest = max(values, key=lambda v: len(v.shape))
    axes = [loops.axis(name, size) for name, size in zip(widest.names, loops.shape, strict=True)]
    for value in values:
        loops.read(value, spread(loops, value, axes))
        loops.write(axes)


def _axes_but(loops: Loops, x: Value, dims: Sequence[int]) -> list[int | None]:
    """A loop for each dimension, but none for these."""
    unsplit = {d % len(x.shape) for d in dims}
    return [None if i in unsplit else loops.axis(name, size) for i, (name, size) in enumerate(zip(x.names, x.shape, strict=True))]


def part(loops: Loops) -> None:
    """Slices, and the pieces that a tensor is cut into: the cut dimension is whole. A slice of all is the tensor."""
    x = loops["self"]
    everything = all(shape == x.shape for shape in loops.shapes)
    axes = _axes_but(loops, x, [] if everything else [loops["dim"] or 0])
    _view(loops, x, axes, axes, x.names)


def pick(loops: Loops) -> None:
    """`select` and `unbind`: a dimension goes."""
    x = loops["self"]
    gone = (loops["dim"] or 0) % len(x.shape)
    axes = _axes_but(loops, x, [gone])
    _view(loops, x, axes, [*axes[:gone], *axes[gone + 1 :]], [*x.names[:gone], *x.names[gone + 1 :]])


def concat(loops: Loops) -> None:
    values = loops["tensors"]
    loops.op = "concat"
    first = max(values, key=lambda v: len(v.shape))
    joined = (loops["dim"] or 0) % len(first.shape)
    axes = _axes_but(loops, first, [joined])
    for value in values:
        if len(value.shape) != len(axes) and prod(value.shape):
            raise UnknownFormError("tensors of several ranks")
        loops.read(value, axes if len(value.shape) == len(axes) else [None] * len(value.shape))  # an empty one may be of any rank
    loops.write(axes, first.names)


def stack(loops: Loops) -> None:
    values = loops["tensors"]
    loops.op = "concat"
    new = (loops["dim"] or 0) % len(loops.shape)
    axes: list[int | None] = list(loops.axes_of(values[0]))
    for value in values:
        loops.read(value, axes)
    loops.write([*axes[:new], None, *axes[new:]], [*values[0].names[:new], "stack", *values[0].names[new:]])


def along(loops: Loops) -> None:
    """Ops along one dimension, or some, which are whole, and independent over all others: cumsum, flip, sort, topk, pad, glu."""
    x = loops["self"]
    dims = loops["dim"] if loops["dim"] is not None else loops["dims"]
    if loops["shifts"] is not None and not dims:
        dims = range(len(x.shape))  # roll goes on from each row to the next
    loops.op = "along"
    changed = [i for i, (a, b) in enumerate(zip(x.shape, loops.shape, strict=True)) if a != b]
    whole = changed if loops["pad"] is not None else range(len(x.shape))[-2:] if dims is None else [dims] if isinstance(dims, int) else dims
    axes = _axes_but(loops, x, [*whole, *changed])
    loops.compute((3.0 if loops.gradient else 1.0) * prod(loops.shape) / prod(axis.size for axis in loops.axes))
    loops.read(x, axes)
    for shape in loops.shapes:
        if len(shape) != len(axes):
            raise UnknownFormError("a result of another rank")
        loops.write(axes, x.names)


def resized(loops: Loops) -> None:
    """Images in another size, also from channels, or to them: whole images, and channels as far as they stay together."""
    x, out = loops.operand, loops.shape
    if len(x.shape) != len(out) or len(out) < 3:
        raise UnknownFormError("an image without a batch")
    loops.op = "resize"
    batch, channels = loops.axis(x.names[0], x.shape[0]), loops.axis(x.names[1], gcd(x.shape[1], out[1]))
    loops.compute((3.0 if loops.gradient else 1.0) * prod(out) / (loops.axes[batch].size * loops.axes[channels].size))
    whole = [None] * (len(out) - 2)
    loops.read(x, [batch, channels, *whole])
    loops.write([batch, channels, *whole], x.names)


def gather(loops: Loops) -> None:
    """`gather` and `index_select`: the dimension looked into is whole, and so are those of which the index takes a part."""
    x, index = loops["self"], loops["index"]
    loops.op = "along"
    whole = [loops["dim"], *(i for i, (a, b) in enumerate(zip(x.shape, loops.shape, strict=True)) if a != b)]
    axes = _axes_but(loops, x, whole)
    loops.read(x, axes)
    loops.read(index, axes if len(index.shape) == len(axes) else [None] * len(index.shape))
    loops.write(axes, x.names)
