"""Calls of a user's own module with a CUDA graph for each pass, on real devices or pretended ones (make test-cuda-stub): what a training
loop sees is what it sees unplaced."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import baechi_ext
from baechi_ext.errors import ParityError
from baechi_runtime.measure.timing import StepTimes
from baechi_runtime.torch.calls import capturing, verify
from baechi_runtime.torch.calls.module_call import call_of
from tests.runtime.graphed_loops import Net, accumulated, batches, fragment_of, ordinary, pair, siamese, train, twice, with_input_gradient

found = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(found < 1, reason="needs a CUDA device")]
two = pytest.param(["cuda:0", "cuda:1"], id="two GPUs", marks=pytest.mark.skipif(found < 2, reason="needs two CUDA devices"))
devices = pytest.mark.parametrize("devices", [pytest.param(["cuda:0"], id="one GPU"), two])


@pytest.fixture(autouse=True)
def _traced_anew() -> None:
    """TorchDynamo traces the code of one module only so often."""
    torch.compiler.reset()


def same(plain: nn.Module, placed: nn.Module) -> None:
    for (name, a), b in zip(plain.state_dict().items(), placed.state_dict().values(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


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
    run = verify._Doubles._run
    monkeypatch.setattr(verify._Doubles, "_run", lambda self: asked.append(found := run(self)) or found)
    plain, placed = pair(["cuda:0"], drops=drops)
    assert train(placed, ordinary) == pytest.approx(train(plain, ordinary), rel=1e-4)
    assert asked
    assert None not in asked
    assert baechi_ext.report(placed).verified.steps >= 3

    fragment = fragment_of(placed)
    backward = fragment.backward
    monkeypatch.setattr(fragment, "backward", lambda *given: off_by(1.01, *backward(*given)))
    verification = call_of(placed).session.groups[0].members[0].verification  # type: ignore[union-attr]
    assert verification.tolerance == 0.0 < verification.allowed
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
