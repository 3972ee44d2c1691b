"""Counts of captured ops, held against torch's own count of a real step."""

from itertools import chain

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from baechi_ext.capture.torch_counts import with_counts
from baechi_ext.capture.torch_joint import UPDATE, CaptureOptions, capture_joint
from baechi_ext.capture.torch_private import valueless
from baechi_ext.ir import OpGraph
from baechi_runtime.models.registry import ModelOptions
from baechi_runtime.models.registry import make_step as make_model_step
from baechi_runtime.models.training_step import EagerStep, TrainingStep, WithLoss, optimizer_spec
from tests.torch_steps import capture, make_step


def counted(step: TrainingStep) -> OpGraph:
    return with_counts(*capture(step))


@pytest.mark.parametrize("name", ["branches", "tied"])
def test_operations_are_those_of_a_real_step(name: str) -> None:
    step = make_step(name)
    with FlopCounterMode(display=False) as counter:
        EagerStep(step, torch.device("cpu")).run()
    assert sum(op.flop or 0 for op in counted(step).ops) == counter.get_total_flops() > 0


def test_operations_of_a_recurrent_layer_are_its_matrix_products() -> None:
    batch, steps, units = 2, 6, 8
    options = ModelOptions(batch, vocab_size=50, max_seq_length=steps, rnn_units=units, num_layers=1, rnn_chunk=3, rnn_unit_type="lstm")
    graph = counted(make_model_step("rnnlm", options, optimizer_spec("sgd", 0.1)))
    assert not [op for op in graph.ops if op.flop is None]
    forward, backward, weight = (
        sum(op.flop or 0 for op in graph.ops if op.op == f"baechi.{name}") for name in ("lstm", "lstm_backward", "rnn_weight_gradient")
    )
    products = 2 * batch * steps * 4 * units * (2 * units)
    biases = 2 * batch * steps * 4 * units
    assert forward == backward == weight == products + biases


def test_bytes_of_a_layer_by_hand() -> None:
    module = WithLoss(nn.Linear(8, 4, bias=False))
    inputs = (torch.ones(2, 8), torch.zeros(2, dtype=torch.int64))
    graph = with_counts(*capture_joint(module, inputs, CaptureOptions("adam", 2)))
    x, w, y = 2 * 8 * 4, 8 * 4 * 4, 2 * 4 * 4
    products = [op for op in graph.ops if op.op == "aten.mm"]
    assert [(op.flop, op.moved_bytes) for op in products] == [(2 * 2 * 8 * 4, x + w + y), (2 * 2 * 8 * 4, x + y + w)]
    update = next(op for op in graph.ops if op.phase == UPDATE)
    assert (update.flop, update.moved_bytes) == (0, w + w + w + 2 * 2 * w)  # gradient and weight in, weight out, two slots in and out
    assert [op.moved_bytes for op in graph.ops if op.op == "input"] == [0] * sum(op.op == "input" for op in graph.ops)


def test_a_look_up_moves_the_rows_that_it_takes() -> None:
    graph = counted(make_step("tied"))
    found = next(op for op in graph.ops if op.op == "aten.embedding")
    assert found.moved_bytes < 2 * found.output_bytes + 1000
    assert found.moved_bytes > 2 * found.output_bytes


def test_an_op_of_somebody_elses_without_a_formula_is_not_known() -> None:
    @torch.library.custom_op("baechi_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, grad: 2 * grad)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return twice(self.layer(x)).sum()

    graph = with_counts(*capture_joint(Twice(), (torch.ones(2, 4),), CaptureOptions()))
    assert [(op.op, op.moved_bytes) for op in graph.ops if op.flop is None] == [("baechi_tests.twice", 2 * 2 * 4 * 4)]


def test_a_step_without_values_has_the_same_graph_and_no_memory() -> None:
    def captured() -> tuple[OpGraph, TrainingStep]:
        step = make_step("branches", "adam")
        return counted(step), step

    graph, _ = captured()
    with valueless():
        same, step = captured()
    assert same == graph
    tensors = chain(step.module.parameters(), step.module.buffers(), step.inputs)
    assert all(t.untyped_storage().device.type == "meta" for t in tensors)
