"""Captured graphs as shard graphs: what nodes cost, how their tensors are split, and what parts of tensors give when they are joined."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from baechi_ext.shard.graph import Node, ShardGraph
from baechi_ext.shard.layers import Layers, Value
from baechi_ext.shard.machine import Machine
from baechi_ext.shard.rules import Rules
from baechi_ext.shard.search import search
from baechi_ext.shard.tables import build_tables, configurations, node_bytes
from baechi_ext.shard.terms import AllReduce, Compute, Halo
from baechi_runtime.cli.main import main
from baechi_runtime.sharding.captured import CapturedGraph, ForwardGraph, captured_graph, forward_graph
from baechi_runtime.sharding.op_names import op_name
from baechi_runtime.sharding.rules import rule_of
from tests.runtime.sharding.small_models import BATCH, CASES, Cnn, Foreign, Mlp, images
from tests.shard.problems import full

PRODUCTS = ("linear", "matmul", "conv")


def captured(name: str) -> tuple[ForwardGraph, CapturedGraph]:
    torch.manual_seed(0)
    module, inputs = CASES[name]()
    forward = forward_graph(module, inputs, name)
    return forward, captured_graph(forward)


def node(graph: CapturedGraph, name: str) -> Node:
    return next(n for n in graph.graph.nodes if n.name == name)


@pytest.mark.parametrize("name", CASES)
def test_all_ops_are_known_and_joined(name: str) -> None:
    forward, graph = captured(name)
    assert graph.unknown == {}
    calls = [n for n in forward.nodes if n.name in graph.reads]
    assert [n.name for n in calls] == [n.name for n in graph.graph.nodes]
    assert all(n.target.__name__ == "getitem" for n in forward.nodes if n.name not in graph.reads)
    read = {n.name for call in calls for n in call.all_input_nodes}
    told = {source for reads in graph.reads.values() for source, _ in reads}
    assert read - told <= {"cat"}  # new_zeros looks at its shape alone


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("devices", [4, 6])
def test_parts_of_tensors_multiply_to_the_whole(name: str, devices: int) -> None:
    _, graph = captured(name)
    for one in graph.graph.nodes:
        space = configurations(one, devices)
        for tensor in (*one.inputs, *one.outputs, *one.weights):
            used = [axis for dim in tensor.axes for axis in dim]
            assert len(used) == len(set(used))
            for size, dim in zip(tensor.shape, tensor.axes, strict=True):
                assert not (size % space[:, dim].prod(axis=1)).any(), (one, tensor)
        assert space.prod(axis=1).max() <= devices


class Values(fx.Interpreter):
    """The values that every call of a graph writes."""

    def __init__(self, forward: ForwardGraph, tensors: list[Tensor]) -> None:
        super().__init__(forward.program.graph_module)
        self.values: dict[str, Any] = {}
        self.run(*tensors)

    def run_node(self, n: fx.Node) -> Any:
        self.values[n.name] = super().run_node(n)
        return self.values[n.name]


def values_of(forward: ForwardGraph, module: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Any]:
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    names = [n.name for n in forward.program.graph.nodes if n.op == "placeholder"]
    given = iter(inputs)
    return Values(
        forward, [state[(forward.parameters | forward.buffers)[n]] if n not in forward.inputs else next(given) for n in names]
    ).values


def cut(tensor: Tensor, dims: tuple[tuple[int, ...], ...], axis: int, part: int, parts: int) -> Tensor:
    """The part of a tensor that a device has where that axis is split."""
    place = next((i for i, dim in enumerate(dims) if axis in dim and tensor.dim()), None)
    return tensor if place is None else tensor.chunk(parts, place)[part]


def splits(one: Node) -> Iterator[tuple[int, int]]:
    """Axes, and into how many parts, where parts of the result can be put together by themselves: no statistics, no random numbers."""
    mixed = {a for t in one.terms if isinstance(t, AllReduce) and t.kind == "statistics" for a in t.over}
    mixed |= {one.axis("vocabulary")} if one.op == "embedding" else set()
    mixed |= {one.axis("units"), one.axis("in_units")} if one.op in ("lstm", "gru") else set()
    for axis, (loop, parts) in enumerate((loop, parts) for loop in one.axes for parts in (2, 3)):
        place = axis // 2
        if loop.splits and loop.size % parts == 0 and place not in mixed:
            yield place, parts


def computed(call: fx.Node, reads: dict[str, Tensor], shape: tuple[int, ...], groups: int) -> Any:
    """The call on parts of what it reads; a view to the part of its shape, a convolution with its part of the groups."""
    arguments = list(call.args)
    schema = [argument.name for argument in call.target._schema.arguments]
    for name in ("size", "shape"):
        if name in schema and isinstance(arguments[schema.index(name)], list | tuple):
            arguments[schema.index(name)] = list(shape)
    if "sizes" in schema:
        return next(iter(reads.values())).reshape(shape)
    if "groups" in schema and len(arguments) > schema.index("groups"):
        arguments[schema.index("groups")] //= groups
    if "num_groups" in schema:
        arguments[schema.index("num_groups")] //= groups
    return call.target(*fx.map_arg(arguments, lambda n: reads[n.name]), **call.kwargs)


@pytest.mark.parametrize("name", CASES)
def test_parts_computed_apart_give_the_whole(name: str) -> None:
    torch.manual_seed(0)
    module, inputs = CASES[name]()
    forward = forward_graph(module, inputs, name)
    graph = captured_graph(forward)
    values = values_of(forward, module, inputs)
    checked = 0
    for call in forward.nodes:
        if call.name not in graph.reads:
            continue
        one = node(graph, call.name)
        for axis, parts in splits(one):
            check(call, one, graph.reads[call.name], values, (axis, parts))
            checked += 1
    assert checked > len(graph.graph.nodes)


def check(call: fx.Node, one: Node, reads: Any, values: dict[str, Any], split: tuple[int, int]) -> None:
    axis, parts = split
    whole = values[call.name]
    wholes = list(whole) if isinstance(whole, list | tuple) else [whole]
    results = []
    for part in range(parts):
        mine = {source: cut(values[source], tensor.axes, axis, part, parts) for source, tensor in reads}
        shape = tuple(cut(wholes[0], one.outputs[0].axes, axis, part, parts).shape)
        groups = parts if one.axes[axis].name == "groups" or (call.name.startswith("group_norm") and axis == 1) else 1
        result = computed(call, mine, shape, groups)
        results.append(list(result) if isinstance(result, list | tuple) else [result])
    for i, (expected, tensor) in enumerate(zip(wholes, one.outputs, strict=False)):
        found = [r[i] for r in results]
        place = next((d for d, dim in enumerate(tensor.axes) if axis in dim), None)
        joined = torch.cat(found, place) if place is not None else summed(call, one, found, reads, values)
        torch.testing.assert_close(joined, expected, rtol=1e-4, atol=1e-5, msg=f"{call.name}: {one.axes[axis].name} in {parts}")


def summed(call: fx.Node, one: Node, found: list[Tensor], reads: Any, values: dict[str, Any]) -> Tensor:
    """Parts of a sum, a mean or a maximum; what is added to a product is in every part."""
    stacked = torch.stack(found)
    if call.name.startswith("amax"):
        return stacked.amax(0)
    if one.op in ("mean", "loss", "cross_entropy") and not call.name.startswith("sum"):
        return stacked.mean(0)
    extra = [values[source] for source, tensor in reads if one.op in PRODUCTS and len(reads) == 3 and source == added(call)]
    return stacked.sum(0) - (len(found) - 1) * (bias_of(one, extra[0]) if extra else 0.0)


def added(call: fx.Node) -> str:
    """The name of what a call adds to a product."""
    return call.args[0 if "baddbmm" in call.name or "addmm" in call.name else 2].name


def bias_of(one: Node, bias: Tensor) -> Tensor:
    return bias[:, None, None] if one.op == "conv" else bias


@pytest.mark.parametrize("name", ["mlp", "cnn", "attention", "attention written out", "mixed"])
def test_operations_are_those_that_torch_counts(name: str) -> None:
    torch.manual_seed(0)
    module, inputs = CASES[name]()
    graph = captured_graph(forward_graph(module, inputs, name))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        module(*inputs).backward()
    products = sum(n.flop() for n in graph.graph.nodes if n.op in PRODUCTS)
    attention = [n for n in graph.graph.nodes if n.op == "attention"]
    scores = sum(8.0 * BATCH * 4 * 6 * 6 for _ in attention)
    # Torch counts the gradient of a weight in groups as if each result channel read all others.
    groups = [n.axis("groups") for n in graph.graph.nodes]
    too_much = sum(n.sizes[g] - 1 for n, g in zip(graph.graph.nodes, groups, strict=True) if g is not None) * 2 * BATCH * 16 * 8 * 2 * 9
    assert products + sum(n.flop() for n in attention) - scores == counter.get_total_flops() - too_much


def test_an_lstm_multiplies_what_its_cells_do() -> None:
    """The products of torch's LSTM written out, and three operations for each pointwise function of a gate."""
    _, graph = captured("recurrent")
    lstm = node(graph, "lstm")
    products = [term for term in lstm.terms if isinstance(term, Compute) and len(term.axes) == 4]
    counted = sum(term.flop * torch.tensor(lstm.sizes).prod().item() for term in products)
    cells = nn.LSTMCell(8, 12), nn.LSTMCell(12, 12)
    x = torch.randn(5, BATCH, 8)
    with FlopCounterMode(display=False) as counter:
        states: list[Any] = [(torch.zeros(BATCH, 12), torch.zeros(BATCH, 12)) for _ in cells]
        for step in x:
            for layer, cell in enumerate(cells):
                states[layer] = cell(step, states[layer])
                step = states[layer][0]  # noqa: PLW2901
        forward = counter.get_total_flops()
    inputs_gradient = 2 * 5 * BATCH * 8 * 48  # the step's input needs none
    assert counted == 3 * forward - inputs_gradient


def hand_written(build: Callable[[Layers], None]) -> Node:
    layers = Layers("by hand", Rules())
    build(layers)
    return layers.graph().nodes[-1]


def costs_by_split(one: Node, devices: int = 8) -> dict[tuple[tuple[str, int], ...], float]:
    """Each configuration's cost, by what is split."""
    tables = build_tables(ShardGraph("one", (one,), ()), Machine(devices=devices))
    names = [axis.name for axis in one.axes]
    return {
        tuple(sorted((n, int(p)) for n, p in zip(names, row, strict=True) if p > 1)): float(cost)
        for row, cost in zip(tables.spaces[0], tables.costs[0], strict=True)
    }


def test_a_linear_layer_costs_what_the_rules_say() -> None:
    inputs = torch.randn(BATCH, 16), torch.randint(12, (BATCH,))
    graph = captured_graph(forward_graph(Mlp(bias=False), inputs)).graph
    by_hand = hand_written(lambda layers: layers.linear(layers.linear(Value((BATCH, 16), ("batch", "x")), 32, "units"), 12, "units"))
    assert costs_by_split(graph.nodes[2]) == pytest.approx(costs_by_split(by_hand))


def test_a_convolution_costs_what_the_rules_say() -> None:
    module = nn.Sequential(nn.Conv2d(4, 6, 1, bias=False), nn.Conv2d(6, 8, 3, stride=2, padding=1, bias=False))
    graph = captured_graph(forward_graph(WithMean(module), images()[:1])).graph

    def build(layers: Layers) -> None:
        x = layers.convolution(Value((BATCH, 4, 8, 8), ("batch", "channels", "height", "width")), 6, (1, 1))
        layers.convolution(x, 8, (3, 3), stride=2, pad=(1, 1))

    assert costs_by_split(graph.nodes[1]) == pytest.approx(costs_by_split(hand_written(build)))


def test_an_embedding_and_a_norm_cost_what_the_rules_say() -> None:
    _, graph = captured("attention")

    def embed(layers: Layers) -> None:
        layers.embedding(Value((BATCH, 6), ("batch", "sequence")), 20, 16)

    one = node(graph, "embedding")
    alone = [t for t in one.terms if not (isinstance(t, AllReduce) and t.kind == "weight gradient")]
    by_hand = hand_written(embed)
    assert [t for t in by_hand.terms if t.kind != "weight gradient"] == alone
    shared = next(t.words for t in one.terms if t.kind == "weight gradient")
    assert shared == 0.5  # of two calls that read the table
    norm = hand_written(lambda layers: layers.layer_norm(layers.embedding(Value((BATCH, 6), ("batch", "sequence")), 20, 16)))
    assert costs_by_split(node(graph, "layer_norm")) == pytest.approx(costs_by_split(norm))


class WithMean(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x).mean()


class Thrice(nn.Module):
    """A layer that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layer(self.layer(self.layer(x).relu()).relu()), wanted)


def test_data_parallel_layers_sum_up_their_gradients() -> None:
    """By batch alone, an MLP sends each parameter's gradient, and nothing else but the loss."""
    _, graph = captured("mlp")
    parameters = 16 * 32 + 32 + 32 * 12 + 12
    sums = [t for n in graph.graph.nodes for t in n.terms if isinstance(t, AllReduce) and n.axis("batch") in t.over]
    sizes = {n.name: n.sizes for n in graph.graph.nodes}
    words = 0.0
    for one in graph.graph.nodes:
        for term in one.terms:
            if isinstance(term, AllReduce) and one.axis("batch") in term.over and term.kind == "weight gradient":
                words += term.words * torch.tensor([sizes[one.name][a] for a in term.axes]).prod().item()
    assert words == parameters
    assert [t.kind for t in sums if t.kind != "weight gradient"] == ["output sum"]


def test_a_shared_parameter_is_held_once_and_moves_where_its_splits_differ() -> None:
    _, graph = captured("attention")
    holders = [n.name for n in graph.graph.nodes for t in n.weights if t.shape == (20, 16)]
    assert holders == ["embedding"]
    embedding, whole = node(graph, "embedding"), np.ones((1, len(node(graph, "embedding").axes)), np.int64)
    (result,) = embedding.results
    (held,) = node_bytes(embedding, whole, Machine(devices=4))
    assert held == 4 * (3 * 20 * 16 + result.words)  # what goes on to the next reader is no activation
    names = [n.name for n in graph.graph.nodes]
    edge = next(e for e in graph.graph.edges if (names[e.source], names[e.target]) == ("embedding", "t"))
    tables = build_tables(graph.graph, Machine(devices=4))
    table = full(tables.edges[graph.graph.edges.index(edge)])
    spaces = [tables.spaces[v] for v in (edge.source, edge.target)]
    vocabulary, units = node(graph, "embedding").axis("vocabulary"), node(graph, "t").axis("units")
    alike = [(int(r), int(c)) for r, row in enumerate(spaces[0]) for c, col in enumerate(spaces[1]) if row[vocabulary] == 4 == col[units]]
    assert [table[r, c] for r, c in alike] == [0.0]
    assert table.max() > 0


def test_calls_of_a_layer_are_split_alike() -> None:
    graph = captured_graph(forward_graph(Thrice(), (torch.randn(BATCH, 16), torch.randn(BATCH, 16)))).graph
    names = [n.name for n in graph.nodes]
    assert [tuple(names[v] for v in tie) for tie in graph.ties] == [("linear", "linear_1", "linear_2")]
    found = search(graph, Machine(devices=8))
    assert len({found.strategy[v] for v in graph.ties[0]}) == 1
    assert [len(n.weights) for n in graph.nodes if n.op == "linear"] == [2, 0, 0]
    sums = [t.words for n in graph.nodes for t in n.terms if isinstance(t, AllReduce) and t.kind == "weight gradient"]
    assert sum(sums) == pytest.approx(2.0)  # a weight's and a bias's


def test_what_is_not_known_is_computed_whole_and_counted() -> None:
    forward = forward_graph(Foreign(), (torch.randn(BATCH, 6, 6),))
    graph = captured_graph(forward)
    assert graph.unknown == {"linalg_matrix_exp": "linalg_matrix_exp"}
    one = node(graph, "linalg_matrix_exp")
    assert configurations(one, 8).shape == (1, 0)
    assert len([e for e in graph.graph.edges if graph.graph.nodes[e.target] is one]) == 1
    assert 0 < graph.unknown_flop < graph.flop
    found = search(graph.graph, Machine(devices=4))
    assert found.status == "optimal"


class InPlace(nn.Module):
    """Functions of single numbers, written over what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.elu_(self.layer(x)).abs_().add_(1.0).mean()


def test_ops_in_place_are_known_as_those_that_are_not() -> None:
    forward = forward_graph(InPlace(), (torch.randn(BATCH, 6),))
    graph = captured_graph(forward)
    assert graph.unknown == {}
    elu, absolute, added = (node(graph, name) for name in ("elu_", "abs_", "add_"))
    assert [one.op for one in (elu, absolute, added)] == ["elementwise"] * 3
    assert costs_by_split(elu) == costs_by_split(absolute)
    assert [op_name(call) for call in forward.nodes] == ["aten.linear", "aten.elu", "aten.abs", "aten.add", "aten.mean"]
    assert all(rule_of(call) for call in forward.nodes)


def test_splits_of_images_exchange_rims() -> None:
    torch.manual_seed(0)
    forward = forward_graph(Cnn(), images())
    graph = captured_graph(forward, splits_images=True)
    conv = node(graph, "conv2d_1")
    assert [a.name for a in conv.axes if a.splits] == ["batch", "groups", "height", "width"]
    assert [t.kind for t in conv.terms][-1] == "halo"


class Dilated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=2, dilation=2)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.max_pool2d(self.conv(x), 2, stride=1, dilation=3).sum()


def test_a_dilated_window_reaches_farther() -> None:
    forward = forward_graph(Dilated(), (torch.randn(BATCH, 3, 12, 12),))
    graph = captured_graph(forward, splits_images=True).graph
    reaches = [term.reach for n in graph.nodes for term in n.terms if isinstance(term, Halo)]
    assert reaches == [(4.0, 4.0), (3.0, 3.0)]


class Rolled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.roll(x * 2, 1).sum() + torch.roll(x * 2, 1, 1).sum()


def test_what_is_rolled_over_all_dimensions_is_whole() -> None:
    graph = captured_graph(forward_graph(Rolled(), (torch.randn(BATCH, 6, requires_grad=True),))).graph
    assert [[axis.splits for axis in n.axes] for n in graph.nodes if n.op == "along"] == [[], [True]]


def test_alexnet_splits_as_the_graph_by_hand_does(capsys: pytest.CaptureFixture[str]) -> None:
    """Convolutions by batch, the large linear layers by units and what they sum over (PaSE paper, Table II)."""
    found = {}
    for name in (["--model_name=alexnet", "--image_size=227"], ["-g", "alexnet"]):
        assert main(["pase", *name, "-p", "8", "-b", "128", "--json"]) == 0
        found[name[0]] = json.loads(capsys.readouterr().out)
    ours, by_hand = ([layer["splits"] for layer in f["shard"].values() if layer["op"] in ("conv", "linear")] for f in found.values())
    assert ours[:5] == by_hand[:5] == [{"batch": 8}] * 5
    assert [list(s.values()) for s in ours[5:]] == [list(s.values()) for s in by_hand[5:]] == [[2, 4], [4, 2], [2, 4]]
    assert found["--model_name=alexnet"]["captured"]["unknown"] == {}
