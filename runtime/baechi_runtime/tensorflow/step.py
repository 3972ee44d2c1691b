"""The training step that is captured, placed and timed: forward, loss, tf.GradientTape, optimizer.apply_gradients."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from baechi_ext.capture.tensorflow_graph import CapturedFunction
from baechi_ext.errors import MissingBackendError, OptionError
from baechi_runtime.drivers import backend
from baechi_runtime.models.registry import ModelOptions, chosen_options, code_of, find_model

OPTIMIZERS: dict[str, Callable[..., keras.optimizers.Optimizer]] = {
    "sgd": keras.optimizers.SGD,
    "momentum": partial(keras.optimizers.SGD, momentum=0.9),
    "rmsprop": keras.optimizers.RMSprop,
    "adagrad": keras.optimizers.Adagrad,
    "adadelta": keras.optimizers.Adadelta,
    "adam": keras.optimizers.Adam,
    "adamw": keras.optimizers.AdamW,
}


@dataclass(frozen=True)
class TensorFlowStep:
    """`function(*inputs)` trains one step and returns the scalar loss."""

    function: Callable[..., tf.Tensor]
    """Not traced; its variables and its optimizer's exist already."""
    inputs: tuple[np.ndarray, ...]
    ordinary: Callable[..., Any] | None = None
    """The step as its user runs it, which may be compiled; None: as `function` is."""
    expert: Callable[[str], int | None] | None = None
    """Where an expert would put a variable or an op, by its name; None for what has no place of its own. The device is taken modulo their
    number."""

    def signature(self) -> tuple[tf.TensorSpec, ...]:
        """Shapes and types of the inputs."""
        return tuple(tf.TensorSpec(i.shape, i.dtype) for i in self.inputs)


def make_optimizer(name: str, learning_rate: float) -> keras.optimizers.Optimizer:
    """Raises OptionError for an unknown name."""
    if name not in OPTIMIZERS:
        raise OptionError(f"unknown optimizer {name!r}; choose one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name](learning_rate=learning_rate)


def build_step(name: str, options: ModelOptions, optimizer: str = "sgd", learning_rate: float = 0.01) -> TensorFlowStep:
    """The training step of model `name`; weights and inputs are drawn from `options.seed`, which is set as the process's seed.

    Raises OptionError for an unknown model or optimizer or an option the model cannot take, MissingBackendError where Keras runs on
    another framework.
    """
    model = find_model(name, "tensorflow")
    chosen = chosen_options(name, options, "tensorflow")
    require_keras_on_tensorflow()
    keras.backend.clear_session()  # which starts the names of layers and optimizers anew
    updates = make_optimizer(optimizer, learning_rate)
    keras.utils.set_random_seed(options.seed)
    code = code_of(name, "tensorflow")
    network, inputs = code.build(code.Options(**chosen))
    updates.build(network.trainable_variables)
    loss_of = network if model.has_loss else partial(cross_entropy, network)
    function = partial(train_step, loss_of, network.trainable_variables, updates)
    return TensorFlowStep(function, inputs, expert=getattr(network, "expert_device", None))


def require_keras_on_tensorflow() -> None:
    """Raises MissingBackendError where Keras runs on another framework, or a script asks for another one, too late to be heard: Keras was
    loaded before."""
    if keras.backend.backend() != "tensorflow":
        raise MissingBackendError(f"Keras runs on {keras.backend.backend()} here; set KERAS_BACKEND=tensorflow")
    if (asked := os.environ.get("KERAS_BACKEND") or "tensorflow") != "tensorflow":
        raise MissingBackendError(f"Keras runs on tensorflow here, and KERAS_BACKEND was set to {asked} meanwhile; set it to tensorflow")


def train_step(
    loss_of: Callable[..., tf.Tensor], variables: Sequence[Any], optimizer: keras.optimizers.Optimizer, *inputs: tf.Tensor
) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = loss_of(*inputs)
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return loss


def cross_entropy(model: Callable[..., tf.Tensor], images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """The mean over the batch, of a model that returns logits."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images, training=True)))


@dataclass(frozen=True)
class Captured(backend.Captured):
    """See backend.Captured."""

    step: TensorFlowStep
    function: CapturedFunction
    first: dict[str, np.ndarray]
    """The variables' first values."""

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self.function.notes)
