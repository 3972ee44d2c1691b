"""Calls that multiply: matrix products, convolutions, attention, lookups, recurrent layers. Two operations for each iteration forward, and
two more for each operand that needs a gradient; what is summed over devices follows from the loops."""

from collections.abc import Callable, Sequence

from baechi_ext.shard.rules import Image
from baechi_ext.shard.terms import AllReduce, Compute, Feedback, Halo
from baechi_runtime.sharding.loops import SPATIAL, Loops, UnknownFormError, Value, spread


def flop(*operands: Value | None) -> float:
    """Operations of a multiplication and an addition, and of the same for each operand's gradient."""
    return 2.0 + 2.0 * sum(o.gradient for o in operands if o is not None)


def linear(loops: Loops) -> None:
    x, weight, bias = loops["input"], loops["weight"], loops["bias"]
    loops.op = "linear"
    rows = [loops.axis(name, size) for name, size in zip(x.names[:-1], x.shape[:-1], strict=True)]
    n = loops.axis("units", weight.shape[0])
    k = loops.axis(f"in_{x.names[-1]}", x.shape[-1])
    loops.compute(flop(x, weight))
    loops.read(x, [*rows, k])
    loops.read(weight, [n, k])
    loops.read(bias, [n])
    loops.write([*rows, n])


def addmm(loops: Loops) -> None:
    """`addmm` and `baddbmm`: a product, and something broadcast to its result."""
    x, y = (loops[a] for a in (("mat1", "mat2") if loops["mat1"] is not None else ("batch1", "batch2")))
    axes, k = _product(loops, x, y, before=lambda out: loops.read(loops["self"], spread(loops, loops["self"], out)))
    loops.write(axes)


def matmul(loops: Loops) -> None:
    """`matmul`, `mm`, `bmm`, `mv` and `dot`; batch dimensions are broadcast."""
    operands = [v for v in loops.arguments.values() if isinstance(v, Value)]
    axes, _ = _product(loops, operands[0], operands[1])
    loops.write(axes)


def _product(loops: Loops, x: Value, y: Value, before: Callable[[list[int]], None] | None = None) -> tuple[list[int], int]:
    """Reads both; the axes of the result, and the one that is summed over."""
    loops.op = "linear" if y.weight else "matmul"
    batch = max(x.shape[:-2], y.shape[:-2], key=len)
    names = (x if len(x.shape[:-2]) == len(batch) else y).names
    sizes = loops.shape[: len(batch)]
    axes = [loops.axis(name, size) for name, size in zip(names, sizes, strict=False)]
    m = [loops.axis(x.names[-2], x.shape[-2])] if len(x.shape) > 1 else []
    columns = "units" if y.weight else y.names[-1]
    n = [loops.axis(columns, y.shape[-1])] if len(y.shape) > 1 else []
    k = loops.axis(f"in_{x.names[-1]}", x.shape[-1])
    loops.compute(flop(x, y))
    if before is not None:
        before([*axes, *m, *n])
    of_x, of_y = (spread(loops, Value(v.source, v.shape[:-2], v.names[:-2]), axes) if v.shape[:-2] else [] for v in (x, y))
    loops.read(x, [*of_x, *m, k])
    loops.read(y, [*of_y, k, *n])
    return [*axes, *m, *n], k


def einsum(loops: Loops) -> None:
    equation, operands = loops["equation"].replace(" ", ""), loops["tensors"]
    left, arrow, out = equation.partition("->")
    letters = left.split(",")
    repeated = any(len(set(s)) < len(s) for s in letters)
    if not arrow or "." in equation or len(operands) > 2 or repeated:
        raise UnknownFormError("einsum of another form")
    loops.op = "matmul"
    summed = dict.fromkeys(c for c in "".join(letters) if c not in out)
    axes: dict[str, int] = {}
    for c in (*out, *summed):
        places = [(v, s.index(c)) for v, s in zip(operands, letters, strict=True) if c in s]
        value, place = max(places, key=lambda p: p[0].shape[p[1]])
        axes[c] = loops.axis(f"in_{value.names[place]}" if c in summed else value.names[place], value.shape[place])
    loops.compute(flop(*operands) if len(operands) > 1 else 1.0)
    for value, text in zip(operands, letters, strict=True):
        loops.read(value, [axes[c] for c in text])
    loops.write([axes[c] for c in out])


def convolution(loops: Loops) -> None:
    """Axes as the hand-written graphs have them; transposed ones run over places of the input. Groups of channels are split as wholes."""
    x, weight, bias = loops["input"], loops["weight"], loops["bias"]
    window = weight.shape[2:]
    if len(x.shape) != len(window) + 2 or len(window) > len(SPATIAL):
        raise UnknownFormError("a convolution without a batch")
    loops.op = "conv"
    transposed, image, whole = bool(loops["transposed"]), SPATIAL[-len(window) :], [None for _ in window]
    groups = (loops["groups"] or 1) if transposed else x.shape[1] // weight.shape[1]
    splits = loops.rules.splits_images and len(window) == 2 and not transposed
    batch = loops.axis("batch", x.shape[0])
    group = loops.axis("groups", groups) if groups > 1 else None
    c = loops.axis("in_channels", x.shape[1] // groups, splits=group is None)
    moved_over = (x if transposed else loops).shape[2:]
    places = [loops.axis(name, size, splits=splits) for name, size in zip(image, moved_over, strict=True)]
    for name, size in zip(("planes", "rows", "columns")[-len(window) :], window, strict=True):
        loops.axis(name, size, splits=False)
    n = loops.axis("channels", loops.shape[1] // groups, splits=group is None)
    ins, outs = (c, n) if group is None else (group, group)
    first, second = (ins, outs) if transposed else (outs, ins)
    loops.compute(flop(x, weight))
    loops.read(x, [batch, ins, *(whole if transposed else places)])
    loops.read(weight, [first, second if group is None else None, *whole])
    loops.read(bias, [outs])
    loops.write([batch, outs, *(whole if transposed else places)], ["batch", "channels", *image])
    if splits:
        shape = Image(x.shape[2:], window, pair(loops["stride"]), pair(loops.shape[2:]), pair(loops["dilation"]))
        others = (batch, c) if group is None else (batch, group, c)
        loops.terms.append(Halo(2.0 if x.gradient else 1.0, others, tuple(places), shape.shape, shape.reach))


def pair(value: int | Sequence[int] | None) -> tuple[int, int]:
    """A size for height and width, of which one may be given for both."""
    numbers = [value] if isinstance(value, int) else list(value or [1])
    return numbers[0], numbers[-1]


def attention(loops: Loops) -> None:
    """Scaled dot products, softmax, and the mix of values, in one call: batch, heads and rows of queries are split. Keys are whole, and
    so are features: a row's softmax is over all keys."""
    q, k, v, mask = loops["query"], loops["key"], loops["value"], loops["attn_mask"]
    if not len(q.shape) == len(k.shape) == len(v.shape) or len(q.shape) < 3:
        raise UnknownFormError("attention of another form")
    loops.op = "attention"
    heads = len(q.shape) - 3 if len(q.shape) > 3 else None
    shares = heads is not None and k.shape[heads] != q.shape[heads]
    fewest = min(q.shape[heads], k.shape[heads]) if shares else 0
    leading = zip(q.names[:-2], q.shape[:-2], strict=True)
    batch = [loops.axis(name, fewest if shares and i == heads else size) for i, (name, size) in enumerate(leading)]
    repeats = loops.axis("heads_of_a_key", q.shape[heads] // fewest, splits=False) if shares else None
    rows = loops.axis(q.names[-2], q.shape[-2])
    columns = loops.axis("keys", k.shape[-2], splits=False)
    e, ev = loops.axis("head_size", q.shape[-1], splits=False), loops.axis("value_size", v.shape[-1], splits=False)
    whole = [*batch, *([] if repeats is None else [repeats]), rows, columns]
    loops.compute(flop(q, k), [*whole, e])
    loops.compute(flop(q, v) if q.gradient else flop(v), [*whole, ev])
    terms = loops.rules.softmax(tuple(whole), columns, k.shape[-2])
    loops.compute(next(term.flop for term in terms if isinstance(term, Compute)), whole)
    loops.read(q, [*batch, rows, None])
    loops.read(k, [*batch, None, None])
    loops.read(v, [*batch, None, None])
    if mask is not None:
        loops.read(mask, spread(loops, mask, [*batch, rows, columns]))
    loops.write([*batch, rows, None], [*q.names[:-1], v.names[-1]])


def embedding(loops: Loops) -> None:
    """Rows that a device does not have are zeros; what each adds up is the output sum over the parts of the vocabulary."""
    table, indices = loops["weight"], loops["indices"]
    loops.op = "embedding"
    rows = loops.axes_of(indices)
    d, v = loops.axis("features", table.shape[1]), loops.axis("vocabulary", table.shape[0])
    loops.compute(2.0 if table.gradient else 1.0, [*rows, d])
    loops.read(table, [v, d])
    loops.read(indices, rows)
    loops.write([*rows, d])


GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_POINTWISE = {4: 36.0, 3: 30.0, 1: 9.0}
"""Operations of a unit and step for its gates, forward and backward; a pointwise function is three."""


def stacked(loops: Loops, gates: int) -> None:
    """torch's own lstm, gru and rnn of padded batches."""
    x, weights = loops["input"], loops["params"]
    if x is None or len(x.shape) != 3 or weights is None:
        raise UnknownFormError("a recurrent layer of another form")
    matrices = [w for w in weights if len(w.shape) == 2]
    units = matrices[1].shape[1]
    if any(w.shape != (gates * units, units) for w in matrices[1::2]) or len(matrices) % 2:
        raise UnknownFormError("a recurrent layer with projections")
    first = bool(loops["batch_first"])
    batch, n, k = _axes(loops, gates, [w.shape[1] for w in matrices[::2]], units, x, first)
    inside = k if x.shape[2] == units else None
    loops.read(x, [batch, None, inside] if first else [None, batch, inside])
    states = loops["hx"]
    for state in states if isinstance(states, list) else [states]:
        loops.read(state, [None, batch, n], summed=False)
    for w in weights:
        loops.read(w, [n, k if w.shape[1] == units else None] if len(w.shape) == 2 else [n])
    y = [batch, None, n] if first else [None, batch, n]
    loops.write(y, [*x.names[:2], "units"], summed=False)
    for _ in loops.shapes[1:]:
        loops.write([None, batch, n], ["layers", x.names[1 - first], "units"], summed=False)


def chunk(loops: Loops, gates: int) -> None:
    """This project's own layers (baechi_runtime.models.torch.rnn): some time steps of one layer, inputs side by side in one weight."""
    inputs, weight = loops["inputs"], loops["weight"]
    units = weight.shape[1] // gates
    batch, n, k = _axes(loops, gates, [sum(x.shape[2] for x in inputs)], units, inputs[0], batch_first=False)
    for x in inputs:
        loops.read(x, [None, batch, k if x.shape[2] == units else None])
    for state in loops["state"]:
        loops.read(state, [batch, n], summed=False)
    loops.read(weight, [k, n])
    for shape in loops.shapes:
        names = ["sequence", "batch", "units"][-len(shape) :]
        loops.write([None, batch, n][-len(shape) :], names, summed=False)


def _axes(loops: Loops, gates: int, widths: Sequence[int], units: int, x: Value, batch_first: bool) -> tuple[int, int, int]:
    """Names the axes and says what the layers cost, of which each (and each direction) takes in something of these widths; batch, units and
    the units that products sum over.

    Sums of a step are messages of their own, and its state is read again by the next, split otherwise.
    """
    loops.op = "lstm" if gates == GATES["lstm"] else "gru" if gates == GATES["gru"] else "rnn"
    count, steps = len(widths), x.shape[batch_first]
    step = loops.axis("sequence", steps, splits=False)
    batch = loops.axis(x.names[1 - batch_first], x.shape[1 - batch_first])
    n, k = loops.axis("units", units), loops.axis("in_units", units)
    products = sum(widths) / units + count
    first = (1 + bool(loops["bidirectional"])) * widths[0] / units
    loops.compute(gates * (6.0 * products - (0.0 if x.gradient else 2.0 * first)))
    loops.compute(_POINTWISE[gates] * count, [step, batch, n])
    results, states = (step, batch, n), (step, batch, k)
    loops.terms += [
        AllReduce(float(gates), results, (k,), "output sum", times=float(count), messages=float(steps)),
        AllReduce(1.0, states, (n,), "input gradient", times=float(count), messages=float(steps)),
        Feedback((batch, n), (batch, k), times=float(count * steps)),
    ]
    if count > 1:
        loops.terms.append(AllReduce(1.0, states, (n,), "input gradient", times=float(count - 1)))
    return batch, n, k
