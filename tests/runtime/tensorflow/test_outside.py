"""Placed training steps that are plain Python functions, what they read and change outside of them, and arguments that are no arrays."""

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import baechi_ext
from baechi_ext.capture import tensorflow_source
from baechi_ext.errors import CaptureError
from baechi_runtime.tensorflow.calls import keras_fit, placed_function

HERE: dict[str, Any] = {"workers": "thread", "method": "m_topo", "keep_placed": True, "framework": "tensorflow"}
X = tf.constant(np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8))
beta = 0.0
stats = {"steps": 0}


def penalty(w: tf.Tensor) -> tf.Tensor:
    return beta * tf.reduce_sum(w * w)


class Trainer:
    def __init__(self, also: Callable[["Trainer", tf.Tensor], Any] = lambda *_: None) -> None:
        self.w = tf.Variable(tf.ones((8, 8)))
        self.also, self.scale, self.train = also, 1.0, True
        self.steps, self.history = 0, []

    def step(self, x: tf.Tensor) -> tf.Tensor:
        loss = self.scale * tf.reduce_sum(tf.tanh(x @ self.w)) + penalty(self.w)
        if self.train:
            self.w.assign_sub(0.01 * x)
        self.note(loss)
        return loss

    def note(self, loss: tf.Tensor) -> None:
        self.also(self, loss)


def test_a_number_that_changes_outside_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary, ours = Trainer(), Trainer()
    placed = baechi_ext.parallelize(ours.step, **HERE)

    def losses() -> None:
        expected = [float(ordinary.step(X)) for _ in range(4)]
        np.testing.assert_allclose([float(placed(X)) for _ in range(4)], expected, rtol=1e-4)

    losses()
    monkeypatch.setattr("tests.runtime.tensorflow.test_outside.beta", 1.0)
    losses()
    ordinary.scale = ours.scale = 3.0
    losses()
    ordinary.train = ours.train = False
    losses()
    assert len(placed.steps) == 4
    assert not placed.refusal
    ordinary.train = ours.train = True
    losses()
    assert len(placed.steps) == 4  # as the third ones
    placed.unplace()


class Step:
    def __init__(self) -> None:
        self.w, self.scale, self.best = tf.Variable(tf.zeros((8, 8))), np.float32(1.0), float("nan")

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        self.w.assign_sub(self.scale * x)
        return tf.reduce_sum(penalty(self.w))


def subtract(step: Step, x: tf.Tensor) -> tf.Tensor:
    step.w.assign_sub(beta * x)
    return tf.reduce_sum(step.w)


def test_numbers_of_objects_that_are_called_and_of_partials_count(monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary, ours = Step(), Step()
    steps = [(ordinary, baechi_ext.parallelize(ours, **HERE))]
    steps += [(partial(subtract, ordinary), baechi_ext.parallelize(partial(partial(subtract), ours), **HERE))]
    for number in (1.0, 5.0, 1.0):
        monkeypatch.setattr("tests.runtime.tensorflow.test_outside.beta", number)
        ordinary.scale, ours.scale = np.float32(number), np.float32(number)
        for plain, placed in steps:
            np.testing.assert_allclose([float(placed(X)) for _ in range(3)], [float(plain(X)) for _ in range(3)], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(ours.w.numpy(), ordinary.w.numpy(), rtol=1e-4)
    for _, placed in steps:
        assert len(placed.steps) == 2
        placed.unplace()


def test_an_object_that_counts_its_calls_is_refused() -> None:
    class Counting(Step):
        steps = 0

        def __call__(self, x: tf.Tensor) -> tf.Tensor:
            self.steps += 1
            return super().__call__(x)

    step = Counting()
    step.steps = 0
    with pytest.raises(CaptureError, match=r"changes the Python variable 'self.steps' \(0 before"):
        baechi_ext.parallelize(step, **HERE)(X)


def counts(trainer: Trainer, _: tf.Tensor) -> None:
    trainer.steps += 1


def remembers(trainer: Trainer, loss: tf.Tensor) -> None:
    trainer.history.append(loss)


def counts_in_a_dict(*_: Any) -> None:
    stats["steps"] += 1


def prints(*_: Any) -> None:
    print("a step")


@pytest.mark.parametrize(
    ("also", "said"),
    [
        (counts, r"changes the Python variable 'self.steps' \(0 before"),
        (remembers, r"changes the Python variable 'self.history' \(0 entries before"),
        (counts_in_a_dict, r"changes the Python variable \"stats\['steps'\]\" \("),
        (prints, "prints 'a step'"),
    ],
)
def test_a_step_that_changes_python_is_refused(also: Callable[..., Any], said: str) -> None:
    trainer = Trainer()

    def step(x: tf.Tensor) -> tf.Tensor:
        loss = trainer.step(x)
        also(trainer, loss)
        return loss

    trainer.also = also
    target = step if also in (counts_in_a_dict, prints) else trainer.step
    with pytest.raises(CaptureError, match=said) as raised:
        baechi_ext.parallelize(target, **HERE)(X)
    assert "decorate the step with tf.function" in str(raised.value)


def test_it_runs_as_it_is_then(capsys: pytest.CaptureFixture[str]) -> None:
    placed = baechi_ext.parallelize(Trainer(prints).step, **HERE, fallback=True)
    for _ in range(5):
        placed(X)
    out, err = capsys.readouterr()
    assert out == "a step\n" * 5
    assert err.count("goes on unplaced") == 1


@pytest.mark.parametrize("kind", ["variant", "resource"])
def test_an_argument_that_is_no_array_is_refused(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    listed = tf.raw_ops.TensorListFromTensor(tensor=X, element_shape=(8,))
    given = {"variant": listed, "resource": tf.Variable(1.0).handle}[kind]
    placed = baechi_ext.parallelize(lambda x: x, **HERE, fallback=True)
    assert placed(given) is given
    assert f"an argument of the training step is a tensor of {kind}s, which can't be placed" in capsys.readouterr().err


def test_tensors_that_no_graph_can_hold_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    half = tf.constant(np.ones((4, 8), np.float32))

    def called(most_bytes: int, step: Callable[..., Any]) -> Any:
        monkeypatch.setattr(tensorflow_source, "_MOST_BYTES", most_bytes)
        return baechi_ext.parallelize(step, **HERE)(tf.constant(1.0))

    with pytest.raises(CaptureError, match=r"uses the tensor '\S+' of 256 bytes; a graph holds less than 2 GiB of such constants; make"):
        called(256, lambda x: tf.reduce_sum(x * X))
    with pytest.raises(CaptureError, match=r"uses the tensor '\S+' of 256 bytes and others, of 384 bytes in all; a graph holds"):
        called(384, lambda x: tf.reduce_sum(x * half) + tf.reduce_sum(x * X))
    assert np.isfinite(called(385, lambda x: tf.reduce_sum(x * half) + tf.reduce_sum(x * X)))


def test_steps_of_a_fit_that_run_as_they_are_are_counted() -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse", steps_per_execution=2)
    model.optimizer.build(model.trainable_variables)
    x, options = X.numpy(), {name: value for name, value in HERE.items() if name != "framework"}
    baechi_ext.parallelize(model, **options)
    model.fit(x, x[:, :4], batch_size=2, verbose=0)
    step = keras_fit.step_of_fit(model)
    assert not step.unplaced
    tf.config.run_functions_eagerly(True)
    try:
        model.train_function(iter([(X[:2], X[:2, :4])] * 2))
    finally:
        tf.config.run_functions_eagerly(False)
    assert step.unplaced == {placed_function.EAGERLY: 2}
    step.unplace("enough")
    data = iter(tf.data.Dataset.from_tensors((X, X[:, :4])).repeat(2))
    model.train_function(data)
    with pytest.raises((StopIteration, tf.errors.OutOfRangeError)):
        model.train_function(data)
    assert step.unplaced["enough"] == 2
    baechi_ext.unplace(model)
