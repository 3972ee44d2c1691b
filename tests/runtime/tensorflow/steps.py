"""Small TensorFlow training steps for tests, their captures with made-up costs, and what they compute unplaced."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from baechi_ext.capture.tensorflow_graph import CapturedFunction, capture_function
from baechi_ext.ir import OpGraph
from baechi_runtime.tensorflow.lowering.placed_graph import placed_graph
from baechi_runtime.tensorflow.servers.devices import Devices
from baechi_runtime.tensorflow.servers.session import PlacedSession


@dataclass(frozen=True)
class Step:
    """A captured step, its inputs, and the values that its variables begin with."""

    captured: CapturedFunction
    function: Callable[..., Any]
    inputs: tuple[np.ndarray, ...]
    first: dict[str, np.ndarray]

    @property
    def graph(self) -> OpGraph:
        """With costs drawn at random, so that placers have something to decide."""
        draw = random.Random(0)
        graph = self.captured.graph
        return graph.replace_ops([replace(op, compute_us=draw.uniform(1, 100)) for op in graph.ops])

    def unplaced(self) -> tuple[float, dict[str, np.ndarray]]:
        """The loss and the variables after one step by tf.function; the variables are put back."""
        loss = float(tf.function(self.function)(*self.inputs))
        after = {v.shared_name: v.variable.numpy() for v in self.captured.variables}
        for v in self.captured.variables:
            v.variable.assign(self.first[v.shared_name])
        return loss, after

    def session(self, devices: Devices, placement: Sequence[int], order: Sequence[str] | None = None) -> PlacedSession:
        """Placed op by op, initialised and fed."""
        where = dict(zip(self.captured.graph.index, placement, strict=True))
        session = PlacedSession(placed_graph(self.captured, where, devices.names, order=order), devices)
        session.initialise(self.first)
        session.feed(self.inputs)
        return session


def step_of(function: Callable[..., Any], inputs: Sequence[np.ndarray]) -> Step:
    captured = capture_function(function, [tf.TensorSpec(i.shape, i.dtype) for i in inputs])
    return Step(captured, function, tuple(inputs), {v.shared_name: v.variable.numpy() for v in captured.variables})


def branches(width: int = 24, count: int = 3, optimizer: str = "adam") -> Step:
    """Dense branches side by side, whose sum is trained."""
    draw = np.random.default_rng(0)
    first = [tf.Variable(draw.normal(size=(width, width)) / width, dtype=tf.float32, name=f"first_{b}") for b in range(count)]
    second = [tf.Variable(draw.normal(size=(width, width)) / width, dtype=tf.float32, name=f"second_{b}") for b in range(count)]
    flat = [*first, *second]
    updates = keras.optimizers.get({"class_name": optimizer, "config": {"learning_rate": 0.01}})
    updates.build(flat)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            total = tf.add_n([tf.tanh(tf.tanh(x @ a) @ b) for a, b in zip(first, second, strict=True)])
            loss = tf.reduce_mean(tf.square(total - y))
        updates.apply_gradients(zip(tape.gradient(loss, flat), flat, strict=True))
        return loss

    return step_of(step, [draw.normal(size=(4, width)).astype(np.float32) for _ in range(2)])


def endless() -> Step:
    """A step that takes minutes on the device of its loop."""
    weight = tf.Variable(np.eye(200, dtype=np.float32) * 0.5, name="weight")

    def step(x: tf.Tensor) -> tf.Tensor:
        _, power = tf.while_loop(lambda i, _: i < 10**9, lambda i, p: (i + 1, p @ weight), (tf.constant(0), x))
        loss = tf.reduce_sum(power)
        weight.assign_sub(0.1 * power)
        return loss

    return step_of(step, [np.ones((200, 200), np.float32)])


def greedy(side: int) -> Step:
    """A step whose product takes side * side * 4 bytes."""
    weight = tf.Variable(np.ones((side, 8), np.float32), name="weight")

    def step(x: tf.Tensor) -> tf.Tensor:
        product = tf.matmul(weight, x, name="far_too_large")
        loss = tf.reduce_sum(product)
        weight.assign_sub(tf.reduce_mean(product, axis=1, keepdims=True) * tf.ones((1, 8)))
        return loss

    return step_of(step, [np.ones((8, side), np.float32)])
