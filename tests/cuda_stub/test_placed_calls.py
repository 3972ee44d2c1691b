"""A user's own training loops on pretended CUDA devices: placed they compute what they compute as they are. No call is verified, so that
nothing is mended on the way."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import baechi_ext
from tests.cuda_stub import kernels

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),  # by what torch.compiler.reset() imports
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),  # of parameters elsewhere than results
]
STEPS = 6
Train = Callable[[Callable[[nn.Module], nn.Module]], list[float]]
"""Trains a module that it has placed; what it saw."""


def compare(train: Train, *, placed: bool = True, seed: int | None = None) -> None:
    """Trains as it is, and placed op by op and as graphs, and compares. `placed`: whether that can be placed; `seed`: of the order in which
    devices work then."""
    models = []

    def place(model: nn.Module, graphs: bool) -> nn.Module:
        models.append(model)
        kernels.order(seed)
        options = {"devices": ["cuda:0", "cuda:1"], "method": "contiguous", "keep_placed": True, "verify_steps": 0, "cache": False}
        return baechi_ext.parallelize(model, **options, cuda_graphs=graphs)

    found = []
    for how in (lambda model: model, partial(place, graphs=False), partial(place, graphs=True)):
        torch.compiler.reset()  # what one loop has traced is no reason for another to be traced no more
        torch.manual_seed(0)
        found.append(train(how))
        kernels.order(None)
    assert found[1:] == [pytest.approx(found[0], rel=1e-4)] * 2
    assert all((baechi_ext.report(model).placed_steps > 1) == placed for model in models)


class Towers(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.Dropout(dropout), nn.Linear(32, 16)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([tower(x).relu() for tower in self.towers], 1)


def trained(model: nn.Module, loss_of: Callable[[int, Tensor], Tensor], device: str = "cuda") -> list[float]:
    """The losses of a few steps, each from its number and a batch, and what is left behind: parameters, generators."""
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.1), torch.Generator().manual_seed(1)
    losses = []
    for step in range(STEPS):
        loss = loss_of(step, torch.randn(8, 16, generator=data).to(device))
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is None or p.grad.device == p.device for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    drawn = [torch.rand(1, device=d).item() for d in ("cpu", "cuda:0", "cuda:1")]
    return [*losses, *drawn, *(p.double().abs().sum().item() for p in model.parameters())]


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_a_gradient_penalty_has_the_masks_of_its_call(device: str) -> None:
    def train(place: Callable[[nn.Module], nn.Module]) -> list[float]:
        model = place(Towers(0.4).to(device))

        def penalty(step: int, x: Tensor) -> Tensor:
            y = model(x.requires_grad_())
            (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y.square().mean() + gradient.square().mean()

        return trained(model, penalty, device)

    compare(train)


def test_a_gradient_penalty_is_cast_as_its_call() -> None:
    seen = []

    def train(place: Callable[[nn.Module], nn.Module]) -> list[float]:
        model = place(Towers().cuda())

        def penalty(step: int, x: Tensor) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                y = model(x.requires_grad_())
            (gradient,) = torch.autograd.grad(y.float().sum(), x, create_graph=True)
            seen.append(gradient.square().mean().item())
            return y.float().square().mean()

        return trained(model, penalty)

    compare(train)
    assert seen[1] == seen[STEPS + 1]  # to the last digit: the same roundings


class Moving(Towers):
    """Its way over devices is a list of them: those of its arguments, its parameters and its result."""

    def __init__(self, way: tuple[str, str, str]) -> None:
        super().__init__()
        self.first, self.second, self.last = way
        self.begin = nn.Linear(16, 16).to(self.first)
        self.towers.to(self.second)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.begin(x).to(self.second)).to(self.last)


@pytest.mark.parametrize("way", [("cpu", "cuda:0", "cuda:0"), ("cuda:0", "cuda:1", "cuda:1"), ("cuda:1", "cuda:1", "cpu")])
def test_outputs_are_where_they_are_unplaced(way: tuple[str, str, str]) -> None:
    def train(place: Callable[[nn.Module], nn.Module]) -> list[float]:
        model = place(Moving(way))

        def loss(step: int, x: Tensor) -> Tensor:
            y = model(x)
            assert y.device == torch.device(way[2])
            return y.square().mean()

        return trained(model, loss, way[0])

    compare(train)


class Apart(Moving):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return functional.dropout(x, 0.3), super().forward(functional.dropout(x, 0.3))


@pytest.mark.parametrize("way", [("cpu", "cuda:0", "cuda:0"), ("cuda:0", "cuda:1", "cuda:1")])
def test_results_on_several_devices(way: tuple[str, str, str]) -> None:
    def train(place: Callable[[nn.Module], nn.Module]) -> list[float]:
        model = place(Apart(way))

        def loss(step: int, x: Tensor) -> Tensor:
            first, second = model(x)
            assert (str(first.device), str(second.device)) == (way[0], way[2])
            return second.square().mean() + first.to(second.device).mean()

        return trained(model, loss, way[0])

    compare(train, placed=way[0] != "cpu")  # whose generator no CUDA device has


class Noisy(Towers):
    """Draws from a generator of its own, which no graph holds."""

    def __init__(self) -> None:
        super().__init__(0.3)
        self.generator = torch.Generator("cuda").manual_seed(2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn(x.shape, generator=self.generator, device=x.device))


def test_a_call_of_several_fragments() -> None:
    def train(place: Callable[[nn.Module], nn.Module]) -> list[float]:
        model = place(Noisy().cuda())
        return trained(model, lambda step, x: model(x).square().mean())

    compare(train)


@pytest.mark.parametrize("device", ["cuda:1", "cuda:3"])
def test_what_the_users_own_stream_has_to_do_comes_first(device: str) -> None:
    """On a device of the plan, and on another one."""

    def train(place: Callable[[nn.Module], nn.Module]) -> list[float]:
        model, stream = place(Towers(0.3).to(device)), torch.cuda.Stream(device)

        def loss(step: int, x: Tensor) -> Tensor:
            with torch.cuda.stream(stream):
                return (model(x * 2) * 3).square().mean()

        with torch.cuda.stream(stream):
            return trained(model, loss, device)

    compare(train, seed=1)


def test_a_graph_that_the_user_captures() -> None:
    def train(place: Callable[[nn.Module], nn.Module]) -> list[float]:
        model = place(Towers().cuda())
        losses = trained(model, lambda step, x: model(x).square().mean())
        x, graph = torch.zeros(8, 16, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = model(x).square().mean()
        x.fill_(1.0)
        graph.replay()
        return [*losses, loss.item()]

    compare(train)


def test_sparse_gradients() -> None:
    class Words(Towers):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(20, 16, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.words((x[:, :3].abs() * 5).long()).sum(1))

    def train(place: Callable[[nn.Module], nn.Module]) -> list[float]:
        model = place(Words().cuda())
        return trained(model, lambda step, x: model(x).square().mean())

    compare(train, seed=2)


def test_casts_of_another_kind_of_device() -> None:
    """Casts on the host alone: on a GPU its ops stay as they are."""

    def train(place: Callable[[nn.Module], nn.Module]) -> list[float]:
        model = place(Towers())

        def loss(step: int, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return model(x).float().square().mean()

        return trained(model, loss, "cpu")

    compare(train, placed=False)
