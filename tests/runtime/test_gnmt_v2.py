"""gnmt_v2: what its graph looks like, where experts put its layers, and that chunks change nothing."""

import math
from collections import Counter

import pytest
import torch
from torch import nn

from baechi_ext.capture.torch_joint import CaptureOptions, capture_joint
from baechi_ext.errors import OptionError
from baechi_ext.ir import OpGraph
from baechi_runtime.models.options.gnmt_v2 import Options
from baechi_runtime.models.torch.gnmt_v2 import AdditiveAttention, GnmtV2, build

TINY = {"batch_size": 2, "vocab_size": 11, "max_seq_length": 6, "rnn_units": 4}


def captured(**options: object) -> OpGraph:
    torch.manual_seed(0)
    module, inputs = build(Options(**{**TINY, **options}))
    return capture_joint(module, inputs, CaptureOptions())[0]


def group(graph: OpGraph, parameter: str) -> Counter[str]:
    """Kinds of ops in a parameter's colocation group."""
    return Counter(graph.ops[v].op for v in graph.groups[parameter])


@pytest.mark.parametrize("unit_type", ["lstm", "gru"])
def test_a_layer_is_an_op_per_chunk_and_direction(unit_type: str) -> None:
    graph = captured(num_layers=3, rnn_chunk=2, rnn_unit_type=unit_type)
    layers = [f"encoder.{kind}_layers.0.weight" for kind in ("forward", "backward")]
    layers += [*(f"encoder.layers.{i}.weight" for i in range(2)), *(f"decoder.layers.{i}.weight" for i in range(3))]
    expected = {f"baechi.{unit_type}": 3, f"baechi.{unit_type}_backward": 3, "baechi.rnn_weight_gradient": 1, "optimizer.sgd": 1}
    for layer in layers:
        assert group(graph, layer) == expected
    assert sum(op.op.startswith("baechi.") for op in graph.ops) == len(layers) * (3 + 3 + 1)


def test_the_graph_grows_with_layers_times_chunks() -> None:
    """Each of 9 layers (two are one bidirectional layer) has 2 ops a chunk; attention, softmax and residuals add some a chunk."""
    sizes = {chunks: len(captured(num_layers=4, residual=True, max_seq_length=24, rnn_chunk=24 // chunks)) for chunks in (2, 4, 8)}
    assert sizes[8] - sizes[4] == 2 * (sizes[4] - sizes[2])
    per_chunk = (sizes[4] - sizes[2]) / 2
    assert 9 * 2 < per_chunk < 9 * 8
    assert sizes[8] < 9 * 8 * 8


def test_the_wavefront_stays() -> None:
    """The second layer's first chunk waits for the first layer's first chunk only, and backward for the last."""
    graph = captured(num_layers=2, rnn_chunk=2, encoder_type="uni")
    low, high = (graph.groups[f"encoder.layers.{i}.weight"] for i in range(2))
    forward = [[v for v in g if graph.ops[v].phase == "forward"] for g in (low, high)]
    assert low[0] in graph.predecessors[forward[1][0]]
    assert not set(forward[0][1:]) & set(graph.predecessors[forward[1][0]])
    assert forward[1][0] in graph.predecessors[forward[1][1]]
    backward = [[v for v in g if graph.ops[v].op.endswith("_backward")] for g in (low, high)]
    before = set(graph.predecessors[backward[0][0]])
    assert backward[1][0] in before
    assert not set(backward[1][1:]) & before
    gradient = next(v for v in low if graph.ops[v].op.endswith("weight_gradient"))
    assert {graph.ops[w].op for w in graph.successors[gradient]} == {"optimizer.sgd"}


def test_chunks_are_tensors_of_their_own() -> None:
    """Between layers no more than a chunk is sent: (2 steps, 2 sentences, 4 units) of 4 bytes."""
    graph = captured(num_layers=2, rnn_chunk=2, encoder_type="uni")
    high = next(v for v in graph.groups["encoder.layers.1.weight"] if graph.ops[v].phase == "forward")
    crossing = [graph.tensors[t] for t in graph.inputs[high]]
    assert [t.bytes for t in crossing] == [2 * 2 * 4 * 4]
    lowest = next(v for v in graph.groups["encoder.layers.0.weight"] if graph.ops[v].phase == "forward")
    assert [graph.tensors[t].bytes for t in graph.inputs[lowest]] == [2 * 2 * 4 * 4]


@pytest.mark.parametrize("encoder_type", ["gnmt", "bi", "uni"])
@pytest.mark.parametrize("unit_type", ["lstm", "gru"])
def test_chunks_change_neither_loss_nor_gradients(encoder_type: str, unit_type: str) -> None:
    found = []
    for chunk in (6, 4, 1):
        torch.manual_seed(0)
        options = Options(
            **TINY, num_layers=4, rnn_unit_type=unit_type, encoder_type=encoder_type, residual=True, rnn_chunk=chunk
        )  # fmt: skip
        module, inputs = build(options)
        module.double()
        loss = module(*inputs)
        found.append((loss, *torch.autograd.grad(loss, list(module.parameters()))))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b)
    assert all(gradient.any() for gradient in found[0][1:]), "a parameter does not matter"
    assert found[0][0].item() == pytest.approx(math.log(11), rel=0.1)


def lstm_weights(inputs: int, units: int) -> int:
    return (inputs + units + 1) * 4 * units


@pytest.mark.parametrize(
    ("encoder_type", "encoder_inputs", "width"),
    [("gnmt", [1, 1, 2, 1, 1], 1), ("bi", [1, 1, 1, 1], 2), ("uni", [1, 1, 1, 1], 1)],
)
def test_parameters(encoder_type: str, encoder_inputs: list[int], width: int) -> None:
    """`encoder_inputs` are the widths of the encoder layers' inputs, `width` is the memory's, in multiples of the units."""
    units, vocab = 8, 50
    with torch.device("meta"):
        model = GnmtV2(Options(vocab_size=vocab, rnn_units=units, num_layers=4, encoder_type=encoder_type))
    layers = sum(lstm_weights(n * units, units) for n in encoder_inputs)
    layers += lstm_weights(units, units) + 3 * lstm_weights((1 + width) * units, units)
    attention = units * units + width * units * units + units
    assert sum(p.numel() for p in model.parameters()) == 3 * vocab * units + layers + attention


def test_parameters_of_the_sizes_people_run() -> None:
    """Baechi's defaults, and the example of its README."""
    with torch.device("meta"):
        default = GnmtV2(Options())
        example = GnmtV2(Options(vocab_size=30_000, max_seq_length=40, rnn_units=512, num_layers=4))
    assert sum(p.numel() for p in default.parameters()) == 67_810_304
    assert sum(p.numel() for p in example.parameters()) == 69_691_904


def test_attention_is_the_mean_of_the_memory_by_a_softmax_of_scores() -> None:
    """Word for word, with loops, after Bahdanau et al."""
    torch.manual_seed(0)
    attention = AdditiveAttention(4, 5)
    queries, memory = torch.randn(3, 2, 4), torch.randn(6, 2, 5)
    found = attention(queries, attention.keys(memory), memory)
    w, u, v = attention.query.weight, attention.memory.weight, attention.v
    for t in range(3):
        for b in range(2):
            scores = torch.stack([v @ torch.tanh(w @ queries[t, b] + u @ memory[s, b]) for s in range(6)])
            torch.testing.assert_close(found[t, b], scores.softmax(0) @ memory[:, b])


def test_experts_put_layer_i_on_device_i() -> None:
    graph = captured(num_layers=3, rnn_chunk=2, residual=True)
    expected = {
        "encoder.embedding.weight": 0,
        "encoder.forward_layers.0.weight": 0,
        "encoder.backward_layers.0.weight": 0,
        "encoder.layers.0.weight": 1,
        "encoder.layers.1.weight": 2,
        "decoder.embedding.weight": 0,
        "decoder.layers.0.weight": 0,
        "decoder.layers.1.weight": 1,
        "decoder.layers.2.weight": 2,
        "decoder.attention.query.weight": 0,
        "decoder.attention.memory.weight": 0,
        "decoder.attention.v": 0,
        "projection.weight": 2,
    }
    assert {name: {graph.ops[v].expert for v in graph.groups[name]} for name in expected} == {n: {d} for n, d in expected.items()}
    assert set(graph.groups) == set(expected)
    assert all(op.expert is not None for op in graph.ops)
    for kind, device in (("aten.tanh", 0), ("aten._log_softmax", 2), ("aten.nll_loss_backward", 2)):
        assert {op.expert for op in graph.ops if op.op == kind} == {device}


def test_experts_give_the_projection_a_device_of_its_own_where_there_is_one() -> None:
    graph = captured(num_layers=2, num_devices=3)
    assert {graph.ops[v].expert for v in graph.groups["projection.weight"]} == {2}
    both = captured(num_layers=4, encoder_type="bi", num_devices=4)
    assert {both.ops[v].expert for v in both.groups["projection.weight"]} == {3}
    devices = {name: both.ops[both.groups[name][0]].expert for name in both.groups if "ward_layers" in name}
    assert devices == {f"encoder.{d}ward_layers.{i}.weight": i for d in ("for", "back") for i in range(2)}


@pytest.mark.parametrize(
    ("encoder_type", "num_layers", "needed"), [("gnmt", 1, "at least 2"), ("bi", 3, "an even number of"), ("bi", 1, "an even number of")]
)
def test_layers_that_do_not_suit_the_encoder(encoder_type: str, num_layers: int, needed: str) -> None:
    message = f"--num_layers={num_layers} does not suit --encoder_type={encoder_type}; it takes {needed} layers"
    with pytest.raises(OptionError, match=message):
        build(Options(encoder_type=encoder_type, num_layers=num_layers))


def test_one_layer_needs_no_attention_above_it() -> None:
    module, inputs = build(Options(**TINY, num_layers=1, encoder_type="uni"))
    assert isinstance(module, nn.Module)
    assert module(*inputs).isfinite()


def test_one_layer_attends_to_nothing() -> None:
    module, inputs = build(Options(2, 11, 4, 8, num_layers=1, encoder_type="uni"))
    module(*inputs).backward()
    assert [name for name, parameter in module.named_parameters() if parameter.grad is None] == []
