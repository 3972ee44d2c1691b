"""torch's own data parallelism: where it computes another step than the whole batch's."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from baechi_ext.capture.parts import Parts
from baechi_runtime.models.training_step import TrainingStep, optimizer_spec
from baechi_runtime.sharding.captured import forward_graph
from baechi_runtime.sharding.replicas import another_step
from tests.runtime.sharding.steps import CASES

DRAWS = "each process draws random numbers of its own"
NORMALISES = "BatchNorm normalises each process's part by itself"
NO_MEAN = "the loss is no mean over parts that count alike"


def reasons(module: nn.Module, inputs: Sequence[Tensor]) -> str:
    step = TrainingStep("small", module, tuple(inputs), optimizer_spec("sgd", 0.1), batch=len(inputs[0]))
    state = torch.get_rng_state()
    found = another_step(step, forward_graph(module, inputs).nodes, Parts.of(inputs, [len(inputs[0]) // 2] * 2))
    assert torch.equal(torch.get_rng_state(), state)
    return found


def labelled(left_out: int | None) -> tuple[Tensor, ...]:
    images, labels = torch.randn(8, 4, 9, 9), torch.randint(12, (8,))
    if left_out is not None:
        labels[left_out] = -100
    return images, labels


@pytest.mark.parametrize(
    ("training", "left_out", "reason"),
    [(True, None, NORMALISES), (True, 2, f"{NORMALISES}, {NO_MEAN}"), (False, 2, NO_MEAN), (False, None, "")],
)
def test_batch_norm_and_labels_that_are_left_out_make_another_step(training: bool, left_out: int | None, reason: str) -> None:
    torch.manual_seed(0)
    assert reasons(CASES["classifier"].module().train(training), labelled(left_out)) == reason


class Noisy(nn.Module):
    """Dropout of what a layer computes, before or behind a BatchNorm."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.layer, self.norm, self.share = nn.Linear(4, 4), nn.BatchNorm1d(4), share

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(functional.dropout(self.layer(x), self.share)).square().mean()


@pytest.mark.parametrize(("share", "reason"), [(0.5, f"{DRAWS}, {NORMALISES}"), (0.0, NORMALISES)])
def test_dropout_that_drops_something_makes_another_step(share: float, reason: str) -> None:
    assert reasons(Noisy(share), (torch.randn(8, 4),)) == reason
