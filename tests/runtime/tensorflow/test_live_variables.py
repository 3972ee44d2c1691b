"""Variables whose values are elsewhere: whoever looks at them, in whatever way, sees the values that are there."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from baechi_ext.errors import ExecutionError
from baechi_runtime.tensorflow.lowering.live_variables import LiveVariables, watch_data_sets


class Elsewhere:
    """Devices that hold 7 in all of a model's variables."""

    def __init__(self, model: keras.Model) -> None:
        self.values = {v.path: np.full(v.shape, 7, v.dtype) for v in model.variables}
        self.asked: list[str] = []
        self.live = LiveVariables({v.path: v.value for v in model.variables}, self.fetch)

    def fetch(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        self.asked += names
        return {n: self.values[n] for n in names}


@pytest.fixture
def model() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, name="low"), keras.layers.Dense(2, name="high")])
    model.compile("sgd", "mse")
    return model


@pytest.fixture
def elsewhere(model: keras.Model) -> Iterator[Elsewhere]:
    found = Elsewhere(model)
    found.live.leave()
    yield found
    found.live.forget()


def test_a_variable_that_is_read_is_brought_alone(model: keras.Model, elsewhere: Elsewhere) -> None:
    bias = model.get_layer("low").bias
    assert elsewhere.asked == []
    assert (bias.numpy() == 7).all()
    assert (bias + 1 == 8).numpy().all()
    assert elsewhere.asked == [bias.path]


@pytest.mark.parametrize(
    "op", [tf.identity, tf.reduce_max, partial(tf.gather, indices=[0]), lambda v: tf.stack([v, v]), lambda v: tf.concat([v, v], 0)]
)
def test_an_op_that_is_given_the_variable_itself_sees_it(model: keras.Model, elsewhere: Elsewhere, op: Callable[..., tf.Tensor]) -> None:
    assert (op(model.get_layer("low").bias.value).numpy() == 7).all()


def test_shapes_need_nothing(model: keras.Model, elsewhere: Elsewhere) -> None:
    assert [tuple(v.shape) for v in model.variables] == [(3, 3), (3,), (3, 2), (2,)]
    assert model.count_params() == 20
    assert all(isinstance(v.value, tf.Variable) for v in model.variables)
    assert elsewhere.asked == []


def test_functions_that_were_traced_before_see_it(model: keras.Model) -> None:
    low, high = 3 * 7 + 7, 3 * 7 * (3 * 7 + 7) + 7
    assert model.predict(np.ones((1, 3)), verbose=0).max() < low
    found = Elsewhere(model)
    found.live.leave()
    assert model.predict(np.ones((1, 3)), verbose=0).tolist() == [[high, high]]
    assert sorted(found.asked) == sorted(found.values)


def test_tracing_a_function_puts_no_assignment_into_it(model: keras.Model, elsewhere: Elsewhere) -> None:
    @tf.function
    def total() -> tf.Tensor:
        return tf.reduce_sum(model.get_layer("low").kernel.value)

    kinds = {op.type for op in total.get_concrete_function().graph.get_operations()}
    assert "AssignVariableOp" not in kinds
    assert float(total()) == 63


def test_gradients_are_those_of_the_new_values(model: keras.Model, elsewhere: Elsewhere) -> None:
    kernel = model.get_layer("high").kernel.value
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(kernel * kernel)
    assert (tape.gradient(loss, kernel).numpy() == 14).all()


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras's own, with NumPy 2
def test_saving_sees_it(model: keras.Model, elsewhere: Elsewhere, tmp_path) -> None:
    model.save_weights(tmp_path / "x.weights.h5")
    tf.train.Checkpoint(model=model).save(tmp_path / "checkpoint")
    elsewhere.live.forget()
    model.set_weights([w * 0 for w in model.get_weights()])
    model.load_weights(tmp_path / "x.weights.h5")
    assert all((w == 7).all() for w in model.get_weights())


def test_only_what_changed_is_sent_back(model: keras.Model, elsewhere: Elsewhere) -> None:
    low, high = model.get_layer("low"), model.get_layer("high")
    low.bias.numpy()
    high.bias.assign([1.0, 2.0])
    assert {n: x.tolist() for n, x in elsewhere.live.changes().items()} == {high.bias.path: [1.0, 2.0]}
    elsewhere.live.leave()
    assert elsewhere.live.changes() == {}


def test_the_first_time_all_is_sent(model: keras.Model) -> None:
    found = Elsewhere(model)
    assert set(found.live.changes()) == set(found.values)


def test_two_holders_hand_a_variable_on(model: keras.Model, elsewhere: Elsewhere) -> None:
    other = Elsewhere(model)
    other.values = {n: x + 1 for n, x in other.values.items()}
    assert all((x == 7).all() for x in other.live.changes().values())
    other.live.leave()
    assert (model.get_layer("low").kernel.numpy() == 8).all()
    other.live.forget()


def test_what_is_lost_is_not_taken_for_what_is_here(model: keras.Model) -> None:
    class Gone(Elsewhere):
        def fetch(self, names: Sequence[str]) -> dict[str, np.ndarray]:
            raise ExecutionError("the server of device 1 was killed")

    found = Gone(model)
    found.live.leave()
    for _ in range(2):
        with pytest.raises(ExecutionError, match="the server of device 1 was killed"):
            model.get_weights()
    found.live.forget()
    assert np.isfinite(model.get_weights()[0]).all()


def test_a_variable_that_is_assigned_needs_no_device(model: keras.Model) -> None:
    def gone(names: Sequence[str]) -> dict[str, np.ndarray]:
        raise ExecutionError("the devices are gone")

    live = LiveVariables({v.path: v.value for v in model.variables}, gone)
    live.leave()
    bias, kernel = model.get_layer("low").bias, model.get_layer("low").kernel
    with pytest.raises(ExecutionError):  # of another shape
        bias.value.assign([1.0, 2.0])
    with pytest.raises(ExecutionError):
        bias.numpy()
    bias.assign([1.0, 2.0, 3.0])
    np.testing.assert_array_equal(bias.numpy(), [1, 2, 3])
    with pytest.raises(ExecutionError):
        kernel.numpy()
    model.set_weights([np.ones(v.shape) for v in model.weights])
    np.testing.assert_array_equal(kernel.numpy(), np.ones((3, 3)))
    assert set(live.changes()) == {v.path for v in model.weights}
    live.forget()


@pytest.mark.parametrize("whole", [True, False])
def test_a_checkpoint_is_restored_without_the_devices(model: keras.Model, whole: bool, tmp_path: Path) -> None:
    def checkpoint() -> tf.train.Checkpoint:
        return tf.train.Checkpoint(model if whole else None, weight=model.weights[0].value)

    def gone(names: Sequence[str]) -> dict[str, np.ndarray]:
        raise ExecutionError("the devices are gone")

    expected = model.get_weights()[0]
    path = checkpoint().save(tmp_path / "checkpoint")
    live = LiveVariables({v.path: v.value for v in model.variables}, gone)
    model.weights[0].assign(expected * 0)
    live.leave()
    checkpoint().restore(path).expect_partial()
    np.testing.assert_array_equal(model.weights[0].numpy(), expected)
    assert set(live.changes()) >= {model.weights[0].path}
    live.leave()
    with pytest.raises(ExecutionError, match="the devices are gone"):
        checkpoint().save(tmp_path / "checkpoint")
    live.forget()


def odd(x: tf.Tensor) -> tf.Tensor:
    return x % 2


@pytest.mark.parametrize("shard", [None, odd])
def test_a_watched_data_set_may_be_saved_with_checkpoints(shard: Callable[[tf.Tensor], tf.Tensor] | None, tmp_path: Path) -> None:
    watch_data_sets()
    steps = tf.Variable(0, dtype=tf.int64)
    kept = {"step_counter": steps, "checkpoint_interval": 2, "directory": str(tmp_path / "checkpoints"), "max_to_keep": 1}
    tf.data.Dataset.range(5).save(str(tmp_path / "data"), shard_func=shard, checkpoint_args=kept)
    assert int(steps) == 5
    assert (tmp_path / "data").is_dir()
