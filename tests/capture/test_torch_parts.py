"""A step captured over parts of its batch: what its graph holds, and what is refused."""

import pytest
import torch
from torch import Tensor, nn

from baechi_ext.capture.parts import Parts, shared_sizes
from baechi_ext.capture.torch_joint import ORDER, CaptureOptions, capture_joint
from baechi_ext.capture.torch_parts import PARAMETER, capture_parts
from baechi_ext.errors import CaptureError
from baechi_runtime.models.training_step import TrainingStep, WithLoss, optimizer_spec
from tests.torch_steps import capture, in_parts, make_step


def test_parts_are_as_equal_as_can_be() -> None:
    assert shared_sizes(8, [1, 1, 1]) == (3, 3, 2)
    assert shared_sizes(4, [1, 0.5]) == (3, 1)
    assert shared_sizes(2, [1, 1, 1]) == (1, 1)
    assert shared_sizes(7, [0.5, 2, 1]) == (1, 4, 2)
    inputs = (torch.zeros(5, 8), torch.zeros(8, 8), torch.zeros(8), torch.zeros(3, 9))
    parts = Parts.of(inputs, (3, 3, 2), 1)
    assert parts.dims == (1, 1, None, None)
    assert [parts.rows(0, k) for k in range(3)] == [(1, 0, 3), (1, 3, 3), (1, 6, 2)]
    shapes = [[tuple(value.shape) for value in parts.inputs_of(inputs, k)] for k in (0, 2)]
    assert shapes == [[(5, 3), (8, 3), (8,), (3, 9)], [(5, 2), (8, 2), (8,), (3, 9)]]
    assert sum(parts.weights) == 1
    with pytest.raises(CaptureError, match="no input has the batch's 5 examples along dimension 1.*--microbatches=1"):
        Parts.of(inputs, (3, 2), 1)


def test_every_part_has_its_ops_and_parameters_are_shared() -> None:
    step = make_step("tied", "adam")
    whole, _ = capture(step)
    graph, binding = in_parts(step, 3)
    kinds = [sorted(op.op for op in whole.ops if op.op.startswith("aten.") and op.phase == phase) for phase in ("forward", "backward")]
    for part in range(3):
        own = [op for op in graph.ops if op.part == part]
        assert all(op.id == f"{op.name}@{part}" for op in own)
        for phase, expected in zip(("forward", "backward"), kinds, strict=True):
            made = [op.op for op in own if op.phase == phase]
            assert [kind for kind in expected if kind not in made] == []
    sources = {op.id: op for op in graph.ops if op.op == PARAMETER}
    assert sources.keys() == {f"{PARAMETER}.{name}" for name in step.state()}
    assert all(op.resident for op in sources.values())
    assert sum(op.persistent_bytes for op in graph.ops) == sum(op.persistent_bytes for op in whole.ops)
    assert {op.id for op in graph.ops if op.phase == "update"} == {op.id for op in whole.ops if op.phase == "update"}
    assert binding.parts is not None
    assert not binding.state_nodes


def test_a_parameter_shares_its_device_with_its_update_alone() -> None:
    graph, _ = in_parts(make_step("tied"), 2)
    members = [{graph.ops[v].id for v in group} for group in graph.groups.values()]
    assert {"parameter.model.mix.weight", "update.model.mix.weight"} in members


def test_an_update_waits_for_all_that_read_the_parameter() -> None:
    """The update changes the parameter in place: every reader is before it, by tensors or by an order."""
    graph, _ = in_parts(make_step("branches"), 2, batch_norm_per_part=True)
    before: list[set[int]] = [set() for _ in graph.ops]
    for v in graph.order:
        for u in graph.predecessors[v]:
            before[v] |= before[u] | {u}
    for op in graph.ops:
        if op.phase == "update":
            name = op.id.removeprefix("update.")
            source = graph.index[f"{PARAMETER}.{name}"]
            assert set(graph.successors[source]) - {graph.index[op.id]} <= before[graph.index[op.id]], name
    assert any(tensor.name == ORDER for tensor in graph.tensors)


def test_dropout_is_drawn_for_the_whole_batch() -> None:
    graph, binding = in_parts(make_step("branches"), 2, batch_norm_per_part=True)
    drawn = [graph.ops[v] for v in binding.seeded_ops]
    assert [op.op for op in drawn] == ["dropout_masks", "dropout_masks"]
    for v in binding.seeded_ops:
        masks = [graph.tensors[t] for t in graph.outputs[v] if graph.tensors[t].name != ORDER]
        assert [{graph.ops[w].part for w in mask.readers} for mask in masks] == [{0}, {1}]
    assert len({op.colocation for op in drawn}) == 1


def test_batch_norm_keeps_the_batch_whole_unless_the_user_allows_it() -> None:
    with pytest.raises(CaptureError, match="2 BatchNorm layers normalise over the whole batch.*--batch_norm=per_part.*--microbatches=1"):
        in_parts(make_step("branches"), 2)


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + torch.randn_like(x))


def test_random_numbers_of_another_kind_are_refused() -> None:
    inputs = (torch.randn(6, 4), torch.randint(3, (6,)))
    step = TrainingStep("drawing", WithLoss(Drawing()), inputs, optimizer_spec("sgd", 0.1), batch=6)
    with pytest.raises(CaptureError, match="randn_like.* draws random numbers for the whole batch.*--microbatches=1"):
        in_parts(step, 2)


class Turned(nn.Module):
    """Dropout of a tensor in which examples stand along no dimension of their own."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.dropout(x.flatten() @ x.flatten()[:, None] * torch.ones(x.shape[0], x.shape[0]), 0.5).sum() * labels.sum()


def test_dropout_that_does_not_split_by_examples_is_of_the_whole_batch() -> None:
    inputs = (torch.randn(4, 2, requires_grad=True), torch.ones(4))
    _, binding = capture_joint(Turned(), inputs, CaptureOptions())
    graph, _ = capture_parts(Turned(), binding, CaptureOptions(), Parts.of(inputs, (2, 2)))
    assert [op.part for op in graph.ops if op.op == "aten.native_dropout"] == [None]
