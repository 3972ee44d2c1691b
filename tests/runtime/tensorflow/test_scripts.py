"""Scripts as people write them, run as they are and by `baechi train --framework=tensorflow`: they print the same."""

import contextlib
import io
import runpy
import signal
import sys
import warnings
from functools import cache
from pathlib import Path

import keras
import numpy as np
import pytest

import baechi_ext
from baechi_ext.errors import OptionError
from baechi_runtime.cli.main import main
from baechi_runtime.files.run_folder import RunFolder
from baechi_runtime.report.page.data import page_data
from baechi_runtime.tensorflow.calls.placed_function import Arguments
from baechi_runtime.tensorflow.servers.step_recorder import RUNS
from tests.runtime import forked
from tests.runtime.forked import start
from tests.runtime.workers import finish, only_error, wait_for_line

SCRIPTS = Path(__file__).parent / "scripts"
PLACED = ["train", "--framework=tensorflow", "--workers=thread", "--placement_method=m_topo", "--keep_placed"]


@pytest.fixture(autouse=True)
def _as_outside_of_pytest():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@cache
def printed(script: str, *arguments: str) -> str:
    """By the script itself, unplaced."""
    keras.backend.clear_session()
    out, before = io.StringIO(), sys.argv
    sys.argv = [script, *arguments]
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    finally:
        sys.argv = before
    return out.getvalue()


@pytest.mark.parametrize(
    ("script", "arguments", "steps", "left_out"),
    [
        ("digits.py", ("--epochs", "2"), "9 steps placed, verified 2 of 9, last at call 2", "2 steps of other shapes ran unplaced"),
        ("custom_loop.py", (), "14 steps placed, verified 2 of 14, last at call 2", "3 steps of other shapes ran unplaced"),
        ("reviews.py", (), "9 steps placed, verified 2 of 9, last at call 2", ""),
        ("two_inputs.py", (), "6 steps placed, verified 2 of 6, last at call 2", "1 steps of other shapes ran unplaced"),
    ],
)
def test_a_script_prints_the_same(
    script: str, arguments: tuple[str, ...], steps: str, left_out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = printed(script, *arguments)
    keras.backend.clear_session()
    code = main([*PLACED, str(SCRIPTS / script), "--", *arguments])
    found = capsys.readouterr()
    assert (code, found.out) == (0, expected)
    line = next(line for line in found.err.splitlines() if line.startswith("baechi: "))
    assert steps in line, line
    assert left_out in line
    assert ("of other shapes" in line) == bool(left_out), line


@pytest.mark.parametrize("script", ["digits.py", "custom_loop.py"])
def test_a_script_prints_the_same_with_plain_steps_between_placed_ones(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = printed(script)
    keras.backend.clear_session()
    code = main([*(flag for flag in PLACED if flag != "--keep_placed"), str(SCRIPTS / script)])
    found = capsys.readouterr()
    assert (code, found.out) == (0, expected)
    line = next(line for line in found.err.splitlines() if line.startswith("baechi: ") and "verified" in line)
    assert "as it is" in line, line


def test_in_a_process_of_its_own_with_a_server_per_device(tmp_path: Path) -> None:
    flags = [*(flag for flag in PLACED if flag != "--workers=thread"), "--comm_cost_coeffs=0.001,50", f"--out={tmp_path / 'out'}"]
    done = forked.run(*flags, str(SCRIPTS / "custom_loop.py"))
    assert (done.returncode, done.stdout) == (0, printed("custom_loop.py")), done.stderr
    found = RunFolder.load(tmp_path / "out")
    report, measured = found.report, found.measured
    assert report["steps"][0]["placed_steps"] == 14
    assert min(report["steps"][0]["num_ops"]) > 0
    files = {"config.toml", "graph.json", "profile.json", "plan.json", "report.json", "measured.json"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == files
    assert (report["model"], report["executor"], measured.executor) == ("train_step of custom_loop.py", "servers", "servers")
    assert {op.id for op in measured.ops} == set(found.graph.index)
    assert len(measured.transfers) > len(found.timeline.transfers) / 4
    assert 3 <= len(report["measured_step_us"]["placed"]["samples"]) < 14 - 2 - RUNS  # those that another one of the same shape follows
    assert report["load_of_others"] >= 0


def test_the_folder_of_a_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps that are traced compute what they compute untraced."""
    expected = printed("reviews.py")
    keras.backend.clear_session()
    assert main([*PLACED, "--verify_steps=1", f"--out={tmp_path}", str(SCRIPTS / "reviews.py")]) == 0
    assert capsys.readouterr().out == expected
    found = RunFolder.load(tmp_path)
    report, measured = found.report, found.measured
    unseen = {op.op for op in found.graph.ops if op.id not in {seen.id for seen in measured.ops}}
    assert unseen <= {"While", "StatelessWhile", "If", "StatelessIf", "VariableShape"}  # servers may make a constant of the last
    assert any("a loop or condition runs as its parts" in note for note in measured.notes) == bool(unseen)
    assert report["model"].endswith(".train_step of reviews.py")
    assert (report["parity"]["passed"], report["parity"]["steps"], report["unplaced"]) == (True, 1, "tf.function as it is")
    assert report["measured_step_us"]["eager"] is None  # --keep_placed
    assert 1 <= len(report["measured_step_us"]["placed"]["samples"]) < 9 - 1 - RUNS
    assert report["peak_memory_bytes"]["measured"] == [max(held.bytes for held in device) for device in measured.memory]
    assert [step["folder"] for step in report["steps"]] == ["."]
    assert "measured step" in {figure["label"] for figure in page_data(found)["headline"]["figures"]}


def test_a_step_that_stays_whole_is_kept_with_the_costs_of_one_device(tmp_path: Path) -> None:
    """They were measured twice, alone and beside a busy server, and never come out the same."""
    flags = ["--framework=tensorflow", "--placement_method=single", "--comm_cost_coeffs=0.001,50", f"--out={tmp_path / 'out'}"]
    keras.backend.clear_session()
    assert main(["train", *flags, str(SCRIPTS / "two_inputs.py")]) == 0
    found = RunFolder.load(tmp_path / "out")
    assert found.profile.contention is not None
    assert found.plan.predicted_step_us == pytest.approx(found.timeline.makespan_us, rel=1e-6)
    assert set(found.plan.placement) == {0}


@pytest.mark.parametrize("script", [pytest.param("custom_loop.py", marks=pytest.mark.slow), "reviews.py"])
def test_ctrl_c_in_a_search_keeps_its_best_plan(tmp_path: Path, script: str) -> None:
    search = ["--placement_method=refine", "--num_devices=3", "--time_limit=3600", "--comm_cost_coeffs=0.001,50", "--workers=thread"]
    process = start("train", "--framework=tensorflow", *search, f"--out={tmp_path}", str(SCRIPTS / script))
    wait_for_line(process, "  best ")
    process.send_signal(signal.SIGINT)
    code, _, errors = finish(process)
    assert code == 130
    assert only_error(errors) == f"error: interrupted; the best plan found until then is {tmp_path / 'plan.json'}"
    found = RunFolder.load(tmp_path)
    assert (found.plan.method, found.plan.status, found.measured) == ("refine", "feasible", None)
    assert found.timeline.makespan_us == pytest.approx(found.plan.predicted_step_us)
    assert found.profile is not None
    assert ["not placed; the search for its plan was interrupted; predicted" in said for said in found.report["summary"]] == [True]
    assert main(["report", str(tmp_path)]) == 0


def run(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    path = tmp_path / "script.py"
    path.write_text(text)
    code = main([*PLACED, *flags, str(path)])
    return code, *capsys.readouterr()


MADE_ANEW = """
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x)))
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
    return loss
for i in range(3):
    tf.function(step)(x)
"""


def test_why_nothing_is_placed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(tmp_path, "import tensorflow as tf\nprint(int(tf.function(lambda x: x + 1)(tf.constant(1))))\n", capsys)
    assert (code, out) == (0, "2\n")
    assert "baechi: nothing was placed: no Keras model was fitted, and no tf.function that trains variables was called twice\n" in err
    code, out, err = run(tmp_path, MODEL + MADE_ANEW, capsys)
    assert code == 0
    assert [line for line in err.splitlines() if line.startswith("baechi: ")] == [
        "baechi: nothing was placed: no Keras model was fitted, and no tf.function that trains variables was called twice"
    ]
    tiny = "import keras, numpy as np\nm = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])\nm.compile('sgd', 'mse')\n"
    code, out, err = run(tmp_path, tiny + "m.fit(np.ones((4, 2)), np.ones((4, 1)), epochs=2, verbose=0)\n", capsys)
    assert code == 0
    assert "baechi: nothing was placed: the largest model that trained has 3 parameters, fewer than 1000\n" in err
    eager = MODEL + "model.compile('sgd', 'mse', run_eagerly=True)\nmodel.fit(x, x[:, :1], verbose=0)\n"
    assert "baechi: nothing was placed: the model sequential" in (err := run(tmp_path, eager, capsys)[2])
    assert " runs eagerly\n" in err


def test_keras_on_another_framework_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras is loaded before the script, which would be trained on TensorFlow for all that it says."""
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    asks = "import os\nos.environ['KERAS_BACKEND'] = 'torch'\n"
    code, out, err = run(tmp_path, asks + MODEL + "model.compile('sgd', 'mse')\nmodel.fit(x, x[:, :1])\nprint('trained')\n", capsys)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith("error: Keras runs on tensorflow here, and KERAS_BACKEND was set to torch meanwhile")


MODEL = """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(40, "relu"), keras.layers.Dense(1)])
weights = model.trainable_variables
optimizer = keras.optimizers.SGD(0.01)
optimizer.build(weights)
x = tf.constant(np.random.standard_normal((8, 40)), tf.float32)
"""
ACCUMULATING = """
sums, count = [tf.Variable(tf.zeros_like(v), trainable=False) for v in weights], tf.Variable(0, trainable=False)
@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x)))
    for total, gradient in zip(sums, tape.gradient(loss, weights)):
        total.assign_add(gradient)
    if count.assign_add(1) % 2 == 0:
        optimizer.apply_gradients(zip(sums, weights))
        for total in sums:
            total.assign(tf.zeros_like(total))
    return loss
for i in range(6):
    print(round(float(step(x)), 5), int(optimizer.iterations.numpy()))
"""
RECORDED = """
average = tf.Variable(tf.zeros([40, 40]))
@tf.function
def forward(x):
    average.assign(0.9 * average + 0.1 * tf.matmul(x, x, transpose_a=True))
    return tf.reduce_mean(tf.square(model(x)))
for i in range(4):
    with tf.GradientTape() as tape:
        loss = forward(x)
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
    print(round(float(loss), 5), round(float(tf.norm(average)), 3))
"""
TRACED_ONCE = """
scale = {"of": 1.0}
@tf.function(input_signature=[tf.TensorSpec([None, 40])])
def step(x):
    with tf.GradientTape() as tape:
        loss = scale["of"] * tf.reduce_mean(tf.square(model(x)))
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
    return loss
for size in (8, 8, 8, 4, 4, 4, 8):
    print(round(float(step(x[:size])), 5))
    scale["of"] += 0.01
model.compile(keras.optimizers.SGD(0.01), "mse")
for size in (3, 5):
    model.fit(x, x[:, :1], batch_size=size, epochs=2, shuffle=False, verbose=0)
    print([round(float(np.linalg.norm(w)), 5) for w in model.get_weights()])
    model.layers[0].trainable = False  # Keras has traced its step, for all sizes, and does not look again
"""
KEPT = """
counts, seen = {"scale": 1.0, "traced": 0}, 0
@tf.function
def step(x, *, down, up, scale=2.0):
    global seen
    seen += 1
    counts["traced"] += 1
    with tf.GradientTape() as tape:
        loss = counts["scale"] * tf.reduce_mean(tf.square(model(x) + up - scale * down))
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
    return loss
for i in range(5):
    print(round(float(step(x, up=x[:, :1], down=x[:, 1:2])), 5), seen, counts["traced"])
    counts["scale"] += 0.01
"""
COMPILED = KEPT.replace("@tf.function", "@tf.function(jit_compile=True)") + """
@tf.function(jit_compile=True)
def by_name(**batch):
    with tf.GradientTape() as tape:
        loss = sum(tf.reduce_mean(tf.square(model(part))) for part in batch.values())
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
    return loss
for i in range(4):
    print(round(float(by_name(**{"the x": x})), 5))
"""
QUIET = """
mean = keras.metrics.Mean()
@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x)))
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
    mean(loss)
for _ in range(5):
    print(step(x), round(float(mean.result()), 5))
"""
FOLDS = """
import gc, weakref
def fold(fitted):
    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(40, "relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    weights, optimizer = model.trainable_variables, keras.optimizers.SGD(0.01)
    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss
    for i in range(4):
        print(round(model.fit(x, x[:, :1], batch_size=4, verbose=0).history["loss"][0] if fitted else float(step(x)), 5))
    return weakref.ref(model)
models = []
for i in range(4):
    models.append(fold(i % 2))
    gc.collect()
    print([model() is None for model in models])
"""
DRAWING = """
class Noisy(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = model
    def call(self, x):
        return self.inner(x)
    def train_step(self, data):
        data = data[0] if isinstance(data, tuple) else data
        noise = tf.random.normal(tf.shape(data))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(data + noise) - noise[:, :1]))
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}
for steps in (1, 2):
    noisy = Noisy()
    noisy.compile(keras.optimizers.SGD(0.01), steps_per_execution=steps)
    noisy.optimizer.build(weights)  # so that the first step makes no variables
    print([round(loss, 5) for loss in noisy.fit(x, batch_size=3, epochs=3, verbose=0).history["loss"]])
@tf.function
def step(x):
    with tf.GradientTape() as tape:
        scale = tf.cond(x[0, 0] < 100, lambda: tf.random.uniform([]), lambda: 1.0)
        loss = scale * tf.reduce_mean(tf.square(model(x)))
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
    return loss
for i in range(4):
    print(round(float(step(x)), 5))
"""
OF_PARTS = """
import random
table = tf.Variable(tf.reshape(tf.range(2000.0) / 2000, [40, 50]))
@tf.function
def step(rows):
    print("traced", random.random())
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.gather(table, rows)))
    slices = tape.gradient(loss, table)
    table.scatter_sub(slices)
    return {"loss": loss, "slices": slices, "rows": tf.RaggedTensor.from_row_lengths(rows, [1, 2])}
for i in range(4):
    found = step(tf.constant([1, 2, 2]))
    print(round(float(found["loss"]), 7), type(found["slices"]).__name__, round(float(tf.norm(found["slices"].values)), 7))
    print(found["rows"].to_list(), random.random())
"""
FAILING = """
@tf.function
def step(x):
    x = tf.debugging.check_numerics(x, "no number")
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x)))
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
    return loss
for i in range(7):
    try:
        print(round(float(step(x / 0 if i in (3, 5) else x)), 5))
    except tf.errors.InvalidArgumentError:
        print("left out")
"""
GUARDED = FAILING.replace("    x = tf.debugging", "    tf.debugging").replace("(3, 5)", "(6,)")
"""The last step fails: unplaced, too, nothing orders such a check and the assignments."""
BAD_AT_FIRST = FAILING.replace("(3, 5)", "(1, 5)")
OTHER_FUNCTIONS = """
import functools
def train(scale, x):
    with tf.GradientTape() as tape:
        loss = scale * tf.reduce_mean(tf.square(model(x)))
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
    return loss
of_a_partial = tf.function(functools.partial(train, 0.5))
for i in range(4):
    print(round(float(of_a_partial(x)), 5))
batches = tf.data.Dataset.from_tensor_slices(x).batch(3)
@tf.function
def epoch(batches):
    total = 0.0
    for batch in batches:
        total += train(1.0, batch)
    return total
for i in range(3):
    print(round(float(epoch(batches)), 5))
words = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1, 2], [0.5, 1.5]), 0.0)
@tf.function
def by_table(x):
    return train(words.lookup(tf.constant(2)), x)
for i in range(3):
    print(round(float(by_table(x)), 5))
tf.config.run_functions_eagerly(True)
@tf.function
def eager(x):
    return train(1.0, x).numpy()
print([round(float(eager(x)), 5) for i in range(3)])
tf.config.run_functions_eagerly(False)
"""
READ_BY_DATA = """
level = tf.Variable(0.0, trainable=False)
options = tf.data.Options()
options.autotune.enabled = options.experimental_optimization.apply_default_optimizations = False  # nothing is made ahead of time
repeated = tf.data.Dataset.from_tensors(x).repeat().with_options(options)
batches = iter(repeated.map(lambda batch: batch + level))
@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x)))
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
    level.assign_add(0.1)
    return loss
for i in range(5):
    print(round(float(step(next(batches))), 5))
@tf.function
def later(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x)))
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
    return loss
for i in range(8):
    if i == 4:
        made = iter(repeated.map(lambda batch: model(batch)))
    print(round(float(later(x)), 5), round(float(next(made)[0][0]), 5) if i > 3 else "")
"""
TWO_OPTIMIZERS = """
class Two(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.second = model, keras.models.clone_model(model)
    def compile(self, *optimizers):
        super().compile()
        self.optimizers = optimizers
    def train_step(self, data):
        data, losses = data[0] if isinstance(data, tuple) else data, {}
        for name, part, optimizer in zip("ab", (self.first, self.second), self.optimizers):
            with tf.GradientTape() as tape:
                losses[name] = tf.reduce_mean(tf.square(part(data) - 1))
            optimizer.apply(tape.gradient(losses[name], part.trainable_variables), part.trainable_variables)
        return losses
two = Two()
two.compile(keras.optimizers.SGD(0.01), keras.optimizers.Adam(0.01))
history = two.fit(x, batch_size=4, epochs=3, verbose=0).history
print([round(loss, 5) for name in "ab" for loss in history[name]])
"""


ANNEALED = """
class Annealed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense, self.share = keras.layers.Dense(64), 0.0
    def call(self, x):
        return self.dense(x)
    def train_step(self, x):
        print("traced with", self.share)
        with tf.GradientTape() as tape:
            y = self(x, training=True)
            loss = tf.reduce_mean(tf.square(y - 1)) + self.share * tf.reduce_mean(tf.square(y))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}
class Anneal(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        print(round(float(logs["loss"]), 4))
        self.model.share = 0.1 * (batch + 1)  # Keras has traced its step, and does not look again
annealed = Annealed()
annealed.compile(keras.optimizers.Adam(0.01))
annealed.fit(np.float32(np.random.default_rng(0).random((12, 64))), batch_size=4, epochs=2, verbose=0, callbacks=[Anneal()])
"""
"""A model without its variables until the first batch, whose step is traced in it."""
EAGER_FITS = """
class Counted(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner, self.count = keras.models.clone_model(model), 0
    def call(self, x):
        return self.inner(x)
    def train_step(self, data):
        self.count += 1
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(data) - 1)) / self.count
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}
counted = Counted()
counted.compile("sgd")
for eagerly in (True, False, True):
    tf.config.run_functions_eagerly(eagerly)
    losses = counted.fit(x, batch_size=4, epochs=3, verbose=0).history["loss"]
    print([round(loss, 5) for loss in losses], counted.count)
tf.config.run_functions_eagerly(False)
"""


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (DRAWING, "step: not placed; step draws the next numbers of a seeded sequence (RandomUniform)"),
        (OF_PARTS, "3 steps placed, verified 2 of 3"),
        (FAILING, "verified 2 of 6, last at call 2"),
        (GUARDED, "verified 2 of 6, last at call 2"),
        (BAD_AT_FIRST, "verified 2 of "),
        (OTHER_FUNCTIONS, "by_table: not placed; the training step by_table uses a resource that is not a variable"),
        (READ_BY_DATA, "later: placed for 3 steps, then as it is; later uses the variable "),
        (TWO_OPTIMIZERS, "5 steps placed, verified 2 of 5"),
        (ACCUMULATING, "5 steps placed, verified 2 of 5"),
        (RECORDED, "forward: not placed; 3 calls ran as they are: a GradientTape around the call needs to see what it computes"),
        (TRACED_ONCE, "5 steps placed, verified 4 of 5"),
        (KEPT, "4 steps placed, verified 2 of 4"),
        (QUIET, "4 steps placed, verified 2 of 4"),
        (FOLDS, "7 steps placed, verified 2 of 7"),
        (COMPILED, "3 steps placed, verified 2 of 3"),
        (ANNEALED, "5 steps placed, verified 2 of 5"),
        (EAGER_FITS, "6 steps placed, verified 2 of 6"),
    ],
)
def test_a_step_of_a_kind_of_its_own_prints_the_same(tmp_path: Path, script: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Seeded draws, results of several tensors, errors that the script takes, of checks whose results are unused and in the first call to
    be placed, too; functions of partials, of data sets and run eagerly; optimizers that the
    first step builds; variables that data sets read, or only a branch trains; gradients taken outside of the function;
    a trace for tensors of all shapes that Python state has changed behind, and one for those of the call, compiled, too; arguments by
    names that a trace cannot have; steps that return nothing; models that are gone before the next one is trained; Python state that a fit
    changes after its first batch; fits between which functions are told to run eagerly."""
    (tmp_path / "script.py").write_text(MODEL + script)
    expected = printed(str(tmp_path / "script.py"))
    keras.backend.clear_session()
    code, out, err = run(tmp_path, MODEL + script, capsys)
    assert (code, out) == (0, expected), err
    assert said in err


def test_an_object_is_never_taken_for_one_that_is_gone() -> None:
    """Python gives the place of the one to the other; a step is planned for one model, say, and called with the next."""
    keys = [Arguments.of((type("Model", (), {})(), np.zeros(2)), {}).key for _ in range(20)]
    assert len(set(keys)) == len(keys)


def test_errors_of_the_script_are_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(tmp_path, "import keras\nraise ValueError('mine')\n", capsys)
    assert code == 1
    assert "ValueError: mine" in err
    assert "runpy" not in err
    assert run(tmp_path, "import sys\nsys.exit(3)\n", capsys)[0] == 3


UNPLACEABLE = """
import keras, numpy as np, tensorflow as tf
class Model(keras.Model):
    def train_step(self, data):
        tf.print("at it")
        return super().train_step(data)
inputs = keras.Input((40,))
model = Model(inputs, keras.layers.Dense(40)(inputs))
model.compile("sgd", "mse")
print(len(model.fit(np.ones((8, 40)), np.ones((8, 40)), batch_size=4, verbose=0).history["loss"]))
"""


def test_what_cannot_be_placed_ends_the_script_or_runs_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(tmp_path, UNPLACEABLE, capsys, "--strict")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith("error: op ")
    assert "take tf.print and other text out of the step" in err.splitlines()[-1]
    code, out, err = run(tmp_path, UNPLACEABLE, capsys)
    assert (code, out.splitlines()[-1]) == (0, "1")
    assert "goes on unplaced: op " in err


def test_a_model_is_placed_by_parallelize() -> None:
    """With a callback that reads weights, another fit after the first, and evaluation between."""
    histories = []
    for placed in (False, True):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(40, "relu"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        if placed:
            assert baechi_ext.parallelize(model, workers="thread", method="m_topo") is model
        x = np.random.standard_normal((40, 10)).astype(np.float32)
        norms = []

        def note(*_: object, logs: object = None, model: keras.Model = model, norms: list = norms) -> None:
            norms.append(np.linalg.norm(model.get_weights()[0]))

        watch = keras.callbacks.LambdaCallback(on_train_batch_end=note)
        first = model.fit(x, x[:, :1], batch_size=16, epochs=2, verbose=0, callbacks=[watch], validation_split=0.2)
        evaluated = model.evaluate(x, x[:, :1], verbose=0)
        again = model.fit(x, x[:, :1], batch_size=16, epochs=1, verbose=0)
        histories.append([*first.history.values(), norms, evaluated, *again.history.values()])
    for a, b in zip(*histories, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)


def test_a_model_that_runs_eagerly_is_refused() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(OptionError, match="sequential.* runs eagerly; compile it without run_eagerly"):
        baechi_ext.parallelize(model)


def test_a_model_that_makes_its_own_train_function_is_refused() -> None:
    """It may count steps, or keep an average of the weights, around each."""

    class Counting(keras.Sequential):
        def make_train_function(self, force: bool = False) -> object:
            return super().make_train_function(force)

    model = Counting([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(OptionError, match="Counting makes a train function of its own"):
        baechi_ext.parallelize(model)
