"""A graph over parts of a batch computes what that of the whole batch does, or is refused: op by op, where sizes are alike that are
none of the batch's."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from baechi_ext.capture.torch_joint import _Nodes
from baechi_ext.capture.torch_private import as_if_recording, descriptors, joint_graph
from baechi_ext.capture.torch_recurrent import recurrent_layers_kept
from baechi_ext.capture.torch_split import PART, ROWS, rows_of, split_batch
from baechi_ext.errors import CaptureError

Function = Callable[..., Any]
F = functional
D = descriptors()


class Of(nn.Module):
    """A function of its inputs and parameters as a module."""

    def __init__(self, function: Function, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self.function = function
        self.held = nn.ParameterList([nn.Parameter(p) for p in parameters])

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        found = self.function(*inputs, *self.held)
        return found if isinstance(found, tuple) else (found,)


class Run(fx.Interpreter):
    """Runs a graph as devices do, to which a view is a reshape, and an LSTM's layer makes what its backward op needs."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.mkldnn_rnn_layer.default:
            with as_if_recording():
                return target(*args)
        view = target is torch.ops.aten.view.default
        return super().call_function(torch.ops.aten.reshape.default if view else target, args, kwargs)


def r(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + len(shape)))


def n(most: int, *shape: int) -> Tensor:
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(sum(shape)))


def graphs(function: Function, inputs: Sequence[Tensor], held: Sequence[Tensor], parts: int | Sequence[int], **options: bool) -> Any:
    """The module, its joint graph, and that over parts with their sizes."""
    module = Of(function, held)
    whole = joint_graph(module, inputs)
    return module, whole, *split_batch(whole, _Nodes.of(whole), parts, **options)


def results(module: nn.Module, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Outputs, new buffers and gradients; those that come in are random. The random state afterwards is one of them."""
    state, given = dict(module.named_parameters()), []
    for node in (p for p in graph.graph.nodes if p.op == "placeholder"):
        match node.meta["desc"]:
            case D.ParamAOTInput(target=target):
                given.append(state[target].detach())
            case D.PlainAOTInput(idx=index) if ROWS in node.meta:
                given.append(rows_of(inputs[index].detach(), *node.meta[ROWS]))
            case D.PlainAOTInput(idx=index):
                given.append(inputs[index].detach())
            case _:
                given.append(r(*node.meta["val"].shape).to(node.meta["val"].dtype))
    torch.manual_seed(3)
    with torch.no_grad():
        found = Run(graph).run(*given, enable_io_processing=False)
    return [*found, torch.get_rng_state()]


def largest_difference(expected: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> float:
    """Relative to each tensor's largest number."""
    differences = [0.0]
    for a, b in zip(expected, found, strict=True):
        if a is None or b is None:
            assert a is b
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if a.dtype.is_floating_point:
            torch.testing.assert_close(a.isnan(), b.isnan())
            a, b = a.nan_to_num(), b.nan_to_num()
            differences.append(float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)))
        else:
            assert torch.equal(a, b)
    return max(differences)


def require_same(function: Function, inputs: Sequence[Tensor], *held: Tensor, parts: int | Sequence[int] = 2) -> tuple[int, ...]:
    module, whole, parted, sizes = graphs(function, inputs, held, parts)
    assert {node.meta[PART] for node in parted.graph.nodes if PART in node.meta} == set(range(len(sizes)))
    assert largest_difference(results(module, whole, inputs), results(module, parted, inputs)) < 1e-5
    return sizes


W = r(4, 4)


def test_gradients_of_a_layer_that_is_used_again_are_added_up_part_by_part() -> None:
    """So that one tensor of a part goes to another device, not one for each use."""

    def twice(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w).relu() @ w).square().sum() + (x.tanh() @ w).exp().sum()

    require_same(twice, [r(4, 4)], W)
    _, _, parted, _ = graphs(twice, [r(4, 4)], [W], 2)
    across = [n for n in parted.graph.nodes if len({read.meta.get(PART) for read in n.all_input_nodes} - {None}) > 1]
    assert len(across) == 2  # the loss, and the gradient


LEFT_OUT = {"ignore_index": 1}
MIXED: dict[str, tuple[Function, Sequence[Tensor], str]] = {
    "softmax": (lambda x, w: (x @ w).softmax(0), [r(4, 4)], "aten._softmax.default works along the batch"),
    "cumsum": (lambda x, w: (x @ w).cumsum(0), [r(4, 4)], "aten.cumsum.default works along the batch"),
    "sort": (lambda x, w: (x @ w).sort(0)[0], [r(4, 4)], "aten.sort.* works along the batch"),
    "contrastive": (lambda x, w: (x @ w) @ (x @ w).T, [r(4, 4)], "aten.mm.default multiplies rows of examples with each other"),
    "contrastive loss": (
        lambda x, w: F.cross_entropy((x @ w) @ (x @ w).T, torch.arange(4)),
        [r(4, 4)],
        "aten.mm.default multiplies rows of examples",
    ),
    "pairs": (lambda x, w: (x @ w)[:, None] - (x @ w)[None], [r(4, 4)], "aten.sub.Tensor combines rows of examples along different"),
    "BatchNorm": (lambda x, w: F.batch_norm(x @ w, None, None, training=True), [r(4, 4)], "normalises over the whole batch"),
    "InstanceNorm": (lambda x, w: F.instance_norm(x @ w), [r(4, 4, 4)], "normalises over the whole batch"),
    "std": (lambda x, w: (x @ w) / (x @ w).std(0), [r(4, 4)], "aten.std.correction works along the batch"),
    "max": (lambda x, w: (x @ w) / (x @ w).max(), [r(4, 4)], "aten.max.default works along the batch"),
    "norm": (lambda x, w: F.normalize(x @ w, dim=0), [r(4, 4)], "aten.linalg_vector_norm.default works along the batch"),
    "flip": (lambda x, w: (x @ w).flip(0), [r(4, 4)], "aten.flip.default works along the batch"),
    "roll": (lambda x, w: (x @ w).roll(1, 0), [r(4, 4)], "aten.roll.default works along the batch"),
    "merge": (lambda x, w: (x @ w).reshape(-1).cumsum(0), [r(4, 4)], "aten.cumsum.default works along the batch"),
    "merge behind": (lambda x, w: (x @ w).transpose(0, 1).reshape(-1, 4).cumsum(0), [r(4, 3, 4)], "aten.cumsum.default works along"),
    "halves": (lambda x, w: (x @ w).view(2, 2, 4)[0], [r(4, 4)], r"aten.view.default merges the batch \(dimension 0 of \(4, 4\)\)"),
    "first": (lambda x, w: (x @ w)[0], [r(4, 4)], "aten.select.int takes single examples out of the batch"),
    "neighbours": (lambda x, w: (x @ w)[1:] - (x @ w)[:-1], [r(4, 4)], "aten.slice.Tensor takes single examples"),
    "permuted": (lambda x, w: (x @ w)[torch.tensor([1, 0, 3, 2])], [r(4, 4)], "aten.index.Tensor takes examples out of the batch"),
    "own labels": (lambda x, y, w: (x @ w)[torch.arange(4), y], [r(4, 4), n(4, 4)], "aten.index.Tensor takes examples out"),
    "gather": (lambda x, y, w: (x @ w).gather(0, y), [r(4, 4), n(4, 4, 2)], "aten.gather.default works along the batch"),
    "further examples": (lambda x, w: torch.cat([x @ w, x @ w]), [r(4, 4)], "aten.cat.default puts further examples behind the batch"),
    "padded batch": (lambda x, w: F.pad(x @ w, (0, 0, 1, 0)), [r(4, 4)], "aten.constant_pad_nd.default adds examples to the batch"),
    "convolution": (lambda x, w: F.conv1d((x @ w)[None], torch.ones(4, 4, 1)), [r(4, 4)], "aten.convolution.default works along the batch"),
    "LayerNorm": (lambda x, w: F.layer_norm((x @ w).T, [4]), [r(4, 4)], "aten.native_layer_norm.default normalises along the batch"),
    "triangle": (lambda x, w: (x @ w).tril(), [r(4, 4)], "aten.tril.default works along the batch"),
    "attention": (lambda x, w: ((x @ w) @ (x @ w).T).softmax(-1) @ x, [r(4, 4)], "aten.mm.default multiplies rows of examples"),
    "an example that is set": (lambda x, w: torch.select_scatter(x @ w, x[0], 0, 1), [r(4, 4)], "aten.select.int takes single examples"),
    "a row for an example": (lambda x, w: torch.select_scatter(x @ w, w[0], 0, 1), [r(4, 4)], "puts values in place of single examples"),
    "noise": (lambda x, w: (x @ w) + torch.randn_like(x), [r(4, 4)], "aten.randn_like.default draws random numbers"),
    "distances": (lambda x, w: torch.cdist(x @ w, x @ w), [r(4, 4)], "aten._cdist_forward.default is not known to keep the rows"),
    "frequencies": (lambda y, w: F.embedding(y, w, scale_grad_by_freq=True), [n(4, 4, 3)], "counts how often words come in the whole"),
    "memory": (lambda x, w: (x @ w).as_strided((4, 4), (1, 4)), [r(4, 4)], "aten.as_strided.default is not known to keep the rows"),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_examples_is_refused(name: str) -> None:
    function, inputs, message = MIXED[name]
    with pytest.raises(CaptureError, match=message):
        graphs(function, inputs, [W], 2)


ALIKE: dict[str, tuple[Function, Sequence[Tensor]]] = {
    "linear": (lambda x, w: F.linear(x, w, w[0]).relu(), [r(5, 4)]),
    "the batch's size as a number": (lambda x, w: (x @ w) / len(x) + (x @ w).sum(0) / x.shape[0], [r(4, 4)]),
    "a mean that is used again": (lambda x, w: (x @ w) - (x @ w).mean(0), [r(5, 4)]),
    "a square of a sum": (lambda x, w: (x @ w).sum(0).square(), [r(5, 4)]),
    "covariances": (lambda x, w: (x @ w).T @ (x @ w), [r(4, 4)]),
    "an input without a batch": (lambda x, t, w: x @ w + t, [r(5, 4), r(4)]),
    "a table as long as the batch": (lambda x, t, w: (x @ w) @ t, [r(4, 4), r(4, 4)]),
    "a table before the batch": (lambda t, x, w: (x @ w) @ t, [r(4, 4), r(4, 4)]),
    "a row as long as the batch": (lambda x, t, w: (x @ w) + t, [r(4, 4), r(4)]),
    "a number for each example": (lambda x, t, w: (x @ w) * t[:, None], [r(4, 4), r(4)]),
    "positions of a square": (lambda x, w: (x @ w) + torch.eye(4) + torch.arange(4)[:, None], [r(4, 4)]),
    "numbers drawn for the whole batch": (lambda x, w: (x @ w) + torch.randn(4, 4), [r(4, 4)]),
    "keys of another tower": (lambda x, y, w: F.cross_entropy((x @ w) @ (y @ w).T, torch.arange(4)), [r(4, 4), r(4, 4)]),
    "a sequence": (lambda x, w: (x @ w).flatten(0, 1).tanh() @ w, [r(4, 3, 4)]),
    "the batch in the middle": (lambda x, w: F.linear((x @ w).transpose(0, 1).reshape(-1, 4), w), [r(5, 3, 4)]),
    "a class token": (lambda x, w: torch.cat([w[:1].expand(4, 1, 4), x @ w], 1), [r(4, 3, 4)]),
    "nothing beside": (lambda x, w: torch.cat([torch.tensor([]), x @ w], 1), [r(4, 4)]),
    "attention": (lambda x, w: ((x @ w) @ (x @ w).transpose(1, 2)).softmax(-1) @ x, [r(4, 4, 4)]),
    "fused attention": (lambda x, m, w: F.scaled_dot_product_attention(*[(x @ w)[:, None]] * 3, attn_mask=m), [r(4, 4, 4), r(4, 1, 4, 4)]),
    "dropped attention": (lambda x, w: F.scaled_dot_product_attention(*[(x @ w)[:, None]] * 3, dropout_p=0.3), [r(4, 4, 4)]),
    "dropout of weights": (lambda x, w: (lambda d: F.dropout(x @ w, 0.4) @ d)(F.dropout(w, 0.2)), [r(5, 4)]),
    "dropout": (lambda x, w: F.dropout(F.dropout(x @ w, 0.4).transpose(0, 1), 0.2), [r(5, 3, 4)]),
    "an embedding": (lambda y, w: F.embedding(y, w, padding_idx=1), [n(4, 5, 3)]),
    "rows of a table": (lambda y, w: w[y], [n(4, 5, 3)]),
    "columns": (lambda x, w: (x @ w)[:, torch.tensor([1, 0]), :, torch.tensor([2, 3])], [r(4, 4, 4, 4)]),
    "a triangle": (lambda x, w: (x @ w).tril(), [r(4, 4, 4)]),
    "places that are set": (lambda x, t, w: torch.select_scatter(torch.slice_scatter(x @ w, x[:, :2], 1, 1, 3), t, 1, 0), [r(5, 4), r(5)]),
    "a gather": (lambda x, y, w: (x @ w).gather(1, y), [r(4, 4), n(4, 4, 2)]),
    "convolutions": (
        lambda x, w: F.max_pool2d(F.conv2d(F.conv2d(x, w[:, :, None, None]), w[:, :1, None, None], groups=4), 2),
        [r(5, 4, 4, 4)],
    ),
    "pictures": (lambda x, w: F.interpolate(F.conv2d(x, w[:, :, None, None]), scale_factor=2, mode="bilinear"), [r(4, 4, 4, 4)]),
    "groups": (lambda x, w: F.group_norm(F.conv2d(x, w[:, :, None, None]), 2, w[0], w[1]), [r(4, 4, 4, 4)]),
    "normalised by running values": (lambda x, w: F.batch_norm(x @ w, torch.zeros(4), torch.ones(4), w[0], w[1]), [r(4, 4)]),
    "layers normalised": (lambda x, w: F.rms_norm(F.layer_norm(x @ w, [4], w[0], w[1]), [4]), [r(5, 4, 4)]),
    "ignored labels": (
        lambda x, y, w: F.cross_entropy(x @ w, y, w[0].detach().exp(), **LEFT_OUT),
        [r(5, 4), torch.tensor([1, 1, 1, 0, 2])],
    ),
    "no labels that count": (lambda x, y, w: F.cross_entropy(x @ w, y, **LEFT_OUT), [r(4, 4), torch.ones(4).long()]),
    "labels smoothed": (lambda x, y, w: F.cross_entropy(x @ w, y, label_smoothing=0.1, **LEFT_OUT), [r(5, 4), n(4, 5)]),
    "labels of pictures": (
        lambda x, y, w: F.cross_entropy(F.conv2d(x, w[:, :, None, None]), y, **LEFT_OUT),
        [r(4, 4, 4, 4), n(4, 4, 4, 4)],
    ),
    "weights of pairs": (
        lambda x, y, t, w: F.binary_cross_entropy_with_logits(x @ w, y.sigmoid(), weight=t, pos_weight=w[0].detach().exp()),
        [r(5, 4), r(5, 4), r(5, 1)],
    ),
    "pairs weighted by a sum over the batch": (
        lambda x, y, w: F.binary_cross_entropy_with_logits(x @ w, y.sigmoid(), pos_weight=y.sigmoid().sum(0), reduction="sum"),
        [r(5, 4), r(5, 4)],
    ),
}


class Recurrent(nn.Module):
    """Two layers and directions with dropout between, in the order of time or of examples."""

    def __init__(self, kind: type[nn.RNNBase], *, batch_first: bool) -> None:
        super().__init__()
        self.layer = kind(4, 3, num_layers=2, bidirectional=True, dropout=0.3, batch_first=batch_first)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found, last = self.layer(x)
        return found, last if isinstance(last, Tensor) else last[0]


LOSSES = ("mse_loss", "huber_loss", "smooth_l1_loss", "l1_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")


@pytest.mark.parametrize("name", ALIKE)
def test_parts_compute_what_the_whole_batch_does(name: str) -> None:
    function, inputs = ALIKE[name]
    sizes = require_same(function, inputs, W)
    assert sum(sizes) in {length for value in inputs for length in value.shape}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers(kind: type[nn.RNNBase], batch_first: bool) -> None:
    module, x = Recurrent(kind, batch_first=batch_first), r(*((5, 3, 4) if batch_first else (3, 5, 4)))
    with recurrent_layers_kept():
        whole = joint_graph(module, [x])
    parted, sizes = split_batch(whole, _Nodes.of(whole), 2)
    assert sizes == (3, 2)
    assert any("mkldnn_rnn_layer_backward" in str(node.target) for node in parted.graph.nodes) == (kind is nn.LSTM)
    assert largest_difference(results(module, whole, [x]), results(module, parted, [x])) < 1e-5


@pytest.mark.parametrize("way", ["none", "mean", "sum"])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_are_those_of_the_whole_batch(loss: str, way: str) -> None:
    require_same(lambda x, y, w: getattr(F, loss)((x @ w).sigmoid(), y.sigmoid(), reduction=way), [r(5, 4), r(5, 4)], W)


def test_sizes_are_of_the_batch_that_comes() -> None:
    """A batch that they do not divide, a smaller one in proportion, and one of fewer examples than parts."""
    linear = ALIKE["linear"][0]
    found = [require_same(linear, [r(batch, 4)], W, parts=parts) for batch, parts in ((7, 3), (8, (6, 2)), (4, (6, 2)), (2, 3))]
    assert found == [(3, 2, 2), (6, 2), (3, 1), (1, 1)]
    with pytest.raises(CaptureError, match="no input has a dimension to split"):
        graphs(linear, [r(1, 4)], [W], 2)


def test_gradients_of_inputs_and_layouts_of_outputs_are_the_whole_batchs() -> None:
    x = r(4, 4, 3, 3).to(memory_format=torch.channels_last).requires_grad_()
    module, whole, parted, _ = graphs(lambda x, w: (F.conv2d(x, w[:, :, None, None]), x.square().T), [x], [W], 2)
    expected, found = results(module, whole, [x]), results(module, parted, [x])
    assert largest_difference(expected, found) < 1e-5
    assert [t.stride() for t in expected[:2] if t is not None] == [t.stride() for t in found[:2] if t is not None]


def normalised(x: Tensor, w: Tensor) -> Tensor:
    return F.batch_norm((x @ w).flatten(0, -2), None, None, w[0], w[1], training=True).tanh()


@pytest.mark.parametrize("shape", [(5, 4), (5, 3, 4)])
def test_each_part_is_normalised_by_itself_where_that_is_allowed(shape: tuple[int, ...]) -> None:
    def by_part(x: Tensor, w: Tensor) -> Tensor:
        return torch.cat([normalised(part, w) for part in x.split([3, 2])])

    x = r(*shape)
    module, whole, parted, sizes = graphs(normalised, [x], [W], 2, batch_norm_per_part=True)
    assert sizes == (3, 2)
    expected = Of(by_part, [W])
    found = results(module, parted, [x])
    assert largest_difference(results(expected, joint_graph(expected, [x]), [x]), found) < 1e-5
    assert largest_difference(results(module, whole, [x]), found) > 0.01


@pytest.mark.parametrize(
    ("function", "x", "message"),
    [
        (normalised, r(3, 4), "would normalise over a single number"),
        (lambda x, w: normalised((x @ w).transpose(0, 1), w), r(4, 4, 4), "or rows that do not stand together"),
        (MIXED["InstanceNorm"][0], r(4, 4, 4), "works along the batch"),
    ],
)
def test_what_is_not_normalised_part_by_part(function: Function, x: Tensor, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        graphs(function, [x], [W], 2, batch_norm_per_part=True)


def half(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """A weight that is cast for two products, and added to."""
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(F.linear(F.linear(x, w, w[0]).relu(), w), y) + w.square().mean()


def test_under_autocast_parts_differ_by_rounding_alone() -> None:
    """By a few units in the last place of 16 bits; where these are taken for 64, by nothing. The weight's gradient is of its own type."""
    inputs = [r(64, 4), n(4, 64)]
    module, whole, parted, _ = graphs(half, inputs, [W], 4)
    a, b = results(module, whole, inputs), results(module, parted, inputs)
    assert 0 < largest_difference(a, b) < 2.5 * torch.finfo(torch.bfloat16).eps
    for graph in (whole, parted):
        for node in (n for n in graph.graph.nodes if n.kwargs.get("dtype") is torch.bfloat16):
            node.kwargs = {**node.kwargs, "dtype": torch.float64}
    assert largest_difference(results(module, whole, inputs), results(module, parted, inputs)) < 1e-6
    node = next(p for p in parted.graph.nodes if p.meta.get(PART) == 1 and ROWS in p.meta)
    node.meta[ROWS] = (0, 15, 16)  # one example of 64 twice, and one not at all
    assert largest_difference(a, results(module, parted, inputs)) > 2.5 * torch.finfo(torch.bfloat16).eps


def test_a_part_that_reads_the_wrong_rows_is_found() -> None:
    """The comparison above is no blindness."""
    x = r(4, 4)
    module, whole, parted, _ = graphs(ALIKE["linear"][0], [x], [W], 2)
    node = next(p for p in parted.graph.nodes if p.meta.get(PART) == 1 and ROWS in p.meta)
    node.meta[ROWS] = (0, 1, 2)
    assert largest_difference(results(module, whole, [x]), results(module, parted, [x])) > 0.01
