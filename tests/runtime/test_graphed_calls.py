"""Calls of a user's own module with a CUDA graph for each pass, on real devices or pretended ones (make test-cuda-stub): what a training
loop sees is what it sees unplaced."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import baechi_ext
from baechi_ext.errors import ParityError
from baechi_runtime.measure.timing import StepTimes
from baechi_runtime.torch.calls import capturing, verify
from baechi_runtime.torch.calls.graphed import GraphedFragment
from baechi_runtime.torch.calls.module_call import call_of

WIDTH, CLASSES = 32, 5
found = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(found < 1, reason="needs a CUDA device")]
two = pytest.param(["cuda:0", "cuda:1"], id="two GPUs", marks=pytest.mark.skipif(found < 2, reason="needs two CUDA devices"))
devices = pytest.mark.parametrize("devices", [pytest.param(["cuda:0"], id="one GPU"), two])


@pytest.fixture(autouse=True)
def _traced_anew() -> None:
    """TorchDynamo traces the code of one module only so often."""
    torch.compiler.reset()


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


def pair(devices: list[str], **options: Any) -> tuple[nn.Module, nn.Module]:
    """A module as it is, and the same placed with graphs; each device has ops."""
    torch.manual_seed(0)
    plain = Net(**options).to("cuda:0")
    given = {"device_map": {"branches.0": 0, "branches.1": 1, "": 0}, "method": "expert"} if len(devices) > 1 else {"method": "contiguous"}
    placed = baechi_ext.parallelize(
        copy.deepcopy(plain), devices=devices, keep_placed=True, strict=True, cuda_graphs=True, cache=False, **given
    )
    return plain, placed


def fragment_of(module: nn.Module) -> GraphedFragment:
    call = call_of(module)
    assert call is not None
    loaded = call.session.groups[0].members[0].loaded
    assert loaded is not None
    assert isinstance(loaded.placed, GraphedFragment)
    return loaded.placed


def same(plain: nn.Module, placed: nn.Module) -> None:
    for (name, a), b in zip(plain.state_dict().items(), placed.state_dict().values(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


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


LOOPS = [ordinary, accumulated, siamese, twice, with_input_gradient]


@devices
@pytest.mark.parametrize("loop", LOOPS, ids=[loop.__name__ for loop in LOOPS])
def test_loops(devices: list[str], loop: Callable[..., Any]) -> None:
    plain, placed = pair(devices)
    assert train(placed, loop) == pytest.approx(train(plain, loop), rel=1e-4)
    same(plain, placed)
    fragment = fragment_of(placed)
    assert fragment.why_not == ""
    assert fragment.note == "CUDA graphs of its passes"
    assert baechi_ext.report(placed).verified.max_rel_diff < 1e-4


@devices
def test_random_numbers_are_those_of_the_unplaced_module(devices: list[str]) -> None:
    plain, placed = pair(devices, drops=True)
    assert train(placed, ordinary) == pytest.approx(train(plain, ordinary), rel=1e-4)
    assert fragment_of(placed).note == "CUDA graphs of its passes"


@devices
def test_what_was_returned_stays_as_it_is(devices: list[str]) -> None:
    _, placed = pair(devices)
    (x, y), (other, _) = batches(2)
    for _ in range(5):
        functional.cross_entropy(placed(x), y).backward()
    output = placed(x)
    before = output.detach().clone()
    output.sum().backward()
    gradients = [p.grad for p in placed.parameters()]
    copies = [g.clone() for g in gradients]
    placed.zero_grad()
    placed(other).sum().backward()
    assert torch.equal(output, before)
    assert all(torch.equal(g, c) for g, c in zip(gradients, copies, strict=True))


def test_parameters_that_move_are_captured_anew_and_given_up_in_the_end() -> None:
    plain, placed = pair(["cuda:0"])
    torch.manual_seed(5)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (plain, placed)]
    for i, batch in enumerate(batches(14)):
        if i in (5, 7, 9, 11):
            for p in placed.parameters():
                p.data = p.data.clone()
        losses = [ordinary(m, o, batch) for m, o in zip((plain, placed), optimizers, strict=True)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    same(plain, placed)
    assert fragment_of(placed).note == "no CUDA graphs of its passes: its parameters move"


def test_parameters_on_the_host_are_no_part_of_a_graph() -> None:
    torch.manual_seed(0)
    options = {"method": "contiguous", "keep_placed": True, "cuda_graphs": True, "cache": False, "verify_steps": 0}
    module = baechi_ext.parallelize(Net(), devices=["cuda:0"], **options)  # a GPU rounds otherwise
    for x, y in batches(6):
        functional.cross_entropy(module(x.cpu()), y.cpu()).backward()
    assert fragment_of(module).note == "no CUDA graphs of its passes: its parameters are on cpu"


@pytest.mark.parametrize("drops", [False, True])
def test_other_kernels_are_held_against_double_precision(*, drops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where results differ by more than is allowed, neither may be much farther from exact ones; a wrong one is."""
    monkeypatch.setattr(capturing, "FULL_PRECISION", 0.0)
    monkeypatch.setitem(capturing.TOLERANCE, "cuda", 0.0)
    asked = []
    results = verify._Doubles.results
    monkeypatch.setattr(verify._Doubles, "results", lambda self: asked.append(found := results(self)) or found)
    plain, placed = pair(["cuda:0"], drops=drops)
    assert train(placed, ordinary) == pytest.approx(train(plain, ordinary), rel=1e-4)
    assert asked
    assert None not in asked
    assert baechi_ext.report(placed).verified.steps >= 3

    fragment = fragment_of(placed)
    backward = fragment.backward
    monkeypatch.setattr(fragment, "backward", lambda *given: off_by(1.01, *backward(*given)))
    verification = call_of(placed).session.groups[0].members[0].verification  # type: ignore[union-attr]
    monkeypatch.setattr(verification, "always", 100)
    x, y = next(batches(1))
    with pytest.raises(ParityError, match="the placed step differs from the unplaced one"):
        functional.cross_entropy(placed(x), y).backward()


def off_by(factor: float, gradients: dict[int, torch.Tensor], times: StepTimes) -> tuple[dict[int, torch.Tensor], StepTimes]:
    return {name: gradient * factor for name, gradient in gradients.items()}, times


def test_a_changed_weight_between_the_passes_is_an_error_as_unplaced() -> None:
    _, placed = pair(["cuda:0"])
    for x, y in batches(6):
        functional.cross_entropy(placed(x), y).backward()
    x, y = next(batches(1))
    x.requires_grad_()
    loss = functional.cross_entropy(placed(x), y)
    with torch.no_grad():
        placed.out.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
