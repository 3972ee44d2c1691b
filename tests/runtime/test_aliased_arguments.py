"""Arguments and results of placed calls that are tied to each other: computed from one another, one memory, one count of changes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import baechi_ext
from baechi_runtime.torch.calls.module_call import call_of

Use = Callable[[nn.Module, int], list[float]]


def seen(make: Callable[[], nn.Module], use: Use, steps: int = 6) -> list[list[list[float]]]:
    """The values of `use` in each step of a module as it is, and of the same placed."""
    found = []
    for placed in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        module = make()
        if placed:
            options = {"devices": 2, "method": "random", "keep_placed": True, "cache": False, "verify_steps": 0}
            module = baechi_ext.parallelize(module, **options)
        torch.manual_seed(1)
        found.append([use(module, step) for step in range(steps)])
        assert not placed or baechi_ext.report(module).placed_steps > 0
    return found


def same(make: Callable[[], nn.Module], use: Use) -> None:
    plain, placed = seen(make, use)
    assert placed == [pytest.approx(values, rel=1e-5, abs=1e-6) for values in plain]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, 32), nn.Linear(32, 1), nn.Linear(1, 32)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(torch.cat([x, y], 1))) + self.c(y).sin())


class Residual(nn.Module):
    """A residual across a break of its graph, and a weight that both parts read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        inner = torch.tanh(self.b(h))
        if inner.sum() > 1e9:
            return h
        return torch.tanh(self.b(h + inner)) + h * inner


def gradient_penalty(module: nn.Module, inputs: list[Tensor]) -> list[float]:
    module.zero_grad()
    (gradient,) = torch.autograd.grad(module(*inputs).sum(), inputs[0], create_graph=True)
    (gradient - 1).square().mean().backward()
    return [gradient.sum().item(), *(p.grad.sum().item() for p in module.parameters() if p.grad is not None)]


def test_gradients_of_gradients_where_an_argument_is_computed_from_another() -> None:
    """The part through the other was counted twice."""

    def use(module: nn.Module, _: int) -> list[float]:
        x = torch.randn(16, 1, requires_grad=True)
        return gradient_penalty(module, [x, x.sin()])

    same(Two, use)


def test_gradients_of_gradients_across_a_graph_break() -> None:
    same(Residual, lambda module, _: gradient_penalty(module, [torch.randn(8, 16, requires_grad=True)]))


def test_gradients_of_gradients_of_weights_that_are_tied_later() -> None:
    def use(module: nn.Module, step: int) -> list[float]:
        if step == 3:
            module.b.weight = module.a.weight
        return gradient_penalty(module, [torch.randn(8, 16, requires_grad=True)])

    same(Residual, use)


class Bank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.randn(16, 16))
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        self.bank.mul_(0.9)
        return self.b(self.a(x).relu()) @ keys.t()


def test_an_argument_that_comes_to_be_a_part_of_a_buffer_that_changes() -> None:
    """It was read as it was before the call."""

    def use(module: nn.Module, step: int) -> list[float]:
        y = module(torch.randn(8, 16), module.bank.clone() if step < 4 else module.bank[:])
        y.sum().backward()
        return [y.sum().item(), module.a.weight.grad.sum().item()]

    same(Bank, use)


class Unregistered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(16, 16)]  # a plain list
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.layers[0](self.a(x).relu()))


def test_hooks_added_later_to_a_layer_that_is_not_registered() -> None:
    def use(module: nn.Module, step: int) -> list[float]:
        if step == 4:
            module.layers[0].register_forward_hook(lambda *given: given[2] * 2)
        return [module(torch.randn(8, 16)).sum().item()]

    same(Unregistered, use)


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.b(self.a(x).relu())).flatten(1)


@torch.library.custom_op("aliased_arguments::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    return x * torch.rand(x.shape)


noise.register_fake(torch.empty_like)
noise.register_autograd(lambda context, gradient: gradient)


class Noisy(Flat):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(noise(x))


def test_gradients_of_gradients_draw_no_more_than_unplaced() -> None:
    """An op of somebody else's may draw unseen."""

    def use(module: nn.Module, _: int) -> list[float]:
        return [*gradient_penalty(module, [torch.randn(8, 16, requires_grad=True)]), torch.rand(1).item()]

    same(Noisy, use)


def test_memory_that_is_shared() -> None:
    from baechi_runtime.torch.calls.placed_function import share_memory

    flat, parameter = torch.zeros(12), nn.Parameter(torch.zeros(4))
    cases: list[tuple[list[int], list[Any], bool]] = [
        ([0], [flat[:4], flat[4:8]], False),
        ([0, 1], [flat[:4], flat[4:8]], False),
        ([0], [flat[:4], flat[3:8]], True),
        ([1], [flat[::2], flat[1::2]], True),  # in turn, which is taken for shared
        ([0], [flat, flat], True),
        ([0], [flat[:0], flat], False),
        ([1], [parameter, parameter.data], False),
        ([0], [flat.view(3, 4).t(), torch.zeros(12)], False),
    ]
    assert [share_memory(written, args) for written, args, _ in cases] == [expected for *_, expected in cases]


class Centred(nn.Module):
    """Reads what BatchNorm averages, too."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.reads = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1), reads

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.a(x))
        return self.b((h - self.norm.running_mean) ** 2 if self.reads else h.sin())


@pytest.mark.parametrize("reads", [False, True])
def test_gradients_of_gradients_start_from_the_averages_as_they_were(*, reads: bool) -> None:
    """They started from those that the call had left. Where nobody reads them, nothing is copied for it."""
    kept = []

    def use(module: nn.Module, _: int) -> list[float]:
        x = torch.randn(16, 8, requires_grad=True)
        (gradient,) = torch.autograd.grad((module(x) * torch.arange(16.0)[:, None]).sum(), x, create_graph=True)
        module.zero_grad()
        gradient.square().mean().backward()
        if (call := call_of(module)) is not None:
            kept.extend(f.loaded.part.consumed for f in call.session.fragments if f.loaded is not None)
        return [gradient.square().sum().item(), module.a.weight.grad.square().sum().item(), module.norm.running_mean.sum().item()]

    same(partial(Centred, reads=reads), use)
    assert {len(consumed) for consumed in kept} == {int(reads)}
