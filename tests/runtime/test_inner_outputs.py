"""Gradients of what a placed call returns and also computes with, as Grad-CAM asks for them."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.runtime.placed_modules import place, report


class Shown(nn.Module):
    """Returns what it computes on the way: `late` is made from `early`, and the first output from both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        early = torch.tanh(self.first(x))
        late = torch.tanh(self.second(early))
        return self.last(late + early), early, late


class Keeping(Shown):
    """Gives one of them by an attribute."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, self.early, late = super().forward(x)
        return out, late


def differentiated(out: Tensor, early: Tensor, late: Tensor) -> list[Any]:
    return [*torch.autograd.grad(out.square().sum(), [late, early], retain_graph=True), out.sum().backward()]


def retained(out: Tensor, early: Tensor, late: Tensor) -> list[Any]:
    early.retain_grad()
    late.retain_grad()
    (out.square().sum() + late.square().sum()).backward()
    return [early.grad, late.grad]


def hooked(out: Tensor, early: Tensor, late: Tensor) -> list[Any]:
    seen: list[Any] = []
    late.register_hook(lambda gradient: gradient * 0.5)
    early.register_hook(lambda gradient: seen.append(gradient.clone()))
    loss = out.square().sum() + early.sum()
    del out, early, late
    loss.backward()
    return seen


def of_second_order(out: Tensor, early: Tensor, late: Tensor) -> list[Any]:
    found = torch.autograd.grad(out.square().sum(), [late, early], create_graph=True)
    (out.sum() + sum(f.square().sum() for f in found)).backward()
    return [f.detach() for f in found]


def unused(out: Tensor, early: Tensor, late: Tensor) -> list[Any]:
    seen: list[Any] = []
    out.register_hook(seen.append)  # no gradient comes to it, so nothing does
    early.register_hook(lambda gradient: seen.append(gradient.clone()))
    late.sum().backward()
    return seen


def steps(use: Callable[..., list[Any]], wrap: Callable[[nn.Module], nn.Module], kind: type[Shown] = Shown) -> tuple[list[Any], nn.Module]:
    """Gradients that `use` finds, and those of parameters: nobody asks in the first calls."""
    torch.manual_seed(0)
    model = wrap(kind())
    found: list[Any] = []
    for step in range(4):
        values = model(torch.randn(5, 6))
        values = (values[0], model.early, values[1]) if kind is Keeping else values
        if step < 2:
            values[0].sum().backward()
        else:
            found += use(*values)
        found += [p.grad.clone() for p in model.parameters()]
    return found, model


def require_alike(found: Sequence[Any], expected: Sequence[Any]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) is (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "use"), [*((Shown, use) for use in (retained, hooked, unused)), (Keeping, hooked)])
def test_a_gradient_on_the_way_is_what_it_is_unplaced(kind: type[Shown], use: Any, capsys: pytest.CaptureFixture[str]) -> None:
    expected, _ = steps(use, lambda model: model, kind)
    found, model = steps(use, lambda model: place(model, strict=False), kind)
    require_alike(found, expected)
    assert report(model).placed_steps == 2
    assert f"{kind.__name__} runs as it is: it returns what it also computes with" in capsys.readouterr().err


@pytest.mark.parametrize("use", [differentiated, of_second_order])
def test_torch_autograd_grad_leaves_calls_placed(use: Any) -> None:
    expected, _ = steps(use, lambda model: model)
    found, model = steps(use, place)
    require_alike(found, expected)
    assert report(model).placed_steps == 3


def test_gradients_of_parameters_alone_leave_calls_placed() -> None:
    plain = Shown()
    placed = place(copy.deepcopy(plain))
    for _ in range(3):
        x = torch.randn(5, 6)
        expected, found = (torch.autograd.grad(model(x)[0].sum(), list(model.parameters())) for model in (plain, placed))
        require_alike(found, expected)
    for model in (plain, placed):
        model(x)[0].sum().backward(inputs=list(model.parameters()))
    require_alike([p.grad for p in placed.parameters()], [p.grad for p in plain.parameters()])
    assert report(placed).placed_steps == 3


def test_nobody_asks_and_calls_stay_placed() -> None:
    def use(out: Tensor, early: Tensor, late: Tensor) -> list[Any]:
        return [(out.sum() + early.square().sum() + late.sum()).backward()]

    expected, _ = steps(use, lambda model: model)
    found, model = steps(use, place)
    assert all(a is b is None or torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, expected, strict=True))
    assert report(model).placed_steps == 3


class Contrast(nn.Module):
    """Returns a loss, what it is made from, and a view of that, as CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 12), nn.Linear(6, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.left(x) @ self.right(x).t()
        seen, target = scores.t(), torch.arange(len(x))
        return nn.functional.cross_entropy(scores, target) + nn.functional.cross_entropy(scores.t(), target), scores, seen


def through_the_view(loss: Tensor, scores: Tensor, seen: Tensor) -> list[Any]:
    seen.retain_grad()
    (loss + seen[:2].square().sum()).backward()
    return [seen.grad]


def of_both(loss: Tensor, scores: Tensor, seen: Tensor) -> list[Any]:
    scores.retain_grad()
    seen.retain_grad()
    (loss + seen[:2].square().sum()).backward()
    return [scores.grad, seen.grad]


def of_the_view(loss: Tensor, scores: Tensor, seen: Tensor) -> list[Any]:
    """None: the loss is not made from it."""
    return [*torch.autograd.grad(loss, [seen], allow_unused=True, retain_graph=True), loss.backward()]


@pytest.mark.parametrize("use", [through_the_view, of_both, of_the_view])
def test_a_view_of_what_others_are_made_from(use: Callable[..., list[Any]]) -> None:
    plain = Contrast()
    placed, found = place(copy.deepcopy(plain), strict=False), []
    for model in (plain, placed):
        torch.manual_seed(1)
        own: list[Any] = []
        for step in range(4):
            model.zero_grad()
            values = model(torch.randn(5, 6))
            own += [values[0].backward()] if step < 2 else use(*values)
            own += [*(p.grad.clone() for p in model.parameters()), values[2].detach().clone()]
        found.append(own)
    for a, b in zip(*found, strict=True):
        assert (a is None) is (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    assert report(placed).placed_steps >= 2


def batched(out: Tensor, weights: list[Tensor], directions: Tensor) -> Sequence[Tensor]:
    return torch.autograd.grad(out, weights, directions, is_grads_batched=True, retain_graph=True)


def mapped(out: Tensor, weights: list[Tensor], directions: Tensor) -> Sequence[Tensor]:
    return torch.func.vmap(lambda one: torch.autograd.grad(out, weights, one, retain_graph=True))(directions)


@pytest.mark.parametrize("several", [batched, mapped])
def test_gradients_of_several_directions_at_once(several: Callable[..., Sequence[Tensor]]) -> None:
    """As torch.autograd.functional.jacobian(vectorize=True) makes them; the dropout's mask is the call's."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(), nn.Tanh(), nn.Linear(12, 4))
    placed, x, directions = place(copy.deepcopy(model)), torch.randn(5, 6), torch.randn(3, 5, 4)
    for step in range(4):
        both = []
        for net in (model, placed):
            torch.manual_seed(step)
            out, weights = net(x), [*net.parameters()]
            both.append([*several(out, weights, directions), *torch.autograd.grad(out.sum(), weights)])
        assert all(map(torch.allclose, *both))
    assert report(placed).placed_steps == 3
