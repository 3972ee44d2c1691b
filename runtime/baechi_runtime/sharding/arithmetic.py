"""Calls that work on numbers one by one, or on rows of them: functions with broadcasting, reductions, norms, softmax, losses, pooling."""

from collections.abc import Sequence
from math import prod

from baechi_ext.shard.rules import Image
from baechi_ext.shard.terms import AllReduce
from baechi_runtime.sharding.loops import SPATIAL, Loops, UnknownFormError, Value, spread
from baechi_runtime.sharding.products import pair


def elementwise(loops: Loops, simple: bool = False) -> None:
    """Any function of numbers at one place; gradients of what is broadcast are summed up."""
    operands = [v for argument in loops.arguments.values() for v in (argument if isinstance(argument, list) else [argument])]
    values = [v for v in operands if isinstance(v, Value)]
    if any(len(v.shape) > len(loops.shape) for v in values):
        raise UnknownFormError("operands of more dimensions than the result")
    loops.op = "elementwise"
    axes = [loops.axis(_name(values, len(loops.shape) - i, i), size) for i, size in enumerate(loops.shape)]
    pointwise = 0 if simple or not loops.gradient else 1
    loops.terms += loops.rules.elementwise(tuple(axes), pointwise)
    for value in values:
        loops.read(value, spread(loops, value, axes))
    for shape in loops.shapes:
        if shape != loops.shape:
            raise UnknownFormError("results of several shapes")
        loops.write(axes)


def _name(values: Sequence[Value], behind: int, i: int) -> str:
    """The name of the dimension that is so many from the end, from the first operand that has it."""
    named = [v.names[-behind] for v in values if len(v.shape) >= behind and v.shape[-behind] > 1]
    return named[0] if named else f"dim{i}"


def reduction(loops: Loops) -> None:
    """Sums, means and the like over some dimensions, or over all."""
    x = loops.operand
    loops.op = "mean"
    dim = loops["dim"]
    dims = range(len(x.shape)) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    reduced = {d % len(x.shape) for d in dims} if x.shape else set()
    axes = loops.axes_of(x)
    loops.compute(2.0 if loops.gradient else 1.0)
    loops.read(x, axes)
    kept: list[int | None] = [a if i not in reduced else None for i, a in enumerate(axes) if i not in reduced or loops["keepdim"]]
    names = [name for i, name in enumerate(x.names) if i not in reduced or loops["keepdim"]]
    for _ in loops.shapes:
        loops.write(kept, names)


def softmax(loops: Loops) -> None:
    x = loops["self"]
    loops.op = "softmax"
    axes = loops.axes_of(x)
    axis = axes[loops["dim"]]
    loops.terms += loops.rules.softmax(tuple(axes), axis, loops.axes[axis].size)
    loops.read(x, axes)
    loops.write(axes)


def layer_norm(loops: Loops) -> None:
    """Also the norm by root mean squares, which has one statistic instead of two; the difference is not counted."""
    rank = len(loops["input"].shape)
    inside = range(rank - len(loops["normalized_shape"]), rank)
    _norm(loops, inside, inside)


def batch_norm(loops: Loops) -> None:
    """Batch statistics take two sums per channel forward and two backward, which are the weights' gradients; otherwise it only scales."""
    x = loops["input"]
    axes = loops.axes_of(x)
    if loops["training"] or loops["use_input_stats"]:
        loops.op = "batch_norm"
        loops.terms += loops.rules.batch_norm(tuple(axes))
    else:
        loops.op = "elementwise"
        loops.compute(3.0)
    loops.read(x, axes)
    for name in ("weight", "bias", "running_mean", "running_var"):
        loops.read(loops[name], [axes[1]], summed=loops.op == "elementwise")
    loops.write(axes)


def group_norm(loops: Loops) -> None:
    """Groups are split as wholes; what is in one is a loop with its channels."""
    x, groups = loops["input"], loops["num_groups"]
    loops.op = "norm"
    batch, group = loops.axis("batch", x.shape[0]), loops.axis(x.names[1], groups)
    inside = loops.axis("group_channels", x.shape[1] // groups, splits=False)
    places = [loops.axis(name, size, splits=False) for name, size in zip(x.names[2:], x.shape[2:], strict=True)]
    loops.compute(16.0)
    loops.read(x, [batch, group, *places])
    for name in ("weight", "bias"):
        loops.read(loops[name], [group])
    loops.terms += _statistics((batch, group), (inside, *places), loops)
    loops.write([batch, group, *places])


def instance_norm(loops: Loops) -> None:
    if not loops["use_input_stats"]:
        batch_norm(loops)
        return
    _norm(loops, range(2, len(loops["input"].shape)), range(1, 2))


def _norm(loops: Loops, reduced: range, scaled: range) -> None:
    """A norm over some dimensions, scaled along some."""
    x = loops["input"]
    loops.op = "norm"
    axes = loops.axes_of(x)
    inside = tuple(axes[i] for i in reduced)
    loops.compute(16.0)
    loops.read(x, axes)
    for name in ("weight", "bias"):
        loops.read(loops[name], [axes[i] for i in scaled])
    loops.terms += _statistics(tuple(a for a in axes if a not in inside), inside, loops)
    loops.write(axes)


def _statistics(kept: tuple[int, ...], reduced: tuple[int, ...], loops: Loops) -> list[AllReduce]:
    """Mean and variance, and what the backward pass needs of each row."""
    if not any(loops.axes[a].splits and loops.axes[a].size > 1 for a in reduced):
        return []
    return [AllReduce(2.0, kept, reduced, "statistics", times=2.0)]


def cross_entropy(loops: Loops) -> None:
    """The classes' dimension is the second, or the only one."""
    x, target = loops["self"], loops["target"]
    loops.op = "cross_entropy"
    place = 1 if len(x.shape) > 1 else 0
    rows = [loops.axis(name, size) for i, (name, size) in enumerate(zip(x.names, x.shape, strict=True)) if i != place]
    classes = loops.axis(x.names[place], x.shape[place])
    across = [*rows[:place], classes, *rows[place:]]
    loops.terms += loops.rules.cross_entropy((*rows, classes))
    loops.read(x, across)
    loops.read(target, rows if len(target.shape) == len(rows) else across)
    loops.read(loops["weight"], [classes])
    _loss(loops, rows)


def loss(loops: Loops) -> None:
    """A function of a prediction and a target at each place, summed up."""
    x, target = loops["self"], loops["target"]
    loops.op = "loss"
    axes = loops.axes_of(x)
    loops.terms += loops.rules.elementwise(tuple(axes), 1)
    loops.read(x, axes)
    loops.read(target, spread(loops, target, axes))
    for weight in (loops["weight"], loops["pos_weight"]):
        if weight is not None:
            loops.read(weight, spread(loops, weight, axes))
    _loss(loops, axes)


def _loss(loops: Loops, rows: Sequence[int]) -> None:
    """Write the loss: one number, or one for each row."""
    for shape in loops.shapes:
        loops.write(rows if shape else [], summed=False)
    if not loops.shape and rows:
        loops.terms.append(AllReduce(1.0, (), tuple(rows), "output sum"))


def pooling(loops: Loops) -> None:
    """A window that moves over the last dimensions; where these become one place each, it is all of them."""
    x, out = loops.operand, loops.shape
    given = loops["kernel_size"]
    count = len(given) if given is not None else len(loops["output_size"])
    if len(x.shape) != count + 2:
        raise UnknownFormError("pooling without a batch")
    loops.op = "pool"
    before, after = x.shape[2:], out[2:]
    window = tuple(-(-a // b) for a, b in zip(before, after, strict=True)) if given is None else (tuple(given) * count)[:count]
    splits = loops.rules.splits_pooled_images and count == 2 and given is not None
    axes = [loops.axis(name, size) for name, size in zip(x.names[:2], x.shape[:2], strict=True)]
    axes += [loops.axis(name, size, splits=splits) for name, size in zip(SPATIAL[-count:], after, strict=True)]
    if splits:
        image = Image(pair(before), pair(window), pair(loops["stride"] or given), pair(after), pair(loops["dilation"]))
        loops.terms += loops.rules.pooling(tuple(axes), image)
    else:
        loops.compute(2.0 * prod(window))
    loops.read(x, axes)
    for _ in loops.shapes:
        loops.write(axes)
