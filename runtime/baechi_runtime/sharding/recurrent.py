"""Recurrent layers, one call for all time steps (and layers): batch and units are split, steps follow each other."""

from collections.abc import Sequence

from baechi_ext.shard.terms import AllReduce, Feedback
from baechi_runtime.sharding.loops import Loops, UnknownFormError, Value

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
