"""Small real TensorFlow training steps for the tests of capture and runtime, and a plain way to run what was captured of them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np

from baechi_ext.capture.tensorflow_graph import CapturedFunction, capture_function
from baechi_ext.capture.tensorflow_private import tensorflow

tf = tensorflow()
import keras  # noqa: E402 - TensorFlow is first, so that its remarks at start-up are left out


@contextmanager
def narrow_layers() -> Iterator[None]:
    """Inception is made with an eighth of its channels meanwhile: the same ops."""
    from keras.src.applications import inception_v3  # keras.applications names what builds the model alone

    wide = inception_v3.conv2d_bn
    with patch.object(inception_v3, "conv2d_bn", lambda x, filters, *rest, **options: wide(x, filters // 8, *rest, **options)):
        yield


@dataclass
class Step:
    function: Callable[..., Any]
    inputs: tuple[np.ndarray, ...]
    model: keras.Model
    optimizer: keras.optimizers.Optimizer

    def capture(self, **options: Any) -> CapturedFunction:
        return capture_function(self.function, self.inputs, **options)


def step_of(model: keras.Model, optimizer: keras.optimizers.Optimizer, inputs: Sequence[np.ndarray]) -> Step:
    """A training step of a classifier; the last of the inputs holds the classes."""
    model.build(inputs[0].shape)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x: tf.Tensor, classes: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(classes, model(x, training=True))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True))
        return loss

    return Step(step, tuple(inputs), model, optimizer)


def dense_step() -> Step:
    """Two dense layers on 4 features, batch 2, and plain gradient descent."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential([layers.Dense(8, activation="relu", name="wide"), layers.Dense(3, name="narrow")], name="dense")
    rng = np.random.default_rng(0)
    return step_of(model, keras.optimizers.SGD(0.1, name="sgd"), [rng.normal(size=(2, 4)).astype(np.float32), np.array([2, 0], np.int32)])


def image_step() -> Step:
    """Convolution, batch normalisation, dropout and a dense layer with Adam."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(2)
    layers = keras.layers
    body = [layers.Conv2D(8, 3), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.5), layers.Flatten(), layers.Dense(10)]
    rng = np.random.default_rng(0)
    images = rng.normal(size=(2, 8, 8, 3)).astype(np.float32)
    return step_of(keras.Sequential(body, name="image"), keras.optimizers.Adam(0.01, name="adam"), [images, np.array([1, 3], np.int32)])


def words_step(*, unroll: bool) -> Step:
    """An embedding, a bidirectional LSTM and another one, with Adam and gradients clipped to a norm."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    layers = keras.layers
    lstm = layers.LSTM(8, return_sequences=True, unroll=unroll)
    body = [layers.Embedding(20, 8), layers.Bidirectional(lstm), layers.LSTM(8, return_sequences=True, unroll=unroll), layers.Dense(20)]
    words = np.random.default_rng(0).integers(0, 20, size=(2, 3)).astype(np.int32)
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=1.0, name="adam")
    return step_of(keras.Sequential(body, name="words"), optimizer, [words, words[:, ::-1].copy()])


def nested_step() -> Step:
    """The dense step, whose forward pass is a tf.function of its own with a branch on a tensor."""
    step = dense_step()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def forward(x: tf.Tensor, classes: tf.Tensor) -> tf.Tensor:
        loss = loss_of(classes, step.model(x, training=True))
        if loss > 100.0:
            loss = loss * 2.0
        return loss

    def function(x: tf.Tensor, classes: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = forward(x, classes)
        variables = step.model.trainable_variables
        step.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return Step(function, step.inputs, step.model, step.optimizer)


def run_in_session(captured: CapturedFunction, inputs: Sequence[np.ndarray], steps: int) -> tuple[list[list[Any]], dict[str, Any]]:
    """The results of some steps, and the variables' values after them, by shared name; grappler off, in this process."""
    v1, raw = tf.compat.v1, tf.raw_ops
    values = {v.placeholder: v.variable.numpy() for v in captured.variables}
    graph = tf.Graph()
    with graph.as_default():
        with tf.name_scope("state"):
            handles = {
                v.placeholder: raw.VarHandleOp(dtype=v.dtype, shape=v.shape, shared_name=v.shared_name) for v in captured.variables
            }
            values_in = {p: v1.placeholder(values[p].dtype, values[p].shape) for p in handles}
            initial = [raw.AssignVariableOp(resource=handles[p], value=values_in[p]) for p in handles]
            final = [raw.ReadVariableOp(resource=handles[v.placeholder], dtype=v.dtype) for v in captured.variables]
        tf.import_graph_def(captured.graph_def, input_map={f"{p}:0": handle for p, handle in handles.items()}, name="")
    with v1.Session(graph=graph, config=without_grappler()) as session:
        session.run(initial, {values_in[p]: values[p] for p in handles})
        feeds = dict(zip(captured.inputs, inputs, strict=True))
        returned = [session.run([list(captured.outputs), list(captured.targets)], feeds)[0] for _ in range(steps)]
        return returned, dict(zip((v.shared_name for v in captured.variables), session.run(final), strict=True))


def without_grappler() -> Any:
    """One thread, and the graph is run as it is."""
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=1, intra_op_parallelism_threads=1)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = -1
    return config


def run_as_function(step: Step, steps: int) -> list[Any]:
    """The results of some steps of its tf.function, grappler off; the step's own variables change."""
    options = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        function = tf.function(step.function)
        return [function(*map(tf.constant, step.inputs)) for _ in range(steps)]
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False} | options)
