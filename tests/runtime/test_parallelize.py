"""A module placed in the caller's own loop computes, gradient by gradient, what the module computes."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import baechi_ext
from tests.torch_steps import Branches, Tied

QUICK = {"devices": 2, "method": "random"}
"""Placed anywhere, without a search."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums are added up in one order everywhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def place(model: nn.Module, *args: object, **options: object) -> nn.Module:
    return baechi_ext.parallelize(model, *args, **{**QUICK, **options})


def batch(name: str, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if name == "branches":
        return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(5, (4,), generator=generator)
    return torch.randint(11, (6, 4), generator=generator), torch.randint(11, (6,), generator=generator)


def a_users_loop(model: nn.Module, name: str, steps: int = 6) -> tuple[list[float], dict[str, Tensor]]:
    """AdamW, a scheduler, gradients of two batches added up and clipped, evaluation in between."""
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = []
    for i in range(steps):
        x, y = batch(name, i)
        loss = cross_entropy(model(x), y)
        (loss / 2).backward()
        if i % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            model.eval()
            with torch.no_grad():
                losses.append(cross_entropy(model(x), y).item())
            model.train()
        losses.append(loss.item())
    return losses, {k: v.clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize(("name", "make"), [("branches", Branches), ("tied", Tied)])
def test_training_is_bitwise_the_same(name: str, make: Callable[[], nn.Module], devices: int) -> None:
    torch.manual_seed(1)
    model = make()
    placed = place(copy.deepcopy(model), devices=devices)
    losses, state = a_users_loop(model, name)
    placed_losses, placed_state = a_users_loop(placed, name)
    assert placed_losses == losses
    assert list(placed_state) == list(state)
    assert all(torch.equal(state[k], placed_state[k]) for k in state)
    report = placed.report()
    assert (report.verified_steps, report.placed_steps, report.max_rel_diff, report.refusal) == (2, 6, 0.0, "")
    assert len(report.devices) == devices
    assert report.measured_us > 0
    assert placed.plan.method == "random"
