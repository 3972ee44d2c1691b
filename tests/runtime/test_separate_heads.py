"""Outputs of one placed call that have backward passes of their own, as the actor and the critic of one module do."""

import copy
import re

import pytest
import torch
from torch import Tensor, nn

from tests.runtime.placed_modules import place, report

pytestmark = pytest.mark.usefixtures("one_thread")


class ActorCritic(nn.Module):
    """Two heads with nothing in common but the input."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = (nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, n)) for n in (4, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(x), self.critic(x)


def trained(model: ActorCritic, steps: int = 6, every: int = 1) -> list[Tensor]:
    """The weights after so many steps, of the critic in each `every`th; the actor's optimizer steps before the critic's backward pass."""
    torch.manual_seed(1)
    optimizers = [torch.optim.SGD(head.parameters(), 0.1) for head in (model.actor, model.critic)]
    for step in range(steps):
        action, value = model(torch.randn(5, 6))
        for loss, optimizer in zip((action.logsumexp(1).mean(), (value - 1).square().mean()), optimizers, strict=True):
            if optimizer is optimizers[0] or step % every == 0:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return list(model.parameters())


@pytest.mark.parametrize("every", [1, 3])
def test_each_head_has_a_backward_pass_of_its_own(every: int) -> None:
    torch.manual_seed(0)
    model = ActorCritic()
    expected = trained(copy.deepcopy(model), every=every)
    placed = place(model)
    assert all(map(torch.equal, trained(placed, every=every), expected))
    assert report(placed).placed_steps == 5


def test_what_a_pass_went_through_has_no_second_one() -> None:
    placed = place(ActorCritic(), verify_steps=0)
    for _ in range(3):
        action, value = placed(torch.randn(5, 6))
        action.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        action.sum().backward()
    value.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        value.sum().backward()


def test_what_a_second_pass_reads_may_not_be_changed_before() -> None:
    placed = place(ActorCritic(), verify_steps=0)
    for _ in range(3):
        action, value = placed(torch.randn(5, 6))
        action.sum().backward()
    with torch.no_grad():
        placed.critic[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match=re.escape("argument critic.2.weight of a placed call was changed")):
        value.sum().backward()


class Trunk(nn.Module):
    """Two heads on one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(6, 12), nn.Linear(12, 4), nn.Linear(12, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        body = self.body(x).tanh()
        return self.left(body), self.right(body)


@pytest.mark.parametrize("is_placed", [False, True])
def test_heads_on_one_body_have_one_pass_unless_it_is_retained(*, is_placed: bool) -> None:
    model = place(Trunk(), verify_steps=0) if is_placed else Trunk()
    for _ in range(3):
        left, right = model(torch.randn(5, 6))
        left.sum().backward(retain_graph=True)
        right.sum().backward()
    left, right = model(torch.randn(5, 6))
    left.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        right.sum().backward()


class Logged(nn.Module):
    """Returns its loss's input, and a norm that has no derivative at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(6, 8, bias=False), nn.Linear(6, 8, bias=False), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(torch.cat([self.left(x), self.right(x)], 1))
        return self.head(h), h.square().sum(1).sqrt()


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_nothing_runs_back_from_an_output_that_the_loss_leaves_out(parts: int, seed: int) -> None:
    """Zeros times an infinite derivative are no zeros."""

    def train(model: nn.Module) -> list[Tensor]:
        optimizer, data = torch.optim.SGD(model.parameters(), 0.1), torch.Generator().manual_seed(1)
        for step in range(6):
            x = torch.randn(4, 6, generator=data)
            x[0] = 0.0 if step == 4 else x[0]
            values, norms = model(x)
            loss = values.logsumexp(1).mean()
            (loss if step % 2 == 0 else loss + norms.mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters())

    torch.manual_seed(0)
    model = Logged()
    expected = train(copy.deepcopy(model))
    placed = place(model, microbatches=parts, seed=seed, verify_steps=0)
    assert all(torch.isfinite(p).all() for p in expected)
    for found, parameter in zip(train(placed), expected, strict=True):
        torch.testing.assert_close(found, parameter)
    assert report(placed).placed_steps == 5


class Siamese(nn.Module):
    """One net that two inputs go through one after the other: outputs that share weights, and no values."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(a), self.net(b)


def test_outputs_that_share_weights_alone_have_a_backward_pass_each() -> None:
    torch.manual_seed(0)
    model = Siamese()

    def trained_apart(module: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        for _ in range(6):
            optimizer.zero_grad()
            for output in module(torch.randn(5, 6), torch.randn(5, 6)):
                output.square().mean().backward()
            optimizer.step()
        return list(module.parameters())

    expected = trained_apart(copy.deepcopy(model))
    placed = place(model)
    torch.testing.assert_close(trained_apart(placed), expected)
    assert report(placed).placed_steps == 5
    first, second = placed(torch.randn(5, 6), torch.randn(5, 6))
    first.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        first.sum().backward()
    second.sum().backward()
