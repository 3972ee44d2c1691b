"""Calls that do more than compute, or compute it under other settings than the call around them: placed, they do it as unplaced."""

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

from tests.runtime.placed_modules import place, report

pytestmark = pytest.mark.usefixtures("one_thread")
LOGGED: list[float] = []


@torch.library.custom_op("baechi_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


@noisy.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


noisy.register_autograd(lambda _, g: g)


@torch.library.custom_op("baechi_tests::logged", mutates_args=())
def logged(x: Tensor) -> None:
    LOGGED.append(float(x.mean()))


@logged.register_fake
def _(x: Tensor) -> None:
    return None


class NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, g: Tensor) -> Tensor:
        return g + 0.1 * torch.randn_like(g)


class Layers(nn.Module):
    """Two layers with `between` between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(6, 8), nn.Linear(8, 4), between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(torch.tanh(self.first(x))))


def noisy_gradient(x: Tensor) -> Tensor:
    return NoisyGradient.apply(x)


def draws(x: Tensor) -> Tensor:
    return noisy(x)


def logs(x: Tensor) -> Tensor:
    logged(x)
    return x


def chooses(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def losses(model: nn.Module, steps: int = 6) -> list[float]:
    """Those of a training that draws its batches from the generator that the model may draw from."""
    torch.manual_seed(3)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(steps):
        loss = functional.cross_entropy(model(torch.randn(5, 6)), torch.randint(4, (5,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.filterwarnings("ignore")  # torch's own, amid its traces
@pytest.mark.parametrize("between", [noisy_gradient, draws, chooses])
def test_what_is_drawn_out_of_sight_is_drawn_as_unplaced(between: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    plain = Layers(between)
    placed = place(copy.deepcopy(plain))
    assert losses(placed) == losses(plain)
    assert report(placed).placed_steps == 5


def test_an_op_that_is_called_for_what_it_does_runs_as_it_is() -> None:
    torch.manual_seed(0)
    plain = Layers(logs)
    placed = place(copy.deepcopy(plain), strict=False)
    LOGGED.clear()
    expected = losses(plain), LOGGED.copy()
    LOGGED.clear()
    assert (losses(placed), LOGGED) == expected
    assert report(placed).placed_steps == 0


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 4)

    def forward(self, h: Tensor) -> Tensor:
        float(h.detach().mean())  # a break of the graph
        return self.second(torch.relu(self.first(h))).float()


class CastsInPart(nn.Module):
    """Switches autocast on or off for its head, whose graph begins within that."""

    def __init__(self, *, body: bool) -> None:
        super().__init__()
        self.body, self.head, self.casts = nn.Linear(6, 8), Head(), body

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.casts):
            h = self.body(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=not self.casts):
            return self.head(h.float())


@pytest.mark.parametrize("body", [False, True], ids=["on", "off"])
def test_fragments_are_traced_under_their_own_autocast(body: bool) -> None:
    torch.manual_seed(0)
    plain = CastsInPart(body=body)
    placed = place(copy.deepcopy(plain))
    assert losses(placed) == pytest.approx(losses(plain), rel=1e-6)
    assert report(placed).placed_steps == 5


class Normalised(nn.Module):
    """A critic of rows of a table: a bad index raises behind the first norm's update."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table = spectral_norm(nn.Linear(6, 8)), nn.Embedding(5, 8)
        self.norm, self.last = nn.BatchNorm1d(8), spectral_norm(nn.Linear(8, 1))

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x)) + self.table(rows)))


def critic_steps(model: nn.Module, bad: int) -> Iterator[list[Tensor]]:
    """The state after every step of a training with a gradient penalty, of which the script skips step `bad`, whose batch is broken."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        x, rows = torch.randn(5, 6, requires_grad=True), torch.randint(5, (5,)) + (100 if step == bad else 0)
        with suppress(IndexError):
            value = model(x, rows)
            (gradient,) = torch.autograd.grad(value.sum(), x, create_graph=True)
            optimizer.zero_grad()
            (value.mean() + (gradient.norm(dim=1) - 1).square().mean()).backward()
            optimizer.step()
        yield [v.clone() for v in model.state_dict().values()]


@pytest.mark.parametrize("bad", [0, 1, 4], ids=["first", "verified", "placed"])
def test_a_call_that_raises_leaves_what_an_unplaced_one_leaves(bad: int) -> None:
    torch.manual_seed(0)
    plain = Normalised()
    placed = place(copy.deepcopy(plain), strict=False)
    for found, expected in zip(list(critic_steps(placed, bad)), list(critic_steps(plain, bad)), strict=True):
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))
    assert report(placed).placed_steps >= 3


def test_two_layers_that_come_to_share_their_buffers_update_them_one_after_the_other() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    placed = place(copy.deepcopy(plain))
    for model in (placed, plain):
        losses(model, 5)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            setattr(model[3], name, getattr(model[1], name))
        losses(model, 3)
    assert all(torch.equal(a, b) for a, b in zip(placed.buffers(), plain.buffers(), strict=True))
    assert report(placed).placed_steps == 4
