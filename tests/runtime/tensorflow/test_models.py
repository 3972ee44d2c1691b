"""The built-in models for TensorFlow: their size, what a step does to them, and where experts put their layers."""

import math
from collections import Counter
from dataclasses import replace
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from baechi_ext.errors import OptionError
from baechi_runtime.models.options.gnmt_v2 import Options
from baechi_runtime.models.registry import TENSORFLOW_MODELS, ModelOptions
from baechi_runtime.models.tensorflow.gnmt_v2 import AdditiveAttention, GnmtV2
from baechi_runtime.tensorflow.step import OPTIMIZERS, TensorFlowStep, build_step, make_optimizer
from tests.tensorflow_steps import narrow_layers

SMALL = {
    "inception_v3": ModelOptions(batch_size=2, image_size=75),
    "wide_towers": ModelOptions(batch_size=8, image_size=4, d_model=32, num_layers=2),
    "nasnet": ModelOptions(batch_size=2, image_size=32, nasnet_cells=1, nasnet_filters=4),
    "gnmt_v2": ModelOptions(batch_size=4, vocab_size=20, max_seq_length=5, rnn_units=8, num_layers=2, rnn_chunk=2, residual=True),
}
TINY = {"batch_size": 2, "vocab_size": 11, "max_seq_length": 6, "rnn_units": 4}


def optimizer_of(step: TensorFlowStep) -> keras.optimizers.Optimizer:
    return step.function.args[2]


def variables_of(step: TensorFlowStep) -> list[tf.Variable]:
    """The model's, trainable or not, and the optimizer's, each once."""
    loss_of = step.function.args[0]
    network = loss_of.args[0] if isinstance(loss_of, partial) else loss_of
    plain = [v.value if isinstance(v, keras.Variable) else v for v in (*network.variables, *optimizer_of(step).variables)]
    return list({id(v): v for v in plain}.values())


def parameters(step: TensorFlowStep) -> int:
    """Number of the model's parameters, trained or not."""
    own = {id(v.value) for v in optimizer_of(step).variables}
    return sum(math.prod(v.shape) for v in variables_of(step) if id(v) not in own)


def losses(step: TensorFlowStep, count: int) -> list[float]:
    """Op by op: no graph is made."""
    return [float(step.function(*map(tf.constant, step.inputs))) for _ in range(count)]


@pytest.mark.parametrize("name", TENSORFLOW_MODELS)
def test_a_step_trains_and_makes_no_variable(name: str) -> None:
    with narrow_layers():
        step = build_step(name, SMALL[name], "sgd", 0.05)
    before = [v.numpy() for v in variables_of(step)]
    curve = losses(step, 3)
    assert np.isfinite(curve).all()
    assert min(curve[1:]) < curve[0]
    changed = [v.name for v, old in zip(variables_of(step), before, strict=True) if not np.array_equal(v.numpy(), old)]
    assert len(changed) >= len(optimizer_of(step)._trainable_variables)
    for variable, value in zip(variables_of(step), before, strict=True):
        variable.assign(value)
    assert losses(step, 1) == curve[:1]


@pytest.mark.parametrize("name", ["wide_towers", "gnmt_v2"])
def test_the_seed_decides(name: str) -> None:
    curves = [losses(build_step(name, replace(SMALL[name], seed=seed)), 2) for seed in (3, 3, 4)]
    assert curves[0] == curves[1] != curves[2]


def test_ops_are_called_the_same_however_many_steps_were_built_before() -> None:
    """So that costs, plans and checkpoints fit."""
    steps = [build_step("wide_towers", SMALL["wide_towers"], "adam") for _ in range(2)]
    graphs = [tf.function(step.function).get_concrete_function(*step.signature()).graph for step in steps]
    names = [[op.name for op in graph.get_operations()] for graph in graphs]
    assert names[0] == names[1]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_is_built_before_the_step(optimizer: str) -> None:
    """So the graph of the step is that of all steps; embeddings' gradients are sparse."""
    step = build_step("gnmt_v2", ModelOptions(**TINY, num_layers=1, encoder_type="uni", rnn_chunk=6), optimizer, 0.01)
    traced = tf.function(step.function).get_concrete_function(*step.signature())
    captured = {id(handle) for handle, _ in traced.graph.captures if handle.dtype == tf.resource}
    assert captured <= {id(v.handle) for v in variables_of(step)}
    slots = {"sgd": 0, "momentum": 1, "rmsprop": 1, "adagrad": 1, "adadelta": 2, "adam": 2, "adamw": 2}
    trained = len(optimizer_of(step)._trainable_variables)
    assert len(optimizer_of(step).variables) == 2 + slots[optimizer] * trained
    first, second = float(traced(*map(tf.constant, step.inputs))), float(traced(*map(tf.constant, step.inputs)))
    assert first != second


def test_sizes() -> None:
    assert parameters(build_step("inception_v3", ModelOptions(image_size=75, batch_size=1))) == 23_851_784
    towers = build_step("wide_towers", ModelOptions(batch_size=2))
    tower = (16 * 16 * 3 + 1) * 1024 + 4 * (1024 + 1) * 1024
    assert parameters(towers) == 4 * tower + (4 * 1024 + 1) * 10
    assert [(i.shape, i.dtype.name) for i in towers.inputs] == [((2, 16, 16, 3), "float32"), ((2,), "int32")]


def test_the_mobile_nasnet_is_the_one_of_keras() -> None:
    assert parameters(build_step("nasnet", ModelOptions(batch_size=1))) == 5_326_716


@pytest.mark.parametrize(
    ("encoder_type", "encoder_inputs", "width"),
    [("gnmt", [1, 1, 2, 1, 1], 1), ("bi", [1, 1, 1, 1], 2), ("uni", [1, 1, 1, 1], 1)],
)
@pytest.mark.parametrize(("unit_type", "gates", "biases"), [("lstm", 4, 1), ("gru", 3, 2)])
def test_parameters_of_gnmt(encoder_type: str, encoder_inputs: list[int], width: int, unit_type: str, gates: int, biases: int) -> None:
    """As many as for PyTorch. `encoder_inputs` are widths of the encoder layers' inputs, `width` is the memory's, in multiples of units."""
    units, vocab = 8, 50

    def layer(inputs: int) -> int:
        return (inputs + units + biases) * gates * units

    model = GnmtV2(Options(vocab_size=vocab, rnn_units=units, num_layers=4, encoder_type=encoder_type, rnn_unit_type=unit_type))
    layers = sum(layer(n * units) for n in encoder_inputs) + layer(units) + 3 * layer((1 + width) * units)
    attention = units * units + width * units * units + units
    assert sum(math.prod(v.shape) for v in model.trainable_variables) == 3 * vocab * units + layers + attention


def test_parameters_of_gnmt_with_the_defaults() -> None:
    assert sum(math.prod(v.shape) for v in GnmtV2(Options()).variables) == 67_810_304


@pytest.mark.parametrize("encoder_type", ["gnmt", "bi", "uni"])
@pytest.mark.parametrize("unit_type", ["lstm", "gru"])
def test_chunks_change_neither_loss_nor_gradients(encoder_type: str, unit_type: str) -> None:
    found = []
    for chunk in (4, 1):
        options = ModelOptions(**TINY, num_layers=4, rnn_unit_type=unit_type, encoder_type=encoder_type, residual=True, rnn_chunk=chunk)
        step = build_step("gnmt_v2", options, learning_rate=1.0)
        before = [v.numpy() for v in variables_of(step)]
        loss = losses(step, 1)[0]
        found.append([loss, *(v.numpy() - old for v, old in zip(variables_of(step), before, strict=True))])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    changed = [gradient.any() for gradient in found[0][1:]]
    assert changed.count(False) == 1, "a parameter does not matter"  # but the learning rate
    assert found[0][0] == pytest.approx(math.log(11), rel=0.1)


@pytest.mark.parametrize("unit_type", ["lstm", "gru"])
def test_a_layer_is_the_one_of_keras(unit_type: str) -> None:
    """The same numbers as keras.layers.LSTM and GRU, whose gates stand in another order."""
    import keras

    from baechi_runtime.models.tensorflow.recurrent import Recurrent

    tf.random.set_seed(0)
    x, units = tf.random.normal((5, 3, 4)), 6
    layer = Recurrent(4, units, unit_type, "layer")
    theirs = keras.layers.LSTM(units, return_sequences=True) if unit_type == "lstm" else keras.layers.GRU(units, return_sequences=True)
    theirs.build((3, 5, 4))
    order = [0, 1, 3, 2] if unit_type == "lstm" else [1, 0, 2]

    def reordered(weights: np.ndarray) -> np.ndarray:
        gates = np.split(weights, len(order), axis=-1)
        return np.concatenate([gates[i] for i in order], axis=-1)

    bias = reordered(layer.bias.numpy() + np.linspace(0, 1, layer.bias.shape[1], dtype=np.float32))
    layer.bias.assign_add(np.tile(np.linspace(0, 1, layer.bias.shape[1], dtype=np.float32), (layer.bias.shape[0], 1)))
    kernels = [reordered(layer.inputs.kernel.numpy()), reordered(layer.recurrent_kernel.numpy())]
    theirs.set_weights([*kernels, bias[0] if unit_type == "lstm" else bias])
    outputs, state = layer(tf.split(x, [2, 2, 1]))
    np.testing.assert_allclose(tf.concat(outputs, 0), tf.transpose(theirs(tf.transpose(x, (1, 0, 2))), (1, 0, 2)), atol=1e-6)
    np.testing.assert_array_equal(state[0], outputs[-1][-1])


def test_a_reversed_layer_reads_from_the_end() -> None:
    from baechi_runtime.models.tensorflow.recurrent import Recurrent

    tf.random.set_seed(0)
    x = tf.random.normal((5, 3, 4))
    backward, forward = Recurrent(4, 6, "lstm", "a", reverse=True), Recurrent(4, 6, "lstm", "b")
    for ours, other in zip(forward.variables, backward.variables, strict=True):
        ours.assign(other)
    expected = tf.concat(forward(tf.split(x[::-1], [1, 2, 2]))[0], 0)[::-1]
    np.testing.assert_allclose(tf.concat(backward(tf.split(x, [2, 2, 1]))[0], 0), expected, atol=1e-6)


def test_attention_is_the_mean_of_the_memory_by_a_softmax_of_scores() -> None:
    """Word for word, with loops, after Bahdanau et al."""
    tf.random.set_seed(0)
    attention = AdditiveAttention(4, 5)
    queries, memory = tf.random.normal((3, 2, 4)), tf.random.normal((6, 2, 5))
    found = attention(queries, attention.keys(memory), memory)
    w, u, v = (x.numpy() for x in (attention.query.kernel, attention.memory.kernel, attention.v))
    for t in range(3):
        for b in range(2):
            scores = np.stack([np.tanh(queries.numpy()[t, b] @ w + memory.numpy()[s, b] @ u) @ v for s in range(6)]).ravel()
            weights = np.exp(scores) / np.exp(scores).sum()
            np.testing.assert_allclose(found[t, b], weights @ memory.numpy()[:, b], rtol=1e-5)


def devices_of(options: ModelOptions) -> dict[str, int | None]:
    """Where an expert puts each variable of a gnmt_v2 that is trained, by the first two parts of its name."""
    step = build_step("gnmt_v2", options)
    return {"/".join(v.name.split("/")[:2]): step.expert(v.name) for v in optimizer_of(step)._trainable_variables}


def test_experts_put_layer_i_on_device_i() -> None:
    found = devices_of(ModelOptions(**TINY, num_layers=3))
    assert found == {
        "encoder/embedding": 0,
        "encoder/forward_layers_0": 0,
        "encoder/backward_layers_0": 0,
        "encoder/layers_0": 1,
        "encoder/layers_1": 2,
        "decoder/embedding": 0,
        "decoder/layers_0": 0,
        "decoder/layers_1": 1,
        "decoder/layers_2": 2,
        "decoder/attention": 0,
        "projection/kernel:0": 2,
    }


def test_experts_give_the_projection_a_device_of_its_own_where_there_is_one() -> None:
    assert devices_of(ModelOptions(**TINY, num_layers=2, num_devices=3))["projection/kernel:0"] == 2
    both = devices_of(ModelOptions(**TINY, num_layers=4, encoder_type="bi", num_devices=4))
    assert both["projection/kernel:0"] == 3
    assert {both[f"encoder/{d}ward_layers_1"] for d in ("for", "back")} == {1}


def test_ops_carry_the_names_that_experts_go_by() -> None:
    """Forward and backward alike; what belongs to the optimizer goes with its variables."""
    step = build_step("gnmt_v2", ModelOptions(**{**TINY, "max_seq_length": 2}, num_layers=3))
    graph = tf.function(step.function).get_concrete_function(*step.signature()).graph
    products = [op.name for op in graph.get_operations() if op.type in {"MatMul", "BatchMatMulV2"}]
    assert Counter(step.expert(name) is None for name in products) == {False: len(products)}
    assert {step.expert(name) for name in products if "gradient_tape" in name} == {0, 1, 2}


def test_wrong_models_and_sizes_say_what_is_right() -> None:
    with pytest.raises(OptionError, match="unknown model 'gpt2'; choose one of inception_v3, wide_towers, gnmt_v2, nasnet"):
        build_step("gpt2", ModelOptions())
    with pytest.raises(OptionError, match="--rnn_units is not an option of nasnet; it is one of gnmt_v2"):
        build_step("nasnet", ModelOptions(rnn_units=3))
    with pytest.raises(OptionError, match="--dropout is not an option of nasnet; drop it"):
        build_step("nasnet", ModelOptions(dropout=0.1))
    for name, size, least in (("inception_v3", 74, 75), ("nasnet", 31, 32), ("wide_towers", 0, 1)):
        with pytest.raises(OptionError, match=f"--image_size={size} is too small for {name}; it takes {least} pixel"):
            build_step(name, ModelOptions(image_size=size))
    with pytest.raises(OptionError, match="--nasnet_filters=6 does not suit nasnet; it takes a multiple of 4"):
        build_step("nasnet", ModelOptions(nasnet_filters=6))
    with pytest.raises(OptionError, match="--num_layers=3 does not suit --encoder_type=bi; it takes an even number of layers"):
        build_step("gnmt_v2", ModelOptions(num_layers=3, encoder_type="bi"))
    with pytest.raises(OptionError, match="--rnn_unit_type=rnn is unknown; choose one of lstm, gru"):
        build_step("gnmt_v2", ModelOptions(rnn_unit_type="rnn"))
    with pytest.raises(OptionError, match="unknown optimizer 'lion'; choose one of sgd, momentum"):
        make_optimizer("lion", 0.1)
