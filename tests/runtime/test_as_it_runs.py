"""Code that TorchDynamo would trace in another way than it runs: questions whether it is compiled, functions whose results are cached,
NumPy."""

import copy
import functools
import importlib
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import baechi_ext
from baechi_runtime.torch.calls import module_call
from tests.runtime.placed_modules import place, report

pytestmark = pytest.mark.usefixtures("one_thread")
INSTALLED = """
import functools, torch
def asked(): return torch.compiler.is_compiling()
def factor(): return 2.0 if asked() else 1.0
@functools.cache
def cached(number): return [number]
"""


class Scaled(nn.Module):
    def __init__(self, scale: Callable[[], object]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)) * self.scale())


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "an_installed_package.py").write_text(INSTALLED)
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("an_installed_package")
    del sys.modules["an_installed_package"]


def trained(model: nn.Module) -> list[Tensor]:
    """The outputs of a training, and a random number behind it."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = []
    for _ in range(5):
        out = model(torch.randn(5, 6))
        optimizer.zero_grad()
        out.square().sum().backward()
        optimizer.step()
        outputs.append(out.detach())
    return [*outputs, torch.rand(1)]


def same(
    scale: Callable[[], object], plain: Callable[[], object], before: Callable[[], None] = lambda: None, *, traced: bool = True
) -> bool:
    """True if a placed module with one scale is what an unplaced one with the other is; `before` is called before each training. Steps are
    placed if they can be `traced`."""
    torch.manual_seed(2)
    model = Scaled(plain)
    placed = copy.deepcopy(model)
    placed.scale = scale
    place(placed, strict=traced)
    before()
    expected = trained(model)
    before()
    actual = trained(placed)
    assert bool(report(placed).placed_steps) == traced
    return all(map(torch.equal, expected, actual))


def test_only_installed_packages_are_told_that_they_are_compiled(installed: ModuleType) -> None:
    for asked in (torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling, installed.asked):

        def scale(asked: Callable[[], bool] = asked) -> float:
            return 3.0 if asked() else 1.0

        assert same(scale, scale)
    assert same(installed.factor, lambda: 2.0)
    compiled = torch.compile(lambda x: x * 3 if torch.compiler.is_compiling() else x, backend="eager")
    assert compiled(torch.ones(1)) == 3, "whoever compiles code is told so"


def test_results_that_are_cached_are_not_computed_anew(installed: ModuleType) -> None:
    now = {"number": 1.0}

    @functools.lru_cache
    def noise(size: int) -> Tensor:
        return torch.randn(size)

    @functools.cache
    def first() -> float:
        return now["number"]

    def aged() -> float:
        now["number"] += 1
        return first()

    assert same(lambda: noise(8), lambda: noise(8), noise.cache_clear)
    def renewed() -> None:
        now["number"] = 1.0
        first.cache_clear()

    assert same(aged, aged, renewed)
    assert same(lambda: installed.cached(2)[0], lambda: 2)
    assert installed.cached.cache_info().hits


@pytest.mark.parametrize(
    ("scale", "since"),
    [
        (lambda: float(np.median(np.linspace(0, 1, 8, dtype=np.float32))), (2, 11)),  # an array of one number where TorchDynamo runs it
        (lambda: torch.from_numpy(np.sort(np.random.RandomState(3).rand(8)).astype(np.float32)), (2, 11)),
        (lambda: np.sqrt(np.prod((2, 3))) * np.pi, (2, 11)),
    ],
)
def test_numpy_is_itself(scale: Callable[[], object], since: tuple[int, int]) -> None:
    assert same(scale, scale, traced=torch.__version__ >= since)


def test_numpy_of_numbers_breaks_no_graph() -> None:
    torch.manual_seed(2)
    model = place(Scaled(lambda: np.sqrt(8)))
    trained(model)
    assert not report(model).graph_breaks


def test_distributions_are_checked_outside_of_placed_calls() -> None:
    """torch.compile switches the checks off for good, in the whole process."""
    net = place(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
    for _ in range(3):
        net(torch.randn(5, 6)).sum().backward()
    assert report(net).placed_steps == 2
    with pytest.raises(ValueError, match="invalid values"):
        torch.distributions.Categorical(logits=net(torch.full((5, 6), float("nan"))))


def test_a_copy_of_a_modules_attributes_is_a_module_of_its_own() -> None:
    """As libraries for meta-learning make them."""
    net = place(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)))
    twin = net.__new__(type(net))
    twin.__dict__ = net.__dict__.copy()
    twin._modules = {name: copy.deepcopy(layer) for name, layer in net._modules.items()}
    for parameter in twin.parameters():
        parameter.data.zero_()
    for _ in range(3):
        net(torch.randn(5, 6)).sum().backward()
        assert not twin(torch.randn(5, 6)).any()
    assert report(net).placed_steps == 2


def test_a_module_that_is_let_go_of_ends_where_the_next_one_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    net = place(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)))
    for _ in range(3):
        net(torch.randn(5, 6)).sum().backward()
    gone = weakref.ref(net)
    del net
    monkeypatch.setattr(module_call, "_collected", -math.inf)
    place(nn.Linear(6, 8))
    assert gone() is None


def test_a_class_that_comes_from_a_placed_one_is_placed_once() -> None:
    @baechi_ext.parallelize(devices=2, method="random", keep_placed=True)
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    @baechi_ext.parallelize(devices=2, method="random", keep_placed=True)
    class Second(First):
        pass

    second, compiled = Second(), First()
    compiled.compile(backend="eager")
    for _ in range(3):
        second(torch.randn(5, 6)).sum().backward()
        compiled(torch.randn(5, 6)).sum().backward()
    assert report(second).placed_steps == 2
