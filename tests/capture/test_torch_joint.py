"""The captured graph says of a real step what is true of it."""

import networkx as nx
import pytest
import torch
from torch import Tensor, nn

from baechi_ext.capture.torch_joint import CaptureOptions, capture_joint, export
from baechi_ext.capture.torch_private import moved_to
from baechi_ext.errors import CaptureError
from baechi_runtime.models.training_step import WithLoss
from tests.torch_steps import SMALL_MODELS, Branches, capture, make_step, narrow_step


def named(graph, fragment: str) -> list:
    return [op for op in graph.ops if fragment in op.op]


def test_phases_and_kinds_of_ops() -> None:
    graph, _ = capture(make_step("branches"))
    assert {op.phase for op in named(graph, "aten.convolution") if op.op == "aten.convolution"} == {"forward"}
    assert {op.phase for op in named(graph, "convolution_backward")} == {"backward"}
    updates = [op for op in graph.ops if op.phase == "update"]
    assert {op.id for op in updates} == {f"update.{n}" for n, _ in WithLoss(Branches()).named_parameters()}
    assert {op.op for op in updates} == {"optimizer.sgd"}
    assert not [op for op in graph.ops if op.op in ("aten.view", "aten.t", "aten.detach", "aten.expand")]


def test_persistent_bytes_are_parameters_buffers_and_optimizer_state() -> None:
    step = make_step("branches", "adam")
    graph, _ = capture(step)
    parameters = sum(p.numel() * p.element_size() for p in step.module.parameters())
    buffers = sum(b.numel() * b.element_size() for b in step.module.buffers())
    assert sum(op.persistent_bytes for op in graph.ops) == 3 * parameters + buffers
    assert sum(op.persistent_bytes for op in graph.ops if op.phase == "update") == 2 * parameters


def test_tensor_bytes_are_storage_bytes() -> None:
    graph, _ = capture(make_step("branches"))
    conv = next(v for v, op in enumerate(graph.ops) if op.op == "aten.convolution")
    assert [graph.tensors[t].bytes for t in graph.outputs[conv] if graph.tensors[t].bytes] == [4 * 4 * 6 * 6 * 4]
    source = graph.index["input_0"]
    assert [graph.tensors[t].bytes for t in graph.outputs[source]] == [4 * 3 * 8 * 8 * 4]
    assert graph.ops[source].compute_us == 0


def test_a_parameter_binds_its_readers_gradient_and_update() -> None:
    graph, binding = capture(make_step("branches"))
    weight, bias = (graph.ops[graph.index[f"update.model.left.0.{name}"]] for name in ("weight", "bias"))
    assert weight.colocation == bias.colocation == "model.left.0.bias"
    kinds = {graph.ops[v].op for v in graph.groups["model.left.0.bias"]}
    assert kinds == {"aten.convolution", "aten.convolution_backward", "optimizer.sgd"}
    norm = graph.groups[graph.ops[graph.index["update.model.left.1.weight"]].colocation]
    assert {"aten._native_batch_norm_legit_functional", "aten.native_batch_norm_backward"} <= {graph.ops[v].op for v in norm}
    writes = {name for pairs in binding.buffer_writes.values() for name, _ in pairs}
    assert writes == {name for name, _ in make_step("branches").module.named_buffers()}


def test_tied_weights_are_one_parameter_with_two_gradients() -> None:
    step = make_step("tied", "momentum")
    graph, binding = capture(step)
    update = graph.index["update.model.embedding.weight"]
    assert "update.model.out.weight" not in graph.index
    assert sorted(binding.ops[update].parameters) == ["model.embedding.weight", "model.out.weight"]
    gradients = [graph.tensors[t] for t in graph.inputs[update] if graph.tensors[t].bytes]
    assert {graph.ops[t.producer].op for t in gradients} == {"aten.embedding_dense_backward", "aten.mm"}
    members = {graph.ops[v].op for v in graph.groups[graph.ops[update].colocation]}
    assert {"aten.embedding", "aten.embedding_dense_backward", "aten.mm"} <= members
    assert sum(op.persistent_bytes for op in graph.ops) == 2 * sum(p.numel() * 4 for p in step.module.parameters())


def test_an_update_waits_for_every_reader_of_its_parameter() -> None:
    graph, binding = capture(make_step("tied"))
    order = nx.DiGraph((p, w) for w in range(len(graph)) for p in graph.predecessors[w])
    for v, bound in enumerate(binding.ops):
        for parameter in bound.parameters[:1]:
            group = graph.groups[graph.ops[v].colocation]
            readers = {r for r in group if r != v and binding.ops[r].node is not None}
            mine = {r for r in readers if parameter in {binding.state_nodes.get(n) for n in _bases(binding.ops[r].node)}}
            assert mine
            assert mine <= nx.ancestors(order, v)


def _bases(node) -> set:
    """The nodes whose storage `node` reads, through views."""
    found, queue = set(), list(node.all_input_nodes)
    while queue:
        read = queue.pop()
        found.add(read)
        if read.op == "call_function" and "aten.t." in str(read.target):
            queue.extend(read.all_input_nodes)
    return found


def test_backward_ops_know_their_forward_op() -> None:
    graph, _ = capture(make_step("branches"))
    backward = next(op for op in graph.ops if op.op == "aten.convolution_backward")
    forward = graph.ops[graph.index[backward.forward_op]]
    assert forward.op == "aten.convolution"
    assert forward.colocation == backward.colocation


def test_colocate_grads_with_ops() -> None:
    free, _ = capture(make_step("branches"))
    bound, _ = capture(make_step("branches"), colocate_grads_with_ops=True)
    relu = next(op for op in free.ops if op.op == "aten.threshold_backward")
    assert relu.colocation is None
    for op in bound.ops:
        if op.phase == "backward" and op.forward_op is not None:
            assert op.colocation == bound.ops[bound.index[op.forward_op]].colocation is not None


def test_seeded_ops_share_a_device_and_keep_their_order() -> None:
    graph, binding = capture(make_step("branches"))
    first, second = binding.seeded_ops
    assert graph.ops[first].colocation == graph.ops[second].colocation is not None
    assert first in graph.predecessors[second]
    relaxed, binding = capture(make_step("branches"), relaxed_random=True)
    first, second = binding.seeded_ops
    assert relaxed.ops[first].colocation is None
    assert first not in relaxed.predecessors[second]


def test_capture_is_deterministic_and_leaves_the_module_alone() -> None:
    step = make_step("branches")
    before, rng = step.snapshot(), torch.get_rng_state()
    first, _ = capture(step)
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in step.state().items())
    assert all(p.grad is None for p in step.module.parameters())
    again, _ = capture(make_step("branches"))
    assert first.fingerprint == again.fingerprint
    assert first.to_json() == again.to_json()


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y if y.sum().item() > 0 else -y


class Attending(nn.Module):
    """Dropout before and after an attention that drops nothing."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.linear(x)).unsqueeze(1)
        return self.dropout(nn.functional.scaled_dot_product_attention(y, y, y)).sum()


@pytest.mark.parametrize(("dropout", "count"), [(0.5, 2), (0.0, 0)])
def test_only_ops_that_draw_numbers_share_a_device(dropout: float, count: int) -> None:
    """Attention that drops nothing draws nothing, though torch calls it seeded."""
    graph, binding = capture_joint(Attending(dropout), (torch.ones(2, 3, 4),), CaptureOptions())
    assert len(binding.seeded_ops) == count
    assert [graph.ops[v].op for v in binding.seeded_ops] == ["aten.native_dropout"] * count
    assert len(named(graph, "scaled_dot_product")) == 2


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y.sum(), y.mean()


class ParameterAsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight


@pytest.mark.parametrize(
    ("module", "inputs", "message"),
    [
        (WithLoss(Branching()), (torch.ones(4, 3), torch.zeros(4, dtype=torch.long)), r"cannot be captured as one graph.*\.item\(\)"),
        (TwoOutputs(), (torch.ones(4, 3),), "returns 2 tensors instead of one scalar loss"),
        (ParameterAsLoss(), (torch.ones(4, 3),), "the loss is not a computed tensor"),
    ],
)
def test_what_cannot_be_captured_says_why(module: nn.Module, inputs: tuple[Tensor, ...], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture_joint(module, inputs, CaptureOptions())


class Hinted(nn.Module):
    """Two linear layers, a tied embedding, and opinions on where some of them go."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.low, self.high = nn.Linear(8, 8), nn.Linear(8, 8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.high(torch.relu(self.low(self.embedding(tokens))))))

    def expert_device(self, parameter: str) -> int | None:
        return {"low": 1, "high": 2}.get(parameter.partition(".")[0])


def test_expert_hints_come_from_the_module_and_spread() -> None:
    inputs = torch.randint(11, (6,)), torch.randint(11, (6,))
    graph, _ = capture_joint(WithLoss(Hinted()), inputs, CaptureOptions())
    expert = {op.id: op.expert for op in graph.ops}
    assert {expert[graph.ops[v].id] for v in graph.groups["model.low.bias"]} == {1}
    assert {expert[graph.ops[v].id] for v in graph.groups["model.high.bias"]} == {2}
    assert [expert[op.id] for op in named(graph, "aten.relu")] == [1]
    assert [expert[op.id] for op in named(graph, "threshold_backward")] == [1]
    assert [expert[op.id] for op in named(graph, "aten.tanh")] == [2, 2]
    # The tied weight has no hint of its own: its first reader is the embedding, which no op comes before.
    assert {expert[graph.ops[v].id] for v in graph.groups["model.embedding.weight"]} == {2}
    assert None not in expert.values()


def test_a_model_without_hints_gets_none() -> None:
    graph, _ = capture(make_step("branches"))
    assert {op.expert for op in graph.ops} == {None}


@pytest.mark.parametrize("name", ["branches", "tied"])
def test_a_copy_without_values_is_traced_as_the_step_itself(name: str) -> None:
    step = make_step(name)
    before = step.snapshot()
    module, inputs = moved_to(step.module, step.inputs, "cpu")
    assert all(type(value).__name__ == "FakeTensor" for value in (*module.parameters(), *module.buffers(), *inputs))
    traced = [[(n.name, n.target) for n in export(*of).graph.nodes] for of in ((step.module, step.inputs), (module, inputs))]
    assert traced[0] == traced[1]
    assert all(torch.equal(value, before[name]) for name, value in step.state().items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["transformer", "gpt2"])
def test_a_step_for_a_gpu_has_no_op_of_the_host(name: str) -> None:
    step = narrow_step(name, SMALL_MODELS[name], make_step("tied").optimizer)
    graph, _ = capture_joint(step.module, step.inputs, CaptureOptions(device="cuda"), name)
    assert not [op.id for op in graph.ops if "cpu" in op.op or "mkldnn" in op.op]
