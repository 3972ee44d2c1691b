"""Steps over parts of a batch compute what the whole batch does, wherever their ops run."""

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from baechi_ext.errors import ParityError
from baechi_runtime.models.training_step import EagerStep, TrainingStep, optimizer_spec
from baechi_runtime.torch.lowering.devices import cpu_devices
from baechi_runtime.torch.parity import check_parity, parity_of_parts, part_after_part, unplaced_results
from baechi_runtime.torch.threads.executor import ThreadExecutor
from tests.runtime.forked_workers import ForkedWorkers
from tests.torch_steps import SMALL_MODELS, in_parts, make_step, narrow_step, scattered


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize(("name", "per_part"), [("tied", False), ("branches", True)])
def test_parity_of_random_placements(name: str, per_part: bool, count: int) -> None:
    """The same numbers from plan to plan; bit for bit those of the unplaced parts where BatchNorm and dropout are in it."""
    step = make_step(name, "momentum")
    graph, binding = in_parts(step, count, batch_norm_per_part=per_part)
    with ThreadExecutor(cpu_devices(3), timeout_seconds=60) as executor:
        found = [check_parity(executor, scattered(graph, 3, seed), binding, step) for seed in range(4)]
    assert all(parity.passed for parity in found), found
    assert len({parity.max_abs_diff for parity in found}) == 1
    assert found[0].max_rel_diff < (1e-6 if per_part else 1e-5)
    assert not per_part or count > 2 or found[0].max_rel_diff == 0  # more are added up in pairs, which rounds otherwise


@pytest.mark.parametrize(("name", "steps"), [("rnnlm", 8), ("rnnlm", 7), ("gnmt_v2", 16)])
def test_recurrent_layers_of_our_own_go_in_parts(name: str, steps: int) -> None:
    """Examples are told from steps of time where there are as many of these in an input."""
    step = narrow_step(name, replace(SMALL_MODELS[name], max_seq_length=steps), optimizer_spec("momentum", 0.1))
    graph, binding = in_parts(step, 2)
    with ThreadExecutor(cpu_devices(2), timeout_seconds=60) as executor:
        assert check_parity(executor, scattered(graph, 2, 1), binding, step).passed


def test_a_part_that_counts_wrongly_is_found() -> None:
    """The tolerance for parts is no blindness: one example more or less differs by far more."""
    step = make_step("tied")
    graph, binding = in_parts(step, 2)
    node = binding.ops[graph.index["nll_loss_forward.counted@0"]].node
    assert node is not None
    node.args = (node.args[0], int(step.inputs[1][0]))  # as if that label were to be ignored
    with ThreadExecutor(cpu_devices(2), timeout_seconds=60) as executor:
        parity = check_parity(executor, scattered(graph, 2, 1), binding, step)
    assert not parity.passed
    assert parity.max_rel_diff > 0.01


class Padded(nn.Module):
    """The mean over the labels that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layer(x).flatten(0, 1), labels.flatten(), ignore_index=0)


@pytest.mark.parametrize("padding", [(0, 1, 2, 3), (0, 0, 5, 5)])
def test_padding_counts_in_no_part(padding: tuple[int, ...]) -> None:
    """Parts of as many examples have few labels or many, or none."""
    torch.manual_seed(2)
    labels = torch.randint(1, 3, (4, 5))
    for row, length in enumerate(padding):
        labels[row, :length] = 0
    step = TrainingStep("padded", Padded(), (torch.randn(4, 5, 4), labels), optimizer_spec("sgd", 0.1), batch=4)
    graph, binding = in_parts(step, 2)
    with ThreadExecutor(cpu_devices(2), timeout_seconds=60) as executor:
        parity = check_parity(executor, scattered(graph, 2, 1), binding, step)
    assert parity.passed, parity
    assert parity.max_rel_diff < 1e-5


class Keyed(nn.Module):
    """The bias of attention's keys has a gradient that is nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(self.attention(x, x, x, need_weights=False)[:1]).square().mean()


def test_what_an_optimizer_makes_of_rounding_is_no_difference() -> None:
    """Adam divides by a gradient's size, so that rounding makes full steps; compared are steps by the gradients that were seen."""
    torch.manual_seed(1)
    step = TrainingStep("keyed", Keyed(), (3 * torch.randn(4, 5, 8),), optimizer_spec("adam", 0.1), batch=4)
    graph, binding = in_parts(step, 2)
    with ThreadExecutor(cpu_devices(2), timeout_seconds=60) as executor:
        assert check_parity(executor, scattered(graph, 2, 1), binding, step).passed
    saved, device = step.snapshot(), torch.device("cpu")
    expected = unplaced_results(step, device, None)
    step.restore(saved)
    name = "new value of attention.in_proj_bias"
    other_step = {**expected, name: expected[name] + 0.01}
    parity = parity_of_parts(step, device, expected, other_step)
    assert not parity.passed
    step.restore(saved)
    assert parity_of_parts(step, device, expected, expected).max_rel_diff == 0


class Summed(nn.Module):
    """Normalised over the batch, and summed up, not averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layers(x) - 1).square().sum()


def test_a_loss_that_is_no_mean_is_refused_where_parts_are_normalised() -> None:
    step = TrainingStep("summed", Summed(), (torch.randn(4, 4),), optimizer_spec("sgd", 0.1), batch=4)
    graph, binding = in_parts(step, 2, batch_norm_per_part=True)
    with (
        ThreadExecutor(cpu_devices(2), timeout_seconds=60) as executor,
        pytest.raises(ParityError, match="it is no mean over the examples.*--microbatches=1"),
    ):
        check_parity(executor, scattered(graph, 2, 1), binding, step)


def test_the_reference_draws_the_masks_of_the_whole_batch() -> None:
    """Without BatchNorm, part after part is the whole batch, dropout included."""
    step = make_step("branches")
    for module in step.module.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()
    saved, found = step.snapshot(), []
    for parted in (False, True):
        step.restore(saved)
        eager = EagerStep(step, torch.device("cpu"))
        torch.manual_seed(5)
        parts = in_parts(replace(step), 2, batch_norm_per_part=True)[1].parts
        torch.manual_seed(5)
        assert parts is not None
        loss = part_after_part(eager, parts) if parted else eager.run()
        found.append((loss, [p.grad.clone() for p in step.module.parameters() if p.grad is not None]))
    (whole, gradients), (total, sums) = found
    torch.testing.assert_close(total, whole)
    assert len(gradients) == len(sums) > 0
    for expected, actual in zip(gradients, sums, strict=True):
        torch.testing.assert_close(actual, expected)


class DropConnect(nn.Module):
    """Dropout of a weight, which has no batch, and of examples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        dropout = nn.functional.dropout
        return self.norm(dropout(nn.functional.linear(x, dropout(self.layer.weight, 0.4)), 0.2)).square().mean()


def test_every_part_has_the_mask_of_a_weight() -> None:
    torch.manual_seed(0)
    step = TrainingStep("dropped", DropConnect(), (torch.randn(4, 4),), optimizer_spec("sgd", 0.1), batch=4)
    graph, binding = in_parts(step, 2, batch_norm_per_part=True)
    with ThreadExecutor(cpu_devices(2), timeout_seconds=60) as executor:
        parity = check_parity(executor, scattered(graph, 2, 1), binding, step)
    assert parity.passed and parity.max_rel_diff < 1e-5, parity


@pytest.mark.parametrize(("num_devices", "flags"), [pytest.param(2, [], marks=pytest.mark.slow), (3, ["--untagged", "--rendezvous"])])
def test_parity_on_processes(workers: ForkedWorkers, num_devices: int, flags: list[str]) -> None:
    """Parameters, gradients, dropout masks and mere orders go from process to process; with and without tags."""
    found = json.loads(workers.run("models_on_processes", num_devices, "--parts", *flags, "wide_towers", "gpt2", "alexnet"))
    for name, parity in found.items():
        assert {p["passed"] for p in parity.values()} == {True}, name
        assert len({p["max_abs_diff"] for p in parity.values()}) == 1, name
