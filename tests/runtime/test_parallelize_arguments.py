"""Options and arguments that `parallelize` and `plan` take of a user's module: what is refused, and what runs as it is."""

import copy
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import baechi_ext
from baechi_ext.errors import CaptureError, OptionError
from tests.runtime.placed_modules import SHAPES, Answers, batch, place, report
from tests.torch_steps import Branches

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "best"}, "unknown method 'best'; choose one of auto"),
        ({"device": 2}, "unknown option 'device' of parallelize; it takes devices, method"),
        ({"devices": 0}, "devices=0 is not a number of devices"),
        ({"devices": "cuda:0"}, "devices='cuda:0' is not a number of devices"),
        ({"devices": 2.0}, "devices=2.0 is not a number of devices"),
        ({"device_memory": "much"}, "device_memory: 'much' is not a size"),
        ({"verify_steps": "2"}, "verify_steps is '2'; expected a number"),
        ({"timeout_seconds": -1}, "timeout_seconds is -1; expected at least 0"),
        ({"cluster": 3}, "cluster=3 is not a baechi_ext.Cluster"),
        ({"devices": ["cpu", "cuda:0"]}, "name devices of one kind"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        place(nn.Linear(2, 2), **options)
    with pytest.raises(OptionError, match=message):
        place(None, **options)
    with pytest.raises(OptionError, match="takes an nn.Module"):
        place(5)


def test_arguments_of_special_kinds_run_as_they_are() -> None:
    torch.manual_seed(11)
    model, x = Answers(SHAPES["tensor"]), torch.eye(6).to_sparse()
    placed = place(copy.deepcopy(model), strict=False)
    assert all(torch.equal(model(x), placed(x)) for _ in range(3))
    assert report(placed).placed_steps == 0
    assert "sparse" in report(placed).line()


class OneHot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, classes: Tensor) -> Tensor:
        return self.layers(nn.functional.one_hot(classes, 6).float())


def test_checks_that_return_nothing_are_placed_and_raise_what_they_do_unplaced() -> None:
    torch.manual_seed(12)
    model, classes = OneHot(), torch.arange(6)
    placed = place(copy.deepcopy(model), keep_placed=True)
    for _ in range(4):
        for each in (model, placed):
            each(classes).square().sum().backward()
    assert report(placed).placed_steps == 3
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), placed.parameters(), strict=True))
    for each in (model, placed):
        with pytest.raises(RuntimeError, match="Class values must be smaller than num_classes"):
            each(classes + 1)
    assert torch.equal(model(classes), placed(classes))


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def test_tensors_of_inference_mode_run_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Features that another module made without gradients; autograd takes them where it keeps nothing of them."""
    with torch.inference_mode():
        x = torch.randn(5, 6)
    placed = place(Shifted(), strict=False)
    for _ in range(3):
        placed(x).sum().backward()
    assert torch.equal(placed.shift.grad, torch.full((6,), 15.0))
    assert report(placed).placed_steps == 0
    assert capsys.readouterr().err.count("Shifted runs as it is: a call takes a tensor of torch.inference_mode()") == 1


def test_lazy_layers_have_their_shapes_from_the_inputs() -> None:
    placed = place(nn.Sequential(nn.LazyLinear(12), nn.Tanh(), nn.LazyLinear(3)), (torch.randn(5, 6),))
    assert report(placed).num_ops != (0, 0)


def test_why_a_call_can_not_be_planned() -> None:
    with pytest.raises(CaptureError, match="no gradients are recorded"):
        baechi_ext.plan(Answers(SHAPES["tensor"]).requires_grad_(False), (torch.randn(5, 6),), devices=2)


def test_plans_of_two_threads_are_made_one_after_the_other() -> None:
    models = [Branches(), Branches()]
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda model: baechi_ext.plan(model, batch("branches", 0)[:1], devices=2, method="m_etf"), models))
    assert [len(run.graph) > 10 for run in runs] == [True, True]


def test_arguments_of_special_kinds_are_refused_where_all_is_to_be_placed() -> None:
    placed = place(Answers(SHAPES["tensor"]))
    with pytest.raises(CaptureError, match="Answers"):
        for _ in range(2):
            placed(torch.eye(6).to_sparse())


def test_arguments_that_hide_tensors() -> None:
    """The error is that of the module itself."""
    with pytest.raises(TypeError, match="unsupported operand"):
        place(Answers(SHAPES["tensor"]))(torch.randn(5, 6), mask={torch.ones(12)})


@torch.compiler.disable
def aside() -> None:
    """Breaks the graph."""


class Front(nn.Module):
    """Trains nothing, and is traced in two graphs where it stands in a chain of torch's own modules."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.abs()
        aside()
        return x + 1


def test_what_trains_in_frames_that_are_passed_over_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """The graphs that TorchDynamo does find have nothing to train, which is no reason why the chain isn't placed."""
    model = place(nn.Sequential(Front(), nn.Linear(4, 4), nn.Tanh()), strict=False)
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()
    found = report(model)
    assert found.placed_steps == 0
    assert "not placed; 3 calls ran as they are: TorchDynamo found no graph in it that trains" in str(found)
    assert capsys.readouterr().err.count("Sequential runs as it is: TorchDynamo found no graph in it that trains") == 1
    with pytest.raises(CaptureError, match="no graph in it that trains"):
        place(nn.Sequential(Front(), nn.Linear(4, 4)))(torch.randn(2, 4))


def test_a_chain_that_has_no_gradients_is_not_said_to_be_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    model = place(nn.Sequential(Front(), nn.Linear(4, 4)).requires_grad_(False))
    model(torch.randn(2, 4))
    assert "a forward pass alone is not placed" in str(report(model))
    assert capsys.readouterr().err == ""


class Shown(nn.Module):
    """Returns, from the second of its two graphs, a view that it also computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first = self.first(x).tanh()
        aside()
        second = self.second(x)
        rows = second.t()
        return first, second, rows, rows.sin()


def test_a_part_that_is_not_placed_is_called_a_part(capsys: pytest.CaptureFixture[str]) -> None:
    model = place(Shown(), strict=False)
    for _ in range(3):
        sum(t.sum() for t in model(torch.randn(2, 4))).backward()
    assert report(model).placed_steps > 0
    assert re.search(r"^baechi: a part of Shown runs as it is: it returns a view", capsys.readouterr().err, re.MULTILINE)
