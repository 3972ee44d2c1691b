"""A small module with BatchNorm and Dropout on CUDA devices, as it is and placed with a graph for each pass, and loops that train it."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import baechi_ext
from baechi_runtime.torch.calls.graphed import GraphedFragment
from baechi_runtime.torch.calls.module_call import call_of

WIDTH, CLASSES = 32, 5


class Net(nn.Module):
    """Two branches, each with a BatchNorm, and Dropout where `drops`."""

    def __init__(self, *, drops: bool = False) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.ReLU()) for _ in range(2))
        self.drop = nn.Dropout(0.3 if drops else 0.0)
        self.out = nn.Linear(128, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(torch.cat([branch(x) for branch in self.branches], 1)))


def batches(count: int, seed: int = 3) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(16, WIDTH, generator=generator)
        yield x.to("cuda:0"), torch.randint(0, CLASSES, (16,), generator=generator).to("cuda:0")


def fragment_of(module: nn.Module) -> GraphedFragment:
    """The passes of a placed module."""
    call = call_of(module)
    assert call is not None
    loaded = call.session.groups[0].members[0].loaded
    assert loaded is not None
    assert isinstance(loaded.placed, GraphedFragment)
    return loaded.placed


def pair(devices: list[str], **options: Any) -> tuple[nn.Module, nn.Module]:
    """A module as it is, and the same placed with graphs; each device has ops."""
    torch.manual_seed(0)
    plain = Net(**options).to("cuda:0")
    given = {"device_map": {"branches.0": 0, "branches.1": 1, "": 0}, "method": "expert"} if len(devices) > 1 else {"method": "contiguous"}
    placed = baechi_ext.parallelize(copy.deepcopy(plain), devices=devices, keep_placed=True, strict=True, cache=False, **given)
    return plain, placed


def train(module: nn.Module, step: Callable[[nn.Module, torch.optim.Optimizer, Any], Any], steps: int = 10) -> list[Any]:
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    return [step(module, optimizer, batch) for batch in batches(steps)]


def ordinary(module: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    optimizer.zero_grad()
    loss = functional.cross_entropy(module(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss.item()


def accumulated(module: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Two backward passes, which add up, before an update; the gradients of the first are looked at after the second."""
    optimizer.zero_grad()
    losses, kept = [], []
    for x, y in ((batch[0], batch[1]), (batch[0].flip(1), batch[1])):
        loss = functional.cross_entropy(module(x), y)
        loss.backward()
        losses.append(loss)
        kept.append(module.out.weight.grad)
    assert kept[0] is kept[1]
    optimizer.step()
    return sum(losses).item()


def siamese(module: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Two forward passes before one backward pass."""
    optimizer.zero_grad()
    first, second = module(batch[0]), module(batch[0].flip(0))
    loss = functional.cross_entropy(first, batch[1]) + (first - second).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def twice(module: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Two backward passes of one forward pass."""
    optimizer.zero_grad()
    loss = functional.cross_entropy(module(batch[0]), batch[1])
    loss.backward(retain_graph=True)
    first = module.out.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(module.out.weight.grad, 2 * first)
    optimizer.step()
    return loss.item()


def with_input_gradient(module: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    optimizer.zero_grad()
    x = batch[0].clone().requires_grad_()
    functional.cross_entropy(module(x), batch[1]).backward()
    optimizer.step()
    return x.grad.abs().sum().item()
