"""Recurrent layers whose every chunk of time steps is one op, and one more backward: the grain at which they are placed.

Written out step by step, a layer is thousands of tiny ops; as nn.LSTM it is one op that no second layer can overlap with. Here the
state passes from chunk to chunk, so the wavefront across the layers stays in the graph. LSTM: Hochreiter and Schmidhuber 1997 with
forget gates, as in nn.LSTM; GRU: Cho et al. 2014 in the variant of nn.GRU, which resets after the recurrent product.

Gradients are written out, because nothing records gradients inside a custom op. A layer's weight gradient is one more op over all
chunks: the backward wavefront need not wait for it, its matrix products are large, and no partial gradients have to be added up.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from baechi_ext.errors import OptionError

FORGET_BIAS = 1.0

Grads = Sequence[Tensor | None]
State = tuple[Tensor, ...]
"""(h, c) of an LSTM, (h,) of a GRU, each (batch, units); empty before the first step, which means zeros."""


def chunks_of(sequence: Tensor, steps: int) -> Sequence[Tensor]:
    """Chunks of this many steps, with memory of their own."""
    chunks: Sequence[Tensor] = torch.split_copy(sequence, steps)  # type: ignore[func-returns-value,assignment]  # torch's types say None
    return chunks


def next_word_loss(logits: Iterable[Tensor], words: Tensor, steps: int) -> Tensor:
    """The mean cross-entropy of words (steps of time, batch), of which each of the logits predicts so many steps."""
    losses = [
        nn.functional.cross_entropy(chunk.flatten(0, -2), wanted.flatten(), reduction="sum")
        for chunk, wanted in zip(logits, words.split(steps), strict=True)
    ]
    return torch.stack(losses).sum() / words.numel()


def _order(count: int, reverse: bool) -> range:
    return range(count - 1, -1, -1) if reverse else range(count)


def _rows(sizes: Sequence[int], weight: Tensor) -> list[Tensor]:
    """The rows of a weight that multiply inputs of these sizes, and then the rest: the recurrent ones and the biases."""
    return list(weight.split([*sizes, weight.shape[0] - sum(sizes)]))


def _project(inputs: Sequence[Tensor], rows: Sequence[Tensor], bias: Tensor) -> Tensor:
    """bias + sum of input @ rows for all steps at once, (steps, batch, gates)."""
    steps, batch, _ = inputs[0].shape
    product = torch.addmm(bias, inputs[0].reshape(steps * batch, -1), rows[0])
    for x, block in zip(inputs[1:], rows[1:], strict=True):
        product.addmm_(x.reshape(steps * batch, -1), block)
    return product.view(steps, batch, -1)


def _input_gradients(d: Tensor, rows: Sequence[Tensor]) -> list[Tensor]:
    """The inputs' gradients from those of the gates before activation."""
    return [(d.flatten(0, 1) @ block.t()).view(*d.shape[:2], -1) for block in rows]


def _times_previous(factor: Tensor, sequence: Tensor, first: Tensor | None, reverse: bool) -> None:
    """Multiplies `factor` in place with the sequence shifted by one step; before the first step stands `first`, or zero."""
    if reverse:
        factor[:-1].mul_(sequence[1:])
    else:
        factor[1:].mul_(sequence[:-1])
    start = factor[-1 if reverse else 0]
    start.zero_() if first is None else start.mul_(first)


@torch.library.custom_op("baechi::lstm", mutates_args=())
def _lstm(inputs: Sequence[Tensor], state: Sequence[Tensor], weight: Tensor, reverse: bool) -> list[Tensor]:
    """Outputs, last h, last c, all c, gates after activation; the gates are o, i, f, u, so that three sigmoids are one call."""
    steps, batch, _ = inputs[0].shape
    units = weight.shape[1] // 4
    *rows, last = _rows([x.shape[-1] for x in inputs], weight)
    gates = _project(inputs, rows, last[-1])
    recurrent = last[:-1]
    y, cells = gates.new_empty(steps, batch, units), gates.new_empty(steps, batch, units)
    h, c = state if state else (None, None)
    for t in _order(steps, reverse):
        gate, cell, out = gates[t], cells[t], y[t]
        if h is not None:
            gate.addmm_(h, recurrent)
        gate[:, : 3 * units].sigmoid_()
        gate[:, 3 * units :].tanh_()
        o, i, f, u = gate.split(units, 1)
        torch.mul(i, u, out=cell)
        if c is not None:
            cell.addcmul_(f, c)
        torch.tanh(cell, out=out).mul_(o)
        h, c = out, cell
    return [y, out.clone(), cell.clone(), cells, gates]


@_lstm.register_fake
def _(inputs: Sequence[Tensor], state: Sequence[Tensor], weight: Tensor, reverse: bool) -> list[Tensor]:
    steps, batch, _ = inputs[0].shape
    units = weight.shape[1] // 4
    shapes = ((steps, batch, units), (batch, units), (batch, units), (steps, batch, units), (steps, batch, 4 * units))
    return [weight.new_empty(shape) for shape in shapes]


@torch.library.custom_op("baechi::lstm_backward", mutates_args=())
def _lstm_backward(
    sizes: Sequence[int], state: Sequence[Tensor], weight: Tensor, saved: Sequence[Tensor], grads: Grads, reverse: bool
) -> list[Tensor]:
    """Gradients of the gates before activation, of each input (`sizes`: their features) and each state.

    `state` is the one before the chunk, `saved` are outputs, all c and gates, `grads` the gradients of outputs, last h and last c.
    """
    y, cells, gates = saved
    units = y.shape[-1]
    d, beyond = _lstm_factors(cells, gates, state[1] if state else None, reverse)
    f = gates[..., 2 * units : 3 * units]
    *rows, last = _rows(sizes, weight)
    recurrent = last[:-1].t()
    grad_y, dh, dc = grads
    order = _order(len(y), not reverse)
    if dh is None:
        dh = torch.zeros_like(y[0])
    for t in order:
        if grad_y is not None:
            dh = dh + grad_y[t]
        dc = dh * beyond[t] if dc is None else torch.addcmul(dc, dh, beyond[t])
        d[t, :, :units].mul_(dh)
        d[t, :, units:].unflatten(1, (3, units)).mul_(dc.unsqueeze(1))
        dc = dc * f[t]
        if state or t != order[-1]:
            dh = torch.mm(d[t], recurrent)
    return [d, *_input_gradients(d, rows), *((dh, dc.contiguous()) if state and dc is not None else ())]


def _lstm_factors(cells: Tensor, gates: Tensor, first_c: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
    """Factors that turn the gradients of h (for gate o) and c (for i, f, u) into those of the gates before activation; and the factor
    of the gradient of h on its way to c."""
    units = cells.shape[-1]
    o, i, _, u = gates.split(units, -1)
    sigmoids = gates[..., : 3 * units]
    d = torch.empty_like(gates)
    torch.addcmul(sigmoids, sigmoids, sigmoids, value=-1, out=d[..., : 3 * units])
    d_o, d_i, d_f, d_u = d.split(units, -1)
    squashed = torch.tanh(cells)
    d_o.mul_(squashed)
    d_i.mul_(u)
    _times_previous(d_f, cells, first_c, reverse)
    torch.mul(u, u, out=d_u)
    torch.addcmul(i, i, d_u, value=-1, out=d_u)
    return d, torch.addcmul(o, o, squashed.square_(), value=-1)


@torch.library.custom_op("baechi::gru", mutates_args=())
def _gru(inputs: Sequence[Tensor], state: Sequence[Tensor], weight: Tensor, reverse: bool) -> list[Tensor]:
    """Outputs, last h, recurrent part of gate n before its reset, gates after activation; the gates are r, z, n."""
    steps, batch, _ = inputs[0].shape
    units = weight.shape[1] // 3
    *rows, last = _rows([x.shape[-1] for x in inputs], weight)
    gates = _project(inputs, rows, last[-2])
    recurrent, bias = last[:-2], last[-1]
    y, candidates = gates.new_empty(steps, batch, units), gates.new_empty(steps, batch, units)
    h = state[0] if state else gates.new_zeros(batch, units)
    for t in _order(steps, reverse):
        gate, candidate = gates[t], candidates[t]
        product = torch.addmm(bias, h, recurrent)
        r, z, n = gate.split(units, 1)
        gate[:, : 2 * units].add_(product[:, : 2 * units]).sigmoid_()
        candidate.copy_(product[:, 2 * units :])
        n.addcmul_(r, candidate).tanh_()
        h = torch.lerp(n, h, z, out=y[t])
    return [y, h.clone(), candidates, gates]


@_gru.register_fake
def _(inputs: Sequence[Tensor], state: Sequence[Tensor], weight: Tensor, reverse: bool) -> list[Tensor]:
    steps, batch, _ = inputs[0].shape
    units = weight.shape[1] // 3
    shapes = ((steps, batch, units), (batch, units), (steps, batch, units), (steps, batch, 3 * units))
    return [weight.new_empty(shape) for shape in shapes]


@torch.library.custom_op("baechi::gru_backward", mutates_args=())
def _gru_backward(
    sizes: Sequence[int], state: Sequence[Tensor], weight: Tensor, saved: Sequence[Tensor], grads: Grads, reverse: bool
) -> list[Tensor]:
    """As `_lstm_backward`; the gradients of the gates are followed by the ones that the recurrent product sees."""
    y, candidates, gates = saved
    units = y.shape[-1]
    r, z, _ = gates.split(units, -1)
    d, kept = _gru_factors(y, candidates, gates, state[0] if state else None, reverse), torch.empty_like(gates)
    *rows, last = _rows(sizes, weight)
    recurrent = last[:-2].t()
    grad_y, dh = grads
    if dh is None:
        dh = torch.zeros_like(y[0])
    for t in _order(len(y), not reverse):
        if grad_y is not None:
            dh = dh + grad_y[t]
        d[t].unflatten(1, (3, units)).mul_(dh.unsqueeze(1))
        kept[t, :, : 2 * units] = d[t, :, : 2 * units]
        torch.mul(d[t, :, 2 * units :], r[t], out=kept[t, :, 2 * units :])
        dh = torch.addmm(dh * z[t], kept[t], recurrent)
    return [d, kept, *_input_gradients(d, rows), *((dh,) if state else ())]


def _gru_factors(y: Tensor, candidates: Tensor, gates: Tensor, first: Tensor | None, reverse: bool) -> Tensor:
    """Factors that turn the gradient of h into those of the gates before activation."""
    units = y.shape[-1]
    r, z, n = gates.split(units, -1)
    sigmoids = gates[..., : 2 * units]
    d = torch.empty_like(gates)
    torch.addcmul(sigmoids, sigmoids, sigmoids, value=-1, out=d[..., : 2 * units])
    d_r, d_z, d_n = d.split(units, -1)
    torch.mul((1 - z), (1 - n * n), out=d_n)
    d_r.mul_(candidates).mul_(d_n)
    changed = torch.ones_like(y)
    _times_previous(changed, y, first, reverse)
    d_z.mul_(changed.sub_(n))
    return d


@torch.library.custom_op("baechi::rnn_weight_gradient", mutates_args=())
def _weight_gradient(
    inputs: Sequence[Tensor], state: Sequence[Tensor], ys: Sequence[Tensor], ds: Sequence[Tensor], kept: Sequence[Tensor], reverse: bool
) -> Tensor:
    """The weight's gradient over all chunks, given in the order of time, `inputs` chunk after chunk; `state` is the very first one.

    `ds` are the gradients of the gates before activation, `kept` the ones that the recurrent product sees where those differ.
    """
    y, d = torch.cat(list(ys)).flatten(0, 1), torch.cat(list(ds)).flatten(0, 1)
    recurrent = torch.cat(list(kept)).flatten(0, 1) if kept else d
    batch, units, count = ys[0].shape[1], y.shape[1], len(inputs) // len(ys)
    gradient = d.new_empty(_weight_shape(inputs[:count], ys[0], ds[0], kept))
    *rows, last = _rows([x.shape[-1] for x in inputs[:count]], gradient)
    for i, block in enumerate(rows):
        torch.mm(torch.cat(list(inputs[i::count])).flatten(0, 1).t(), d, out=block)
    before, after = (y[batch:], recurrent[:-batch]) if reverse else (y[:-batch], recurrent[batch:])
    torch.mm(before.t(), after, out=last[:units])
    if state:
        last[:units].addmm_(state[0].t(), recurrent[-batch:] if reverse else recurrent[:batch])
    for bias, terms in zip(last[units:], (d, recurrent), strict=False):
        torch.sum(terms, 0, out=bias)
    return gradient


def _weight_shape(inputs: Sequence[Tensor], y: Tensor, d: Tensor, kept: Sequence[Tensor]) -> tuple[int, int]:
    return sum(x.shape[-1] for x in inputs) + y.shape[-1] + (2 if kept else 1), d.shape[-1]


@_weight_gradient.register_fake
def _(
    inputs: Sequence[Tensor], state: Sequence[Tensor], ys: Sequence[Tensor], ds: Sequence[Tensor], kept: Sequence[Tensor], reverse: bool
) -> Tensor:
    return ds[0].new_empty(_weight_shape(inputs[: len(inputs) // len(ys)], ys[0], ds[0], kept))


@register_flop_formula([torch.ops.baechi.lstm, torch.ops.baechi.gru], get_raw=True)
def _(inputs: Sequence[Tensor], state: object, weight: Tensor, *_: object, **__: object) -> int:
    return 2 * math.prod(inputs[0].shape[:2]) * weight.numel()


@register_flop_formula([torch.ops.baechi.lstm_backward, torch.ops.baechi.gru_backward], get_raw=True)
def _(sizes: object, state: object, weight: Tensor, saved: Sequence[Tensor], *_: object, **__: object) -> int:
    return 2 * math.prod(saved[0].shape[:2]) * weight.numel()


@register_flop_formula(torch.ops.baechi.rnn_weight_gradient, get_raw=True)
def _(inputs: object, state: object, ys: Sequence[Tensor], *_: object, out_val: Tensor, **__: object) -> int:
    return 2 * sum(math.prod(y.shape[:2]) for y in ys) * out_val.numel()


@dataclass(frozen=True, slots=True)
class _Kind:
    """A type of unit: its ops, and how many copies of the gates' gradients its backward op returns: one or two, like its biases."""

    forward: Any
    backward: Any
    gates: int
    copies: int


_KINDS = {"lstm": _Kind(_lstm, _lstm_backward, 4, 1), "gru": _Kind(_gru, _gru_backward, 3, 2)}
UNIT_TYPES = tuple(_KINDS)


@_lstm_backward.register_fake
@_gru_backward.register_fake
def _(sizes: Sequence[int], state: Sequence[Tensor], weight: Tensor, saved: Sequence[Tensor], grads: Grads, reverse: bool) -> list[Tensor]:
    y, _, gates = saved
    kind = _KINDS["lstm" if gates.shape[-1] == 4 * y.shape[-1] else "gru"]
    shapes = [gates.shape] * kind.copies + [(*gates.shape[:2], size) for size in sizes] + [h.shape for h in state]
    return [weight.new_empty(shape) for shape in shapes]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    xs, state, weight, ctx.reverse = inputs
    ctx.set_materialize_grads(False)
    ctx.num_inputs, ctx.num_states = len(xs), len(state)
    y, *_, a, b = output
    ctx.save_for_backward(weight, *xs, *state, y, a, b)


def _chunk_gradients(unit_type: str, ctx: Any, grads: Grads) -> tuple[list[Tensor], list[Tensor], Tensor, None]:
    """Gradients of one chunk alone, as the op's own autograd gives them: the weight's gradient is the chunk's."""
    kind, n = _KINDS[unit_type], ctx.num_inputs
    weight, *rest = ctx.saved_tensors
    xs, state, saved = rest[:n], rest[n : n + ctx.num_states], rest[n + ctx.num_states :]
    found = kind.backward([x.shape[-1] for x in xs], state, weight, saved, list(grads[:-2]), ctx.reverse)
    d, *kept = found[: kind.copies]
    gradient = _weight_gradient(xs, state[:1], saved[:1], [d], kept, ctx.reverse)
    return found[kind.copies : kind.copies + n], found[kind.copies + n :], gradient, None


_lstm.register_autograd(partial(_chunk_gradients, "lstm"), setup_context=_keep)
_gru.register_autograd(partial(_chunk_gradients, "gru"), setup_context=_keep)


class _Layer(torch.autograd.Function):
    """All chunks of one layer: one function to autograd, an op per chunk in a captured graph."""

    @staticmethod
    def forward(ctx: Any, layer: "Recurrent", num_chunks: int, weight: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """`tensors` are the inputs, chunk after chunk, and the state. Returns each chunk's outputs and the last state."""
        ctx.set_materialize_grads(False)
        count = len(layer.sizes)
        ctx.layer, ctx.num_chunks = layer, num_chunks
        inputs, state = tensors[: num_chunks * count], list(tensors[num_chunks * count :])
        befores: list[list[Tensor]] = [[]] * num_chunks
        saved: list[list[Tensor]] = [[]] * num_chunks
        for k in _order(num_chunks, layer.reverse):
            befores[k] = state
            y, *state, a, b = layer.kind.forward(list(inputs[k * count : (k + 1) * count]), state, weight, layer.reverse)
            saved[k] = [y, a, b]
        ctx.num_states = [len(before) for before in befores]
        ctx.save_for_backward(weight, *inputs, *(t for before in befores for t in before), *(t for three in saved for t in three))
        return *(y for y, _, _ in saved), *state

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        layer, num_chunks = ctx.layer, ctx.num_chunks
        weight, *rest = ctx.saved_tensors
        inputs, rest = rest[: num_chunks * len(layer.sizes)], rest[num_chunks * len(layer.sizes) :]
        befores = []
        for n in ctx.num_states:
            befores.append(rest[:n])
            rest = rest[n:]
        saved = [rest[3 * k : 3 * k + 3] for k in range(num_chunks)]
        copies: list[list[Tensor]] = [[]] * num_chunks
        dxs: list[list[Tensor]] = [[]] * num_chunks
        dstate = list(grads[num_chunks:])
        for k in _order(num_chunks, not layer.reverse):
            found = layer.kind.backward(layer.sizes, befores[k], weight, saved[k], [grads[k], *dstate], layer.reverse)
            gates, past = layer.kind.copies, layer.kind.copies + len(layer.sizes)
            copies[k], dxs[k], dstate = found[:gates], found[gates:past], found[past:]
        first = befores[-1 if layer.reverse else 0][:1]
        ds, *kept = zip(*copies, strict=True)
        gradient = _weight_gradient(inputs, first, [y for y, _, _ in saved], list(ds), list(kept[0]) if kept else [], layer.reverse)
        return None, None, gradient, *(dx for chunk in dxs for dx in chunk), *dstate


class Recurrent(nn.Module):
    """One layer in one direction, over a sequence in chunks of time steps.

    Its only parameter, `weight`, is (all inputs' features + units + biases, gates * units): the rows for the inputs, for the state,
    and the biases, one row for an LSTM (gates o, i, f, u), two for a GRU (gates r, z, n; the second bias is the recurrent one).
    """

    def __init__(self, sizes: Sequence[int], units: int, unit_type: str = "lstm", *, reverse: bool = False) -> None:
        """`sizes` are the features of the inputs, which count as one input with all features side by side."""
        super().__init__()
        if unit_type not in UNIT_TYPES:
            raise OptionError(f"--rnn_unit_type={unit_type} is unknown; choose one of {', '.join(UNIT_TYPES)}")
        self.sizes, self.unit_type, self.reverse = list(sizes), unit_type, reverse
        gates, biases = self.kind.gates, self.kind.copies
        bound = 1 / math.sqrt(units)
        weight = torch.empty(sum(sizes) + units + biases, gates * units).uniform_(-bound, bound)
        weight[-biases:] = 0
        if unit_type == "lstm":
            weight[-1, 2 * units : 3 * units] = FORGET_BIAS
        self.weight = nn.Parameter(weight)

    @property
    def kind(self) -> _Kind:
        """Looked up, not kept: a module is copied, an op is not."""
        return _KINDS[self.unit_type]

    def forward(self, chunks: Sequence[Sequence[Tensor]], state: State = ()) -> tuple[list[Tensor], State]:
        """Chunks of inputs (steps, batch, size) -> the chunks' outputs (steps, batch, units), and the state after the last step.

        A reversed layer goes from the last chunk's last step to the first one's first.
        """
        flat = _Layer.apply(self, len(chunks), self.weight, *(x for inputs in chunks for x in inputs), *state)
        return list(flat[: len(chunks)]), tuple(flat[len(chunks) :])
