"""Recurrent layers written out step by step, so that their steps can be placed; what their inputs contribute is one product a chunk.

LSTM: Hochreiter and Schmidhuber 1997 with forget gates; GRU: Cho et al. 2014 in the variant that resets after the recurrent product.
Each chunk of time steps is a tensor of its own, so the layer above starts with the first chunk and not after the last.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow as tf

FORGET_BIAS = 1.0

State = tuple[tf.Tensor, ...]
"""(h, c) of an LSTM, (h,) of a GRU, each (batch, units); empty before the first step, which means zeros."""


def uniform(shape: Sequence[int], bound: float, name: str) -> tf.Variable:
    return tf.Variable(tf.random.uniform(shape, -bound, bound), name=name)


class Linear(tf.Module):
    """Features -> features, without a bias."""

    def __init__(self, inputs: int, outputs: int, name: str) -> None:
        super().__init__(name)
        with self.name_scope:
            self.kernel = uniform((inputs, outputs), inputs**-0.5, "kernel")

    @tf.Module.with_name_scope
    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        """x (steps, batch, inputs) -> (steps, batch, outputs)."""
        steps, batch, inputs = x.shape
        return tf.reshape(tf.reshape(x, (steps * batch, inputs)) @ self.kernel, (steps, batch, self.kernel.shape[1]))


class Recurrent(tf.Module):
    """One layer in one direction, over a sequence in chunks of time steps."""

    def __init__(self, inputs: int, units: int, unit_type: str, name: str, *, reverse: bool = False) -> None:
        super().__init__(name)
        self.reverse, self.kind = reverse, _KINDS[unit_type]
        width = self.kind.gates * units
        with self.name_scope:
            self.inputs = Linear(inputs, width, "inputs")
            self.recurrent_kernel = uniform((units, width), units**-0.5, "recurrent_kernel")
            bias = tf.zeros((self.kind.biases, width))
            if unit_type == "lstm":
                bias += tf.repeat([0.0, FORGET_BIAS, 0.0, 0.0], units)
            self.bias = tf.Variable(bias, name="bias")

    @tf.Module.with_name_scope
    def __call__(self, chunks: Sequence[tf.Tensor], state: State = ()) -> tuple[list[tf.Tensor], State]:
        """Chunks (steps, batch, inputs) -> the chunks' outputs (steps, batch, units), and the state after the last step.

        A reversed layer goes from the last chunk's last step to the first one's first.
        """
        order = -1 if self.reverse else 1
        units, batch = self.recurrent_kernel.shape[0], chunks[0].shape[1]
        state = state or tuple(tf.zeros((batch, units)) for _ in range(self.kind.states))
        outputs = []
        for chunk in chunks[::order]:
            projected = self.inputs(chunk) + self.bias[0]
            steps = []
            for x in tf.unstack(projected)[::order]:
                state = self.kind.step(x, state, self.recurrent_kernel, self.bias[-1])
                steps.append(state[0])
            outputs.append(tf.stack(steps[::order]))
        return outputs[::order], state


def _lstm_step(x: tf.Tensor, state: State, kernel: tf.Variable, _bias: tf.Tensor) -> State:
    """The gates are i, f, o and the candidate."""
    h, c = state
    gates = x + h @ kernel
    units = h.shape[1]
    i, f, o = tf.split(tf.sigmoid(gates[:, : 3 * units]), 3, axis=1)
    c = f * c + i * tf.tanh(gates[:, 3 * units :])
    return o * tf.tanh(c), c


def _gru_step(x: tf.Tensor, state: State, kernel: tf.Variable, bias: tf.Tensor) -> State:
    """The gates are r, z and the candidate, whose recurrent part has a bias of its own inside the reset."""
    (h,) = state
    units = h.shape[1]
    recurrent = h @ kernel + bias
    r, z = tf.split(tf.sigmoid(x[:, : 2 * units] + recurrent[:, : 2 * units]), 2, axis=1)
    n = tf.tanh(x[:, 2 * units :] + r * recurrent[:, 2 * units :])
    return (n + z * (h - n),)


@dataclass(frozen=True, slots=True)
class _Kind:
    """A type of unit."""

    step: Callable[[tf.Tensor, State, tf.Variable, tf.Tensor], State]
    gates: int
    states: int
    biases: int


_KINDS = {"lstm": _Kind(_lstm_step, 4, 2, 1), "gru": _Kind(_gru_step, 3, 1, 2)}
UNIT_TYPES = tuple(_KINDS)
