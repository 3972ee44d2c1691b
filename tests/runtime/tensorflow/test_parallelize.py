"""`baechi_ext.parallelize` of training steps: what runs placed, that it computes the same, and what it says where it can't."""

import copy
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import baechi_ext
from baechi_ext.errors import CaptureError, ExecutionError, OptionError, ParityError
from baechi_ext.ir import Cluster, Link, OpGraph, Plan
from baechi_runtime.host.frameworks import framework_of
from baechi_runtime.measure import turns
from baechi_runtime.measure.turns import BLOCKS, PER_BLOCK
from baechi_runtime.report.call_report import PLAIN_TURN
from baechi_runtime.tensorflow.calls import placing
from baechi_runtime.tensorflow.calls.call_report import kept_step
from baechi_runtime.tensorflow.lowering.live_variables import LiveVariables
from baechi_runtime.tensorflow.servers.session import PlacedSession
from tests.runtime.forked import python

HERE = {"workers": "thread", "method": "m_topo", "keep_placed": True}
"""On logical devices, which start at once."""


class Trained:
    """A small network with everything that a training step needs, the same each time."""

    def __init__(self, optimizer: str = "sgd") -> None:
        keras.utils.set_random_seed(4)
        self.model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(24, "tanh"), keras.layers.Dense(3)])
        self.optimizer = keras.optimizers.get({"class_name": optimizer, "config": {"learning_rate": 0.05}})
        self.x = np.random.standard_normal((8, 6)).astype(np.float32)
        self.y = np.random.randint(3, size=8)

    def step(self, x: tf.Tensor, y: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            logits = self.model(x, training=True)
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
        return {"loss": loss, "logits": logits}

    def losses(self, step: Callable[..., Any], sizes: tuple[int, ...]) -> list[float]:
        return [float(step(self.x[:n], self.y[:n])["loss"]) for n in sizes]


class Clock:
    """The clock of turns, in the place of time.perf_counter."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def takes(self, ms: float, do: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose calls take so long."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.now += ms / 1000
            return do(*args, **kwargs)

        return call


@pytest.mark.parametrize(("placed_ms", "blocks"), [(2.0, BLOCKS), (4.0, 2), (40.0, 1)])
def test_placed_and_plain_steps_take_turns_and_the_faster_is_kept(
    placed_ms: float, blocks: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The variables go with the turns, which takes no time of either; the values are those of the ordinary step."""
    clock, plain_ms, in_turn = Clock(), 3.0, PER_BLOCK * blocks
    monkeypatch.setattr(turns, "time", clock)
    monkeypatch.setattr(turns, "_timed", [])
    monkeypatch.setattr(LiveVariables, "bring_all", clock.takes(1000, LiveVariables.bring_all))
    monkeypatch.setattr(PlacedSession, "initialise", clock.takes(1000, PlacedSession.initialise))
    monkeypatch.setattr(PlacedSession, "run", clock.takes(placed_ms, PlacedSession.run))
    ordinary, ours = Trained(), Trained()
    expected = ordinary.losses(tf.function(ordinary.step), (8,) * 30)
    placed = baechi_ext.parallelize(clock.takes(plain_ms, ours.step), framework="tensorflow", **{**HERE, "keep_placed": False})
    np.testing.assert_allclose(ours.losses(placed, (8,) * 30), expected, rtol=1e-4)
    np.testing.assert_allclose(ours.model.get_weights()[0], ordinary.model.get_weights()[0], rtol=1e-4)
    report, said = placed.report(), capsys.readouterr().err
    assert {name: samples.us for name, samples in report.samples.items()} == {
        "placed": pytest.approx([placed_ms * 1000] * in_turn),
        "eager": pytest.approx([plain_ms * 1000] * in_turn),
    }
    assert report.unplaced_calls[PLAIN_TURN] == in_turn
    if placed_ms < plain_ms:
        assert (report.refusal, report.placed_steps) == ("", 30 - in_turn)
        assert report.measurement().over_unplaced.median == pytest.approx(1.5)
        assert not report.doubts or "cores" in report.doubts[0]
        assert "plain steps" not in said
    else:
        why = f"plain steps are faster: 3.0 ms against {placed_ms} ms placed; --keep_placed stays placed"
        assert (report.refusal, report.placed_steps) == (why, 2 + in_turn)
        assert said.count(f"runs as it is: {why}") == 1
        assert report.unplaced_calls[why] == 30 - 2 - 2 * in_turn
        assert turns._timed == []  # noqa: SLF001


SIZES = (8, 8, 8, 5, 8, 8)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_placed_step_trains_as_the_ordinary_one(optimizer: str) -> None:
    """With an optimizer that makes its variables in the first step, and a smaller batch between."""
    ordinary, ours = Trained(optimizer), Trained(optimizer)
    expected = ordinary.losses(tf.function(ordinary.step), SIZES)
    placed = baechi_ext.parallelize(tf.function(ours.step), devices=2, **HERE)
    np.testing.assert_allclose(ours.losses(placed, SIZES), expected, rtol=1e-4)
    for a, b in zip(ours.model.get_weights(), ordinary.model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    assert int(ours.optimizer.iterations.numpy()) == len(SIZES)
    report = placed.report()
    assert (report.placed_steps, report.unplaced_steps, report.verified.steps, report.shapes) == (5, 1, 2, 1)
    assert min(report.num_ops) > 0
    assert "; m_topo, " in report.line()
    assert "1 steps of other shapes ran unplaced" in report.line()
    assert sum(report.num_ops) == len(placed.plan.placement)


def test_what_is_changed_between_steps_counts() -> None:
    ordinary, ours = Trained(), Trained()
    steps = [tf.function(ordinary.step), baechi_ext.parallelize(framework="tensorflow", **HERE)(ours.step)]
    found = []
    for trained, step in zip((ordinary, ours), steps, strict=True):
        curve = trained.losses(step, (8, 8, 8))
        trained.optimizer.learning_rate = 0.5
        trained.model.layers[1].bias.assign([1.0, 2.0, 3.0])
        found.append(curve + trained.losses(step, (8, 8)))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)


def test_another_shape_that_stays_is_placed_too() -> None:
    trained = Trained()
    placed = baechi_ext.parallelize(tf.function(trained.step), **HERE)
    ordinary = Trained()
    expected = ordinary.losses(tf.function(ordinary.step), (8, 8, 5, 5, 5, 8, 5))
    np.testing.assert_allclose(trained.losses(placed, (8, 8, 5, 5, 5, 8, 5)), expected, rtol=1e-4)
    report = placed.report()
    assert (report.shapes, report.placed_steps, report.unplaced_steps) == (2, 6, 1)


def test_unplaced_it_goes_on_where_it_was() -> None:
    trained, ordinary = Trained(), Trained()
    placed = baechi_ext.parallelize(tf.function(trained.step), **HERE)
    first = trained.losses(placed, (8, 8, 8))
    step = placed.unplace()
    found = first + trained.losses(step, (8,)) + trained.losses(placed, (8,))
    np.testing.assert_allclose(found, ordinary.losses(tf.function(ordinary.step), (8,) * 5), rtol=1e-4)
    assert "then as it is; it was unplaced" in placed.report().line()


def test_what_is_gone_is_off_the_devices() -> None:
    """At the latest where the next step is placed, and with its variables' values back where somebody still has them."""
    sessions, biases = [], []
    for _ in range(3):
        trained = Trained()
        placed = baechi_ext.parallelize(tf.function(trained.step), **HERE)
        trained.losses(placed, (8, 8, 8))
        sessions += [weakref.ref(step.session) for step in placed.steps.values()]
        biases.append(trained.model.layers[1].bias)
        del trained, placed
        gc.collect()
    assert [session() is None for session in sessions] == [True, True, False]
    assert np.abs(biases[0].numpy()).min() > 0
    for bias in biases[1:]:
        np.testing.assert_array_equal(bias.numpy(), biases[0].numpy())


def test_what_was_lost_with_the_devices_is_not_shown_when_a_step_is_unplaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(names: object) -> None:
        raise ExecutionError("the server of device 1 was killed")

    trained = Trained()
    placed = baechi_ext.parallelize(tf.function(trained.step), **HERE)
    trained.losses(placed, (8, 8, 8))
    (step,) = placed.steps.values()
    monkeypatch.setattr(step.session, "variables", lost)
    placed.unplace()
    with pytest.raises(ExecutionError, match="killed. What was trained since the variables were last looked at is lost"):
        trained.model.get_weights()
    monkeypatch.undo()
    with pytest.raises(ExecutionError, match="the devices that had the variables are gone. What was trained since"):
        trained.model.get_weights()
    step.live.forget()


def test_an_interrupt_while_variables_come_home_leaves_none_old(monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary, trained, assigned = Trained(), Trained(), []
    expected = ordinary.losses(tf.function(ordinary.step), (8,) * 4)
    placed = baechi_ext.parallelize(tf.function(trained.step), **HERE)
    found, assign = trained.losses(placed, (8, 8, 8)), tf.raw_ops.AssignVariableOp

    def interrupted(**given: Any) -> Any:
        assigned.append(given)
        if len(assigned) == 2:
            raise KeyboardInterrupt
        return assign(**given)

    monkeypatch.setattr(tf.raw_ops, "AssignVariableOp", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained.model.get_weights()
    monkeypatch.undo()
    np.testing.assert_allclose([*found, *trained.losses(placed, (8,))], expected, rtol=1e-4)
    ordinary_weights, weights = ordinary.model.get_weights(), trained.model.get_weights()
    for a, b in zip(ordinary_weights, weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)


def test_a_step_that_has_ended_keeps_nothing() -> None:
    trained = Trained()
    placed = baechi_ext.parallelize(tf.function(trained.step), **HERE)
    trained.losses(placed, (8, 8, 8))
    kept = [weakref.ref(step) for step in placed.steps.values()]
    placed.end()
    gc.collect()
    assert [step() for step in kept] == [None]


def test_a_step_that_compared_equal_did_so_whyever_it_is_placed_no_more(tmp_path: Path) -> None:
    trained = Trained()
    placed = baechi_ext.parallelize(tf.function(trained.step), **HERE)
    trained.losses(placed, (8, 8, 8))
    placed.unplace()
    assert kept_step(placed, "script.py", placed.report()).report["parity"]["passed"] is True


def test_a_model_whose_own_step_has_the_optimizer() -> None:
    class Model(keras.Model):
        def train_step(self, data: object) -> object:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True))
            return {"loss": loss}

    optimizer, inputs = keras.optimizers.SGD(0.1), keras.Input((10,))
    model = Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile(optimizer=None)
    baechi_ext.parallelize(model, **HERE)
    model.fit(np.ones((16, 10)), np.ones((16, 1)), batch_size=4, epochs=2, verbose=0)
    assert baechi_ext.report(model).placed_steps == 8


@pytest.mark.parametrize("kind", [lambda f: f, tf.function])
def test_variables_that_are_written_and_never_read_are_trained(kind: Callable[..., Any]) -> None:
    weight, steps = tf.Variable(tf.zeros((4, 4))), tf.Variable(0)

    def step(x: tf.Tensor) -> tf.Tensor:
        steps.assign_add(1, read_value=False)
        weight.assign_add(x, read_value=False)
        return tf.reduce_sum(x)

    placed = baechi_ext.parallelize(kind(step), framework="tensorflow", **HERE)
    for _ in range(4):
        placed(tf.ones((4, 4)))
    assert placed.report().placed_steps == 4
    assert (float(weight[0, 0]), int(steps)) == (4.0, 4)


class Moments(tf.experimental.ExtensionType):
    mean: tf.Tensor
    square: tf.Tensor


@pytest.mark.parametrize("kind", [lambda f: f, tf.function])
def test_results_of_a_type_of_the_users_own(kind: Callable[..., Any]) -> None:
    weight = tf.Variable(tf.zeros((4, 4)))

    def step(x: tf.Tensor) -> tuple[Any, ...]:
        weight.assign_add(x)
        return weight, Moments(tf.reduce_mean(weight), tf.reduce_mean(weight**2)), None, tf.reduce_sum(weight)

    placed = baechi_ext.parallelize(kind(step), framework="tensorflow", **HERE)
    for i in range(1, 5):
        value, moments, nothing, total = placed(tf.ones((4, 4)))
        assert isinstance(moments, Moments)
        assert (float(value[0, 0]), float(moments.mean), float(moments.square), nothing, float(total)) == (i, i, i * i, None, 16 * i)
    assert placed.report().placed_steps == 4


def test_a_thread_that_looks_amid_a_step_sees_what_the_step_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = tf.Variable(tf.zeros((4, 4)))

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        weight.assign_add(x)
        return tf.reduce_sum(weight)

    placed, seen = baechi_ext.parallelize(step, **HERE), []
    for _ in range(3):
        placed(tf.ones((4, 4)))
    (made,) = placed.steps.values()
    run, watch = made.session.run, threading.Thread(target=lambda: seen.append(weight.numpy().max()))

    def slowly(inputs: object) -> object:
        watch.start()
        watch.join(0.3)
        return run(inputs)

    monkeypatch.setattr(made.session, "run", slowly)
    placed(tf.ones((4, 4)))
    watch.join()
    assert (seen, weight.numpy().max()) == ([4], 4)


def test_steps_of_several_threads_are_placed_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, most = [], []

    def costed(*_: object) -> None:
        under_way.append(1)
        most.append(len(under_way))
        time.sleep(0.1)
        under_way.pop()

    stages = {"shared_devices": lambda _: (None, None), "costed": costed, "find_cluster": lambda *_: None, "place": lambda *_: None}
    for name, instead in stages.items():
        monkeypatch.setattr(placing, name, instead)
    threads = [threading.Thread(target=placing.place_step, args=(SimpleNamespace(log_device_placement=False), None, ())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1]


def test_methods_and_keyword_arguments() -> None:
    class Task(Trained):
        @baechi_ext.parallelize(framework="tensorflow", **HERE)
        def train(self, *, batch: dict[str, tf.Tensor], scale: float) -> tuple[tf.Tensor, None]:
            return scale * self.step(batch["x"], batch["y"])["loss"], None

    one, two, ordinary = Task(), Task(), Trained()
    expected = ordinary.losses(tf.function(ordinary.step), (8, 8, 8))
    for task in (one, two):
        found = [task.train(batch={"x": task.x, "y": task.y}, scale=2.0) for _ in range(3)]
        assert [nothing for _, nothing in found] == [None] * 3
        np.testing.assert_allclose([float(loss) / 2 for loss, _ in found], expected, rtol=1e-4)
    assert one.train.report().name == "Task.train"


class Fold:
    def __init__(self) -> None:
        self.weight = tf.Variable(tf.zeros((4, 4)))

    def step(self, x: tf.Tensor) -> tf.Tensor:
        self.weight.assign_add(x)
        return tf.reduce_sum(self.weight)

    placed = baechi_ext.parallelize(step, framework="tensorflow", **HERE)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fold)

    def __hash__(self) -> int:
        return 1


def test_a_method_that_is_copied_with_its_object_is_the_copys() -> None:
    first = Fold()
    first.kept = first.placed
    second = copy.deepcopy(first)
    assert [float(second.kept(tf.ones((4, 4)))) for _ in range(3)] == [16, 32, 48]
    assert [float(first.kept(tf.ones((4, 4)))) for _ in range(3)] == [16, 32, 48]
    assert second.placed.report().placed_steps == first.placed.report().placed_steps == 3


def test_an_object_whose_method_is_placed_is_not_kept() -> None:
    def bound() -> Fold:
        fold = Fold()
        fold.placed = baechi_ext.parallelize(fold.step, framework="tensorflow", **HERE)
        return fold

    def around() -> Fold:
        fold = Fold()
        fold.placed = baechi_ext.parallelize(lambda x: fold.step(x), framework="tensorflow", **HERE)
        return fold

    folds = []
    for make in (Fold, bound, around):
        fold = make()
        assert [float(fold.placed(tf.ones((4, 4)))) for _ in range(3)] == [16, 32, 48]
        assert fold.placed.report().placed_steps == 3
        folds.append(weakref.ref(fold))
        del fold
        gc.collect()
    assert [fold() for fold in folds] == [None] * 3
    assert float(Fold().placed(tf.ones((4, 4)))) == 16
    with pytest.raises(OptionError, match="is placed already"):
        baechi_ext.parallelize(Fold().placed, framework="tensorflow")


def test_a_step_that_differs_each_time_is_a_parity_error() -> None:
    weight = tf.Variable(tf.ones((4, 4)), name="weight")
    draw = np.random.default_rng(0)

    def step(x: tf.Tensor) -> tf.Tensor:
        weight.assign_add(x * draw.random())
        return tf.reduce_sum(weight)

    placed = baechi_ext.parallelize(step, framework="tensorflow", **HERE)
    said = r"differs from the unplaced one \(allowed 1e-05\): result 0 .*weight .*go on unplaced with fallback"
    with pytest.raises(ParityError, match=said):
        placed(np.ones((4, 4), np.float32))
    assert (weight.numpy() < 2).all()


def test_with_fallback_it_goes_on_unplaced(capsys: pytest.CaptureFixture[str]) -> None:
    weight = tf.Variable(tf.ones((4, 4)))

    def step(x: tf.Tensor) -> tf.Tensor:
        weight.assign_add(x)
        return float(tf.reduce_sum(weight).numpy())

    placed = baechi_ext.parallelize(step, framework="tensorflow", fallback=True, **HERE)
    assert [placed(np.ones((4, 4), np.float32)) for _ in range(3)] == [32.0, 48.0, 64.0]
    assert "step goes on unplaced: the training step step cannot be captured" in capsys.readouterr().err
    with pytest.raises(CaptureError, match="cannot be captured as one graph"):
        baechi_ext.parallelize(step, framework="tensorflow", **HERE)(np.ones((4, 4), np.float32))


@pytest.mark.parametrize("method", [False, True])
def test_with_fallback_a_call_inside_a_function_is_its_own(method: bool, capsys: pytest.CaptureFixture[str]) -> None:
    weight = tf.Variable(tf.zeros((4, 4)))

    def step(x: tf.Tensor) -> tf.Tensor:
        if tf.reduce_sum(x) > 0:
            weight.assign_add(x)
        return tf.reduce_sum(weight)

    class Task:
        @baechi_ext.parallelize(framework="tensorflow", fallback=True, **HERE)
        def train(self, x: tf.Tensor) -> tf.Tensor:
            return step(x)

    task, x = Task(), tf.ones((4, 4))
    placed = task.train if method else baechi_ext.parallelize(step, framework="tensorflow", fallback=True, **HERE)
    assert [float(placed(x)) for _ in range(3)] == [16, 32, 48]
    twice = tf.function(lambda x: placed(x) + placed(x))
    assert [float(twice(x)), float(placed(x)), float(twice(x)), float(weight[0, 0])] == [64 + 80, 96, 112 + 128, 8]
    assert capsys.readouterr().err.count("is called inside a tf.function") == 1
    assert (len(placed.steps), placed.report().placed_steps) == (1, 3)


def test_auto_leaves_a_step_as_it_is_where_splitting_does_not_pay() -> None:
    weight = tf.Variable(tf.ones((4, 4)))

    def step(x: tf.Tensor) -> tf.Tensor:
        weight.assign(tf.tanh(weight @ x))
        return tf.reduce_sum(weight)

    far_apart = Cluster.uniform(2, link=Link(latency_us=10_000))
    placed = baechi_ext.parallelize(step, framework="tensorflow", workers="thread", method="auto", time_limit=0.5, cluster=far_apart)
    for _ in range(3):
        placed(np.ones((4, 4), np.float32))
    assert "step: not placed; splitting does not pay: auto found nothing faster than one device; predicted" in placed.report().line()
    assert placed.report().unplaced_steps == 3


def test_random_numbers_that_cannot_be_compared_are_not() -> None:
    weight = tf.Variable(tf.zeros((4, 4)))

    def step(x: tf.Tensor) -> tf.Tensor:
        weight.assign_add(tf.random.uniform((4, 4)) * x)
        return tf.reduce_sum(weight)

    tf.random.set_seed(1)
    with pytest.raises(CaptureError, match=r"the next numbers of a seeded sequence \(RandomUniform\)"):
        baechi_ext.parallelize(step, framework="tensorflow", **HERE)(np.ones((4, 4), np.float32))
    tf.random.set_seed(None)
    placed = baechi_ext.parallelize(step, framework="tensorflow", **HERE)
    found = [float(placed(np.ones((4, 4), np.float32))) for _ in range(3)]
    assert found == sorted(found)
    assert found[0] > 0
    assert placed.report().verified.steps == 0


def test_a_step_is_planned_looked_at_and_run_by_that_plan(tmp_path: Path) -> None:
    """With another plan of it than the first, and an optimizer that names its ops anew in each trace; until then nothing is trained."""
    ordinary, ours = Trained(), Trained()
    before = ours.model.get_weights()
    run = baechi_ext.plan(ours.step, {"x": ours.x, "y": ours.y}, devices=Cluster.uniform(2), method="m_etf", workers="thread")
    for a, b in zip(before, ours.model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert repr(run).startswith("<Run of step: m_etf, ")
    assert "AssignSubVariableOp" in {op.op for op in run.graph.ops}
    compared = run.compare("m_topo", "single")
    assert compared["single"].step_us == pytest.approx(sum(op.compute_us for op in run.graph.ops))
    run.save(tmp_path)
    assert Plan.load(tmp_path / "plan.json", OpGraph.load(tmp_path / "graph.json")).placement == run.plan.placement
    placed = compared["m_topo"].apply(verify_steps=1, keep_placed=True)
    arguments = [{"x": trained.x, "y": trained.y} for trained in (ours, ordinary)]
    found = [float(placed(**arguments[0])["loss"]) for _ in range(4)]
    np.testing.assert_allclose(found, [float(ordinary.step(**arguments[1])["loss"]) for _ in range(4)], rtol=1e-4)
    report = placed.report()
    assert (report.placed_steps, report.unplaced_steps, report.verified.steps) == (4, 0, 1)
    assert placed.plan.placement == compared["m_topo"].plan.placement


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: baechi_ext.plan(tf.function(Trained().step)), "the inputs of a step are a tuple of arguments, or a dict of keyword"),
        (lambda: baechi_ext.plan(Trained().step, (1,), devices="h100"), "a TensorFlow step has no counts to cost it by"),
        (lambda: baechi_ext.plan(Trained().step, (1,), devices=["gpu:0"]), "for so many servers of this machine, or for a Cluster"),
        (lambda: baechi_ext.plan(Trained().step, (1,), cache=False), "unknown option 'cache' of plan.. for a TensorFlow step; it takes"),
    ],
)
def test_a_step_that_cannot_be_planned(ask: Callable[[], object], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        ask()


def test_what_is_refused() -> None:
    step = baechi_ext.parallelize(tf.function(Trained().step), **HERE)
    with pytest.raises(CaptureError, match="the placed step step is called inside a tf.function.*put parallelize above tf.function"):
        tf.function(lambda x: step(x, x))(np.ones((4, 4), np.float32))
    with pytest.raises(CaptureError, match="an argument of the training step is a RaggedTensor.*to_tensor"):
        step(tf.ragged.constant([[1.0], [1.0, 2.0]]), np.ones(2))
    with pytest.raises(OptionError, match="is placed already; call its unplace"):
        baechi_ext.parallelize(step, framework="tensorflow")
    with pytest.raises(OptionError, match="unknown option 'device' of parallelize for TensorFlow; it takes devices, method"):
        baechi_ext.parallelize(Trained().step, framework="tensorflow", device=2)
    with pytest.raises(OptionError, match="cluster='c.json' is not a baechi_ext.Cluster"):
        baechi_ext.parallelize(Trained().step, framework="tensorflow", cluster="c.json")
    with pytest.raises(OptionError, match="verify_steps"):
        baechi_ext.parallelize(Trained().step, framework="tensorflow", verify_steps="2")
    with pytest.raises(OptionError, match="devices=0 is not a number of devices"):
        baechi_ext.parallelize(Trained().step, framework="tensorflow", devices=0)
    with pytest.raises(OptionError, match="unknown framework 'jax'; choose torch or tensorflow"):
        baechi_ext.parallelize(Trained().step, framework="jax")
    with pytest.raises(OptionError, match="example_inputs are for PyTorch"):
        baechi_ext.parallelize(Trained().step, (1,), framework="tensorflow")


def test_a_data_set_that_was_there_before_the_first_step_is_known() -> None:
    """In a process of its own, since a step that was placed before would have data sets watched."""
    script = """
import numpy as np, tensorflow as tf, baechi_ext
weight = tf.Variable(tf.ones((4, 4)), name="weight")
batches = iter(tf.data.Dataset.from_tensors(np.ones((4, 4), np.float32)).repeat().map(lambda x: x + weight))
@baechi_ext.parallelize(workers="thread", method="m_topo")
@tf.function
def step(x):
    weight.assign_add(x)
    return tf.reduce_sum(weight)
step(next(batches))
"""
    done = python("-c", script, framework="tensorflow")
    assert "CaptureError: step uses the variable 'weight', which a function of a data set reads, too" in done.stderr.splitlines()[-1]


def test_a_fit_with_a_seed_is_traced_once() -> None:
    """The trace of the first batch, which is placed, tells whether the step goes on with a seeded sequence."""
    traced = []

    class Model(keras.Model):
        def train_step(self, data: object) -> object:
            traced.append(data)
            return super().train_step(data)

    keras.utils.set_random_seed(0)
    inputs = keras.Input((10,))
    model = Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    baechi_ext.parallelize(model, **HERE)
    model.fit(np.ones((8, 10)), np.ones((8, 1)), batch_size=4, epochs=2, verbose=0)
    assert len(traced) == 1
    assert baechi_ext.report(model).placed_steps == 4


def test_a_model_that_is_compiled_to_run_eagerly_is_placed_no_more() -> None:
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    baechi_ext.parallelize(model, devices=2, **HERE)
    x, y = np.ones((8, 16), np.float32), np.ones((8, 1), np.float32)
    model.fit(x, y, batch_size=4, epochs=2, verbose=0)
    assert baechi_ext.report(model).placed_steps > 0
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(x, y, batch_size=4, verbose=0)
    with pytest.raises(OptionError, match="fit it first"):
        baechi_ext.report(model)


def test_the_framework_is_found_out() -> None:
    import torch

    def makes_module() -> torch.nn.Module:
        return torch.nn.Linear(1, 1)

    net = torch.nn.Linear
    assert framework_of(tf.function(lambda x: x)) == "tensorflow"
    assert framework_of(Trained().step) == "tensorflow"
    assert framework_of(Trained().model) == "tensorflow"
    assert [framework_of(x) for x in (makes_module, net, net(1, 1), type("Net", (torch.nn.Module,), {}))] == ["torch"] * 4
    assert framework_of(lambda x: x) == ("torch" if "torch" in sys.modules else "tensorflow")
