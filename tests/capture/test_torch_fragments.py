"""The operator graph of a module's call that TorchDynamo cut into fragments says of it what is true."""

from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor, fx, nn

from baechi_ext.capture.torch_dynamo import traced
from baechi_ext.capture.torch_fragments import OUTPUTS, TANGENTS, CapturedCall, Fragment, capture_fragments
from baechi_ext.capture.torch_joint import CaptureOptions
from baechi_ext.errors import CaptureError
from baechi_runtime.torch.calls.capturing import argument_names

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
"""TorchDynamo reads it of what one fragment hands to the next one."""


class Noted:
    """A fragment of a call, and what it was given and returned."""

    def __init__(self, graph: fx.GraphModule, log: list) -> None:
        self.graph, self.log = graph, log

    def __call__(self, *args: Any) -> Any:
        values = self.graph(*args)
        self.log.append((self.graph, args, values))
        return values


def fragments_of(module: nn.Module, *inputs: Tensor) -> list[Fragment]:
    torch.compiler.reset()
    log: list = []
    traced(module, lambda graph, _: Noted(graph, log))(*inputs)
    made: dict[int, tuple[int, int]] = {}
    found = []
    for number, (graph, args, values) in enumerate(log):
        links = {i: made[id(a)] for i, a in enumerate(args) if id(a) in made}
        given = tuple(a if a.is_leaf else a.detach().requires_grad_(a.requires_grad) for a in args)
        found.append(Fragment(graph, given, argument_names(graph, args, module), links))
        made |= {id(v): (number, i) for i, v in enumerate(values)}
    return found


def captured(module: nn.Module, *inputs: Tensor, slots: int = 0) -> CapturedCall:
    return capture_fragments(fragments_of(module, *inputs), CaptureOptions("sgd", slots), "model")


class Two(nn.Module):
    """Python looks at a value in the middle. `shared` and the mean's buffer are used on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.shared(torch.tanh(self.first(x)))
        if y.sum() > 1e9:
            return y
        return self.last(self.shared(torch.relu(y)))


def order_of(call: CapturedCall) -> nx.DiGraph:
    graph = call.graph
    found = nx.DiGraph((p, w) for w in range(len(graph)) for p in graph.predecessors[w])
    found.add_nodes_from(range(len(graph)))
    return found


def test_ops_belong_to_the_passes_of_their_fragments() -> None:
    call = captured(Two(), torch.randn(5, 6))
    assert len(call.fragments) == 2
    phases = call.phases
    assert sorted(v for ops in phases for v in ops) == list(range(len(call.graph)))
    for k, ops in enumerate(phases):
        assert {call.graph.ops[v].phase for v in ops} == {"backward" if k % 2 else "forward"}
    for k, part in enumerate(call.fragments):
        assert all(call.graph.ops[v].id.startswith(f"{k}.") for v in part.forward_ops if call.graph.ops[v].op != "input")
        assert [call.graph.ops[v].op for v in part.forward_ops].count(OUTPUTS) == 1
        assert [call.graph.ops[v].op for v in part.backward_ops].count(TANGENTS) == 1
        assert part.trains
        assert part.draws_on is None


def test_passes_run_in_the_order_in_which_autograd_runs_them() -> None:
    """All of the first forward before all of the second that is behind Python; backward the other way round, behind all forwards."""
    call = captured(Two(), torch.randn(5, 6))
    index, order = call.graph.index, order_of(call)
    first, second = index[f"0.{OUTPUTS}"], index[f"1.{OUTPUTS}"]
    back_of_first, back_of_second = index[f"0.{TANGENTS}"], index[f"1.{TANGENTS}"]
    assert nx.has_path(order, first, second)
    assert nx.has_path(order, second, back_of_second)
    assert nx.has_path(order, back_of_second, back_of_first)
    one, two = call.fragments
    assert all(first in nx.ancestors(order, v) for v in two.forward_ops)
    assert all(second in nx.ancestors(order, v) for v in (one.backward_ops | two.backward_ops))
    assert all(back_of_first in nx.ancestors(order, v) for v in one.backward_ops - {back_of_first})


def test_what_a_fragment_hands_to_the_next_is_an_edge_with_its_bytes() -> None:
    call = captured(Two(), torch.randn(5, 6))
    one, two = call.fragments
    graph = call.graph
    crossing = {
        (graph.ops[graph.tensors[t].producer].op, graph.tensors[t].bytes)
        for v in two.forward_ops
        for t in graph.inputs[v]
        if graph.tensors[t].producer in one.forward_ops and graph.tensors[t].bytes
    }
    assert crossing == {("aten.addmm", 5 * 8 * 4)}
    alone = capture_fragments(
        [Fragment(f.module, f.args, f.names) for f in fragments_of(Two(), torch.randn(5, 6))], CaptureOptions("sgd", 0), "model"
    )
    assert not [
        t for v in alone.fragments[1].forward_ops for t in alone.graph.inputs[v]
        if alone.graph.tensors[t].bytes and alone.graph.tensors[t].producer in alone.fragments[0].forward_ops
    ]  # fmt: skip


@pytest.mark.parametrize("slots", [0, 2])
def test_parameters_that_fragments_share_are_counted_once_and_are_in_one_place(slots: int) -> None:
    model = Two()
    call = captured(model, torch.randn(5, 6), slots=slots)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert sum(op.persistent_bytes for op in call.graph.ops) == (2 + slots) * parameters  # itself, its gradient, what the optimizer keeps
    gradients = [op for op in call.graph.ops if op.id.endswith("gradient.shared.weight")]
    assert len(gradients) == 2
    assert len({op.colocation for op in gradients}) == 1
    members = {call.graph.ops[v].id for v in call.graph.groups[gradients[0].colocation]}
    assert {i.split(".")[0] for i in members} == {"0", "1"}
    assert {op.module for op in gradients} == {"shared"}


def test_ops_know_their_modules_and_arguments_their_names() -> None:
    call = captured(Two(), torch.randn(5, 6))
    one, two = call.fragments
    assert set(one.state.values()) == {"first.weight", "first.bias", "shared.weight", "shared.bias"}
    assert set(two.state.values()) == {"last.weight", "last.bias", "shared.weight", "shared.bias"}
    modules = [(call.graph.ops[v].module, v in one.forward_ops) for v in range(len(call.graph)) if call.graph.ops[v].op == "aten.addmm"]
    assert sorted(modules) == [("first", True), ("last", False), ("shared", False), ("shared", True)]
    assert set(call.graph.modules) >= {"first", "shared", "last"}


class Returns(nn.Module):
    def __init__(self, shape: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.layer, self.shape = nn.Linear(6, 8), shape

    def forward(self, x: Tensor) -> object:
        return self.shape(self.layer(x), x)


RETURNED = {
    "views": lambda y, x: (y, y.view(-1), y[:, 2:]),
    "views_alone": lambda y, x: (y[:, :3], y[:, 3:]),
    "twice": lambda y, x: (y, y),
    "argument": lambda y, x: (y, x),
    "argument_views": lambda y, x: (y, x.view(-1), x[1:]),
    "detached": lambda y, x: (y, y.detach(), y.detach()[1:]),
    "transposed": lambda y, x: (y.t(), y),
}


@pytest.mark.parametrize("shape", RETURNED)
def test_what_is_returned_shares_memory_as_in_the_module(shape: str) -> None:
    """Each memory is computed once, and the values are made of that as the fragment's graph makes them."""
    torch.manual_seed(0)
    x = torch.randn(5, 6)
    (fragment,) = fragments_of(Returns(RETURNED[shape]), x)
    call = capture_fragments([fragment], CaptureOptions("sgd", 0), "model")
    (part,) = call.fragments
    expected = fragment.module(*fragment.args)
    outputs: list[Tensor | None] = [None] * len(part.differentiable)
    for value, returned in zip(expected, part.returned, strict=True):
        if returned.output is not None and outputs[returned.output] is None:
            base = value if value._base is None else value._base
            outputs[returned.output] = base
    found = [r.of(outputs, fragment.args) for r in part.returned]
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)
        assert (a.shape, a.stride(), a.storage_offset(), a.requires_grad) == (b.shape, b.stride(), b.storage_offset(), b.requires_grad)
    memory = [[v.untyped_storage().data_ptr() for v in values] for values in (expected, found)]
    assert [[m.index(p) for p in m] for m in memory][0] == [[m.index(p) for p in m] for m in memory][1]
    computed = {r.output for r in part.returned if r.output is not None}
    assert len(computed) == len(part.differentiable)
    arguments = {a.untyped_storage().data_ptr() for a in fragment.args}
    assert len(computed) == len({p for p in memory[0] if p not in arguments})


def test_gradients_come_from_the_outputs_that_reach_them() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.left, self.right = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(self.body(x))
            return self.left(h), self.right(h)

    (part,) = captured(Heads(), torch.randn(5, 6)).fragments
    reached = {part.state[i]: outputs for i, outputs in part.reached_by.items()}
    assert reached["body.weight"] == {0, 1}
    assert reached["left.bias"] == {0}
    assert reached["right.weight"] == {1}
    assert part.differentiable == (True, True)
    assert part.made_from == {0: frozenset(), 1: frozenset()}


def test_outputs_are_made_from_others() -> None:
    (part,) = captured(Returns(lambda y, x: ((z := y.exp()), y, z.sum(), y.detach())), torch.randn(5, 6)).fragments
    exp, y, total, _ = (r.output for r in part.returned)
    assert list(part.made_from.items()) == [(y, frozenset()), (exp, {y}), (total, {exp})]
    (part,) = captured(Returns(lambda y, x: (y.exp(), y, y.view(-1))), torch.randn(5, 6)).fragments
    assert part.returned[1].output == part.returned[2].output


@pytest.mark.parametrize(
    "shape",
    [
        lambda y, x: (y, (seen := y.view(-1)), seen.exp()),
        lambda y, x: (y, (seen := y.view(-1)).exp(), seen.contiguous()),  # that is `seen` itself
        lambda y, x: (y, (parts := y.chunk(2, 1))[0].exp(), parts[0]),
    ],
)
def test_a_view_that_is_or_may_be_computed_with_is_refused(shape: Callable[[Tensor, Tensor], object]) -> None:
    with pytest.raises(CaptureError, match="a view of what it also computes with"):
        captured(Returns(shape), torch.randn(5, 6))


def test_buffers_that_are_written_are_known() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(self.norm(self.layer(x)))

    model = Normed()
    before = {n: b.clone() for n, b in model.named_buffers()}
    fragments = fragments_of(model, torch.randn(5, 6))
    after, random = {n: b.clone() for n, b in model.named_buffers()}, torch.get_rng_state()
    assert not torch.equal(before["norm.running_mean"], after["norm.running_mean"])  # the call itself
    (part,) = capture_fragments(fragments, CaptureOptions("sgd", 0), "model").fragments
    assert {part.state[i] for i in part.written} == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert part.draws_on == torch.device("cpu")
    assert all(torch.equal(b, after[n]) for n, b in model.named_buffers())  # capturing changes nothing
    assert torch.equal(random, torch.get_rng_state())


def test_a_buffer_that_two_fragments_change_is_refused() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            self.seen.add_(1)
            if y.sum() > 1e9:
                return y
            self.seen.add_(1)
            return self.layer(y)

    with pytest.raises(CaptureError, match="buffer 'seen' is changed by two fragments of one call"):
        captured(Counts(), torch.randn(5, 6))


def test_a_fragment_that_is_trained_by_nothing_has_no_backward_pass() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            if (x * 2).sum() > 1e9:
                return x
            return self.layer(x)

    call = captured(Looks(), torch.randn(5, 6))
    assert [part.trains for part in call.fragments] == [False, True]
    assert call.fragments[0].backward_ops == frozenset()
    assert call.fragments[1].backward_ops
