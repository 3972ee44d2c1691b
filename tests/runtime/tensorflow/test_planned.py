"""`baechi_ext.plan` of Keras models and of steps: what their fits compute by a plan, what several methods take, and what is refused."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import baechi_ext
from baechi_ext.errors import MismatchError, OptionError
from baechi_ext.ir import Cluster, Device
from baechi_runtime.host.host_memory import usable_bytes
from baechi_runtime.tensorflow.backend import SLACK_BYTES, TensorFlowBackend, memory_limits
from baechi_runtime.tensorflow.calls.keras_fit import step_of_fit
from baechi_runtime.tensorflow.calls.parallelize import ParallelizeOptions
from baechi_runtime.tensorflow.coarse import COARSE
from baechi_runtime.tensorflow.servers.devices import Logical, Servers
from tests.tensorflow_steps import dense_step

HERE: dict[str, Any] = {"workers": "thread", "method": "m_topo", "devices": Cluster.uniform(2)}
"""Logical devices, which start at once."""
layers = keras.layers


def dense() -> tuple[keras.Model, Any]:
    """Not built yet, with an optimizer that keeps averages; the data are of another type than the model's."""
    model = keras.Sequential([layers.Dense(24, "relu"), layers.Dense(3, "softmax")], name="dense")
    model.compile(keras.optimizers.Adam(0.01, use_ema=True), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model, (np.random.standard_normal((24, 6)), np.random.randint(3, size=24))


def with_state() -> tuple[keras.Model, Any]:
    """Statistics of batches, random numbers, a penalty, and weights of examples."""
    body = [keras.Input((6, 6, 2)), layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.3), layers.Flatten()]
    model = keras.Sequential([*body, layers.Dense(1, kernel_regularizer="l2")], name="with_state")
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", weighted_metrics=["mae"])
    x = np.random.standard_normal((24, 6, 6, 2)).astype(np.float32)
    return model, {"x": x, "y": x.mean(axis=(1, 2, 3)), "sample_weight": np.random.random(24)}


def two_headed() -> tuple[keras.Model, Any]:
    """Inputs by name, a list of outputs, and a loss for each."""
    left, right = keras.Input((5,), name="left"), keras.Input((3,), name="right")
    both = layers.Concatenate()([layers.Dense(16, "tanh")(left), layers.Dense(8)(right)])
    model = keras.Model({"left": left, "right": right}, [layers.Dense(1)(both), layers.Dense(4)(both)], name="two_headed")
    losses = ["mse", keras.losses.SparseCategoricalCrossentropy(from_logits=True)]
    model.compile("rmsprop", losses, metrics=[["mae"], ["accuracy"]], loss_weights=[1.0, 0.5])
    x = {"left": np.random.standard_normal((24, 5)).astype("float32"), "right": np.random.standard_normal((24, 3)).astype("float32")}
    return model, (x, [np.random.standard_normal((24, 1)).astype("float32"), np.random.randint(4, size=24)])


class Doubled(keras.Model):
    """Trains its layer and one that the optimizer of `compile` never sees."""

    def __init__(self) -> None:
        super().__init__(name="doubled")
        self.first, self.second = layers.Dense(6), layers.Dense(6)
        self.own, self.mean = keras.optimizers.SGD(0.1), keras.metrics.Mean(name="distance")

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))

    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(data) - data))
        weights = self.trainable_variables
        self.own.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.mean.update_state(loss)
        return {"distance": self.mean.result()}


def doubled() -> tuple[keras.Model, Any]:
    model = Doubled()
    model.compile()
    return model, (np.random.standard_normal((24, 6)).astype(np.float32),)


def made(make: Callable[[], tuple[keras.Model, Any]]) -> tuple[keras.Model, Any, dict[str, Any]]:
    """The same each time: a model, a batch of 8, and all data as arguments of `fit`."""
    keras.utils.clear_session()  # which starts the names of layers anew
    keras.utils.set_random_seed(3)
    model, data = make()
    batch = keras.tree.map_structure(lambda x: x[:8], data)
    named = data if isinstance(data, dict) else dict(zip(("x", "y"), data, strict=False))
    return model, batch, {**named, "batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}


def state(model: keras.Model) -> list[np.ndarray]:
    return [v.numpy() for v in (*model.variables, *(model.optimizer.variables if model.optimizer.built else ()))]


@pytest.mark.parametrize("make", [dense, with_state, two_headed, doubled])
def test_a_fit_by_a_plan_is_the_fit_unplaced(make: Callable[[], tuple[keras.Model, Any]]) -> None:
    """Planning changes no value, and the fit runs by that very plan: losses, metrics, weights, slots and seeds are Keras's own."""
    ordinary, _, arguments = made(make)
    expected = ordinary.fit(**arguments).history
    model, batch, arguments = made(make)
    before = [w.copy() for w in model.get_weights()]
    run = baechi_ext.plan(model, batch, **HERE)
    assert repr(run).startswith(f"<Run of {model.name}.train_step: m_topo, ")
    assert all((a == b).all() for a, b in zip(before, model.get_weights(), strict=False))
    assert not any(v.numpy().any() for v in model.metrics_variables)
    pinned = run.pin(run.graph.ops[0].id, 1)
    assert pinned.apply(verify_steps=1, keep_placed=True) is model
    found = model.fit(**arguments).history
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, err_msg=name)
    for a, b in zip(state(model), state(ordinary), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    report = baechi_ext.report(model)
    assert (report.placed_steps, report.unplaced_steps, report.shapes, report.verified.steps) == (6, 0, 1, 1)
    assert report.plan.placement == pinned.plan.placement


def test_a_step_that_tensorflow_rewrites_is_compared_as_it_was_captured() -> None:
    """Ops that are rewritten to one are rounded once, which in 16 bits differs by more than any tolerance."""
    keras.utils.set_random_seed(3)
    half = keras.DTypePolicy("mixed_bfloat16")
    model = keras.Sequential([keras.Input((10,)), layers.Dense(20, "relu", dtype=half), layers.Dense(1, dtype=half)])
    model.compile("adam", "mse")
    x, y = np.random.random((8, 10)), np.random.random((8, 1))
    baechi_ext.plan(model, (x, y), **HERE).apply(keep_placed=True)
    losses = [model.train_on_batch(x, y) for _ in range(3)]
    report = baechi_ext.report(model)
    baechi_ext.unplace(model)
    assert losses == sorted(losses, reverse=True)
    assert (report.placed_steps, report.verified.steps, report.refusal) == (3, 2, "")
    assert report.verified.max_rel_diff <= 1e-5


def test_batches_one_by_one_and_another_plan_after_the_first() -> None:
    ordinary, (x, y), _ = made(dense)
    model, batch, _ = made(dense)
    run = baechi_ext.plan(model, batch, **HERE)
    for number, planned in enumerate((run, run.what_if(devices=3), None)):
        if planned is not None:
            planned.apply(verify_steps=0, keep_placed=True)
            with pytest.raises(OptionError, match=r"the fit of dense is placed already; call baechi_ext.unplace\(model\) first"):
                baechi_ext.plan(model, batch, **HERE)
        for _ in range(2):
            np.testing.assert_allclose(model.train_on_batch(x, y), ordinary.train_on_batch(x, y), rtol=1e-4)
        if planned is not None:
            assert baechi_ext.report(model).placed_steps == 2, number
            assert len(baechi_ext.report(model).devices) == 2 + number
            assert baechi_ext.unplace(model) is model
            with pytest.raises(OptionError, match="no step of dense is placed"):
                baechi_ext.report(model)
    np.testing.assert_allclose(model.evaluate(x, y, verbose=0), ordinary.evaluate(x, y, verbose=0), rtol=1e-4)


def test_what_was_not_planned_gets_a_plan_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    ordinary, (x, y), _ = made(dense)
    model, batch, _ = made(dense)
    run = baechi_ext.plan(model, batch, **HERE)
    run.apply(verify_steps=0, keep_placed=True)
    for arguments in [(x, y, np.arange(8.0)), (x, y)] * 2:
        np.testing.assert_allclose(model.train_on_batch(*arguments), ordinary.train_on_batch(*arguments), rtol=1e-4)
    assert capsys.readouterr().err.count("dense.train_step is called with other shapes or types than it was planned for") == 1
    report = baechi_ext.report(model)
    assert (report.placed_steps, report.shapes) == (4, 2)
    assert len(report.plan.placement) > len(run.plan.placement)
    assert [*step_of_fit(model).steps.values()][1].session.timeline is run.timeline
    baechi_ext.unplace(model)


def test_a_model_that_is_compiled_anew_is_another_step() -> None:
    ordinary, (x, y), _ = made(dense)
    model, batch, _ = made(dense)
    run = baechi_ext.plan(model, batch, **HERE)
    for each in (model, ordinary):
        each.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    with pytest.raises(MismatchError, match="dense was compiled anew after it was planned; plan it again"):
        run.apply()
    baechi_ext.plan(model, batch, **HERE).apply(verify_steps=0, keep_placed=True)
    losses = [each.train_on_batch(x, y) for each in (model, ordinary)]
    for each in (model, ordinary):
        each.compile(keras.optimizers.SGD(0.2), "sparse_categorical_crossentropy")
        losses += [each.train_on_batch(x, y) for _ in range(3)]
    np.testing.assert_allclose([losses[0], *losses[2:5]], [losses[1], *losses[5:]], rtol=1e-4)
    assert baechi_ext.report(model).placed_steps == 2  # the first one makes the new optimizer's variables
    baechi_ext.unplace(model)


@pytest.mark.parametrize("trained", [False, True])
def test_methods_are_measured_and_nothing_is_trained(trained: bool) -> None:
    model, (x, y), _ = made(dense)
    run = baechi_ext.plan(model, (x, y), **HERE)
    if trained:
        run.apply(verify_steps=0, keep_placed=True)
        model.train_on_batch(x, y)
    before = state(model)
    compared = run.compare("m_topo", measure=True)
    for a, b in zip(before, state(model), strict=True):
        np.testing.assert_array_equal(a, b)
    assert compared.measured.measured == ("single", "m_topo")
    assert all(c.parity.passed and c.parity.compared > 8 for c in compared.measured.contenders)
    assert compared["m_topo"].plan.placement == run.plan.placement
    assert compared.measured.unplaced.startswith("tf.function, ")
    assert repr(compared).startswith(compared.measured.recommendation())
    if trained:
        ordinary, _, _ = made(dense)
        expected = [ordinary.train_on_batch(x, y) for _ in range(2)][1]
        np.testing.assert_allclose(model.train_on_batch(x, y), expected, rtol=1e-4)


def test_a_step_is_measured_on_servers() -> None:
    step = dense_step()
    run = baechi_ext.plan(step.function, step.inputs, method="round_robin", devices=Cluster.uniform(2))
    assert run.pin(run.graph.ops[0].id, 1).plan.options["grouper"] == run.plan.options["grouper"] == COARSE[0]
    before = step.model.get_weights()
    compared = run.compare("round_robin", measure=True)
    assert compared.measured.executor == "TensorFlow, servers"
    assert set(compared.measured.measurement.samples) == {"eager", "single", "round_robin"}
    for a, b in zip(before, step.model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_memory_is_limited_where_devices_have_less_than_their_share_of_the_machine() -> None:
    """With a limit, their kernels are others."""

    def limits(memory_bytes: int) -> list[int | None]:
        cluster = Cluster((Device("cpu:0", memory_bytes), Device("cpu:1", memory_bytes)))
        return memory_limits(ParallelizeOptions(cluster=cluster).request("step"))

    share = usable_bytes() // 2
    assert limits(share) == [None, None]
    assert limits(share - 1) == [share - 1 + SLACK_BYTES] * 2


def test_only_servers_with_a_limit_are_without_onednn() -> None:
    request = ParallelizeOptions(device_memory="1GiB").request("step")
    for devices, said in ((Logical(2), "cpu"), (Servers(2), "cpu"), (Servers(2, memory_limits(request)), "cpu without oneDNN")):
        backend = TensorFlowBackend(request, devices, devices)
        assert backend.arithmetic() == said
        assert bool(backend.notes(None)) == (said != "cpu")


def eager() -> keras.Model:
    model, _ = dense()
    model.compile("sgd", "mse", run_eagerly=True)
    return model


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: baechi_ext.plan(keras.Sequential([layers.Dense(1)], name="raw"), (1,)), r"raw has no training step before compile"),
        (lambda: baechi_ext.plan(eager(), (1,)), "dense runs eagerly; compile it without run_eagerly"),
        (lambda: baechi_ext.plan(dense()[0]), r"a Keras model are a batch, as .x, y. or .* not a NoneType"),
        (lambda: baechi_ext.plan(dense()[0], np.ones((8, 6))), "or a dict of these, not a ndarray"),
        (lambda: baechi_ext.plan(dense()[0], {"left": 1}), "or a dict of these, not a dict of left"),
        (lambda: baechi_ext.report(dense()[0]), r"no step of dense is placed; call baechi_ext.parallelize\(model\) first"),
    ],
)
def test_what_can_not_be_says_what_can(ask: Callable[[], object], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        ask()
