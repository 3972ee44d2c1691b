"""A module placed in the caller's own loop computes, gradient by gradient, what the module computes."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import baechi_ext
from baechi_ext.errors import CaptureError, ExecutionError, OptionError
from tests.torch_steps import Branches, Tied

QUICK = {"devices": 2, "method": "random"}
"""Placed anywhere, without a search."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums are added up in one order everywhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def place(model: nn.Module, *args: object, **options: object) -> nn.Module:
    return baechi_ext.parallelize(model, *args, **{**QUICK, **options})


def batch(name: str, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if name == "branches":
        return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(5, (4,), generator=generator)
    return torch.randint(11, (6, 4), generator=generator), torch.randint(11, (6,), generator=generator)


def a_users_loop(model: nn.Module, name: str, steps: int = 6) -> tuple[list[float], dict[str, Tensor]]:
    """AdamW, a scheduler, gradients of two batches added up and clipped, evaluation in between."""
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = []
    for i in range(steps):
        x, y = batch(name, i)
        loss = cross_entropy(model(x), y)
        (loss / 2).backward()
        if i % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            model.eval()
            with torch.no_grad():
                losses.append(cross_entropy(model(x), y).item())
            model.train()
        losses.append(loss.item())
    return losses, {k: v.clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize(("name", "make"), [("branches", Branches), ("tied", Tied)])
def test_training_is_bitwise_the_same(name: str, make: Callable[[], nn.Module], devices: int) -> None:
    torch.manual_seed(1)
    model = make()
    placed = place(copy.deepcopy(model), devices=devices)
    losses, state = a_users_loop(model, name)
    placed_losses, placed_state = a_users_loop(placed, name)
    assert placed_losses == losses
    assert list(placed_state) == list(state)
    assert all(torch.equal(state[k], placed_state[k]) for k in state)
    report = placed.report()
    assert (report.verified_steps, report.placed_steps, report.max_rel_diff, report.refusal) == (2, 6, 0.0, "")
    assert len(report.devices) == devices
    assert report.measured_us > 0
    assert placed.plan.method == "random"


class Answers(nn.Module):
    """Returns `shape` of its two heads; takes keyword arguments."""

    def __init__(self, shape: Callable[[Tensor, Tensor, Tensor], object]) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(6, 12), nn.Linear(12, 4), nn.Linear(12, 3)
        self.shape = shape

    def forward(self, x: Tensor, scale: float = 1.0, *, mask: Tensor | None = None) -> object:
        h = torch.tanh(self.body(x)) * scale
        h = h if mask is None else h * mask
        return self.shape(self.left(h), self.right(h), x)


@dataclass
class Pair:
    left: Tensor
    rest: dict
    name: str = "pair"


SHAPES = {
    "tensor": lambda a, b, x: a,
    "tuple": lambda a, b, x: (a, b),
    "nested": lambda a, b, x: {"a": [a, None, 3], "b": (b, "text")},
    "dataclass": lambda a, b, x: Pair(a, {"b": b}),
    "twice": lambda a, b, x: (a, a, b.view(-1), b),
    "input": lambda a, b, x: (a, x, x.view(-1)),
    "detached": lambda a, b, x: (a, b.detach(), b.argmax(1)),
    "distribution": lambda a, b, x: torch.distributions.Normal(a, b.exp().sum()),
}


def tensors_of(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (Pair, torch.distributions.Normal)):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in tensors_of(v)] if isinstance(value, (list, tuple)) else []


@pytest.mark.parametrize("shape", SHAPES)
def test_whatever_forward_returns(shape: str) -> None:
    torch.manual_seed(2)
    model = Answers(SHAPES[shape])
    placed = place(copy.deepcopy(model))
    mask = (torch.rand(5, 12) > 0.3).float()
    for _ in range(4):
        x = torch.randn(5, 6)
        seen = []
        for module in (model, placed):
            own = x.clone().requires_grad_()
            value = module(own, 0.5, mask=mask)
            found = tensors_of(value)
            module.zero_grad()
            sum((t * (i + 1)).sum() for i, t in enumerate(found) if t.requires_grad).backward()
            seen.append((type(value), found, [p.grad for p in module.parameters()], own.grad))
        (kind, expected, gradients, of_input), (placed_kind, actual, placed_gradients, placed_of_input) = seen
        assert kind is placed_kind
        assert [t.requires_grad for t in expected] == [t.requires_grad for t in actual]
        # The caller's own code adds up what comes back to the input, through the module and beside it.
        assert torch.allclose(of_input, placed_of_input, rtol=1e-6)
        for a, b in zip([*expected, *gradients], [*actual, *placed_gradients], strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
    assert placed.report().placed_steps == 4


def test_an_output_that_the_loss_leaves_out_gives_no_gradient() -> None:
    model = place(Answers(SHAPES["tuple"]))
    for turn in range(4):
        model.zero_grad()
        model(torch.randn(5, 6))[turn % 2].sum().backward()
        used, unused = (model.left, model.right) if turn % 2 == 0 else (model.right, model.left)
        assert used.weight.grad is not None
        assert unused.weight.grad is None
    assert model.report().placed_steps == 4


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_gradients_may_come_in_with_other_strides() -> None:
    torch.manual_seed(6)
    model = Scaled(6, 7)
    placed = place(copy.deepcopy(model))
    for _ in range(3):
        x, y = torch.randn(4, 5, 6), torch.randint(7, (4, 5))
        for module in (model, placed):
            module.zero_grad()
            cross_entropy(module(x).transpose(1, 2), y).backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), placed.parameters(), strict=True))


def test_calls_under_way_at_the_same_time() -> None:
    torch.manual_seed(3)
    model = Branches()
    placed = place(copy.deepcopy(model))
    for seed in range(3):
        (x, y), (u, v) = batch("branches", seed), batch("branches", seed + 50)
        for module in (model, placed):
            torch.manual_seed(seed)
            module.zero_grad()
            first, second = cross_entropy(module(x), y), cross_entropy(module(u), v)
            (second * first).backward(retain_graph=True)
            second.backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), placed.parameters(), strict=True))
        with pytest.raises(RuntimeError, match="backward.* a second time"):
            second.backward()


def test_what_changes_between_a_call_and_its_backward_is_an_error() -> None:
    placed = place(Answers(SHAPES["tensor"]), verify_steps=0)
    out = placed(torch.randn(5, 6))
    with torch.no_grad():
        placed.left.weight.mul_(2)
    with pytest.raises(RuntimeError, match="parameter or buffer 'left.weight' of a placed module was changed in place"):
        out.sum().backward()


def test_gradients_of_gradients_are_refused() -> None:
    placed = place(Answers(SHAPES["tensor"]), verify_steps=0)
    x = torch.randn(5, 6, requires_grad=True)
    with pytest.raises(ExecutionError, match="a placed call has none of second order"):
        torch.autograd.grad(placed(x).sum(), x, create_graph=True)
    model = Answers(SHAPES["tensor"])
    goes_on = place(copy.deepcopy(model), fallback=True)
    for _ in range(3):
        for module in (model, goes_on):
            (gradient,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
            gradient.square().sum().backward()
        for p, q in zip(model.parameters(), goes_on.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.allclose(p.grad, q.grad, rtol=1e-5)
    assert model.body.weight.grad.abs().sum() > 0
    assert "second order" in goes_on.report().refusal


class LooksAtItself(nn.Module):
    """Can't be captured as one graph, and has blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 20)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = sum(part(x) for part in self.parts)
        return y if y.sum().item() < 1e9 else y * 2


def test_so_are_those_of_a_module_in_blocks() -> None:
    placed = place(LooksAtItself(), method="round_robin", verify_steps=1)
    x = torch.randn(4, 20, requires_grad=True)
    for _ in range(2):
        placed(x).sum().backward()
    assert "3 blocks" in placed.report().line()
    with pytest.raises(ExecutionError, match="none of second order"):
        torch.autograd.grad(placed(x).sum(), x, create_graph=True)


def test_notes_for_profilers_are_left_out() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(20, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.profiler.record_function("mine"):
                return self.last(torch.relu(x))

    torch.manual_seed(8)
    model = Inner()
    placed = place(nn.DataParallel(copy.deepcopy(model)), verify_steps=1)
    assert list(placed.state_dict()) == ["module.last.weight", "module.last.bias"]
    for _ in range(3):
        x = torch.randn(3, 20)
        for module in (model, placed):
            module.zero_grad()
            module(x).sum().backward()
        assert torch.equal(model.last.weight.grad, placed.module.last.weight.grad)
    assert placed.report().placed_steps == 3


def test_frozen_parameters_hooks_and_a_change_of_mind() -> None:
    torch.manual_seed(4)
    model = Answers(SHAPES["tensor"])
    model.body.requires_grad_(False)
    placed = place(copy.deepcopy(model))
    for step in range(8):
        if step == 3:
            for module in (model, placed):
                module.body.weight.requires_grad_()
                module.left.bias.register_hook(lambda g: g * 2)
        x = torch.randn(5, 6)
        for module in (model, placed):
            module.zero_grad()
            module(x).square().sum().backward()
        assert [p.grad is None for p in model.parameters()] == [p.grad is None for p in placed.parameters()]
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), placed.parameters(), strict=True) if p.grad is not None)
    assert placed.report().shapes == 2
    assert placed.report().unplaced_steps == 1


def test_shapes_that_come_again_are_placed_like_the_first() -> None:
    model = place(Answers(SHAPES["tensor"]))
    for size in (5, 5, 5, 3, 3, 3, 5, 2):
        model(torch.randn(size, 6)).sum().backward()
    report = model.report()
    assert (report.shapes, report.placed_steps, report.unplaced_steps, report.verified_steps) == (2, 6, 2, 4)


def test_evaluation_and_a_model_without_parameters_run_as_they_are() -> None:
    placed = place(nn.Sequential(nn.ReLU(), nn.Flatten()))
    assert placed(torch.ones(2, 3)).tolist() == [[1.0] * 3] * 2
    other = place(Branches())
    x, _ = batch("branches", 0)
    with torch.no_grad():
        assert not other(x).requires_grad
    assert not other.eval()(x).isnan().any()
    assert placed.plan is None
    assert other.plan is None
    assert "not placed" in str(other.report())


def test_a_placed_module_is_the_module() -> None:
    torch.manual_seed(6)
    model = Branches()
    placed = place(model, (batch("branches", 0)[0],))
    assert placed.plan.method == "random"  # made from the example
    assert placed.report().placed_steps == 0
    assert [n for n, _ in placed.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert placed.last is model.last
    placed.note = 5
    assert model.note == 5
    assert placed.train(False).training is model.training is False
    copied = copy.deepcopy(placed)
    assert type(copied) is Branches
    kept = {k: v + 1 for k, v in model.state_dict().items()}
    placed.load_state_dict(kept)
    assert all(torch.equal(v, kept[k]) for k, v in model.state_dict().items())
    assert placed.unplace() is model
    placed.train()
    assert placed(batch("branches", 0)[0]).requires_grad
    assert placed.report().placed_steps == 0


def test_decorators() -> None:
    @baechi_ext.parallelize(**QUICK)
    class Net(Answers):
        def __init__(self, shape: Callable) -> None:
            super(Net, self).__init__(shape)  # noqa: UP008

    @baechi_ext.parallelize(**QUICK, verify_steps=1)
    def make() -> nn.Module:
        return Answers(SHAPES["tensor"])

    for placed in (Net(SHAPES["tensor"]), make()):
        for _ in range(3):
            placed(torch.randn(5, 6)).sum().backward()
        assert placed.report().placed_steps == 3
        assert placed.plan.method == "random"
        assert isinstance(placed, Answers)
        copied = copy.deepcopy(placed)
        copied(torch.randn(5, 6)).sum().backward()
        placed.unplace()(torch.randn(5, 6)).sum().backward()
        assert placed.report().placed_steps == 3
    assert type(Net(SHAPES["tensor"])) is Net
    assert not isinstance(make(), Net)


def test_an_error_in_an_op_names_it_and_the_next_call_runs() -> None:
    placed = place(Tied(), verify_steps=1)
    x, y = batch("tied", 0)
    cross_entropy(placed(x), y).backward()
    with pytest.raises(ExecutionError, match=r"device cpu:[01] failed in op 'embedding': IndexError"):
        placed(x + 100)
    cross_entropy(placed(x), y).backward()
    assert placed.report().placed_steps == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "best"}, "unknown method 'best'; choose one of auto"),
        ({"device": 2}, "unknown option 'device' of parallelize; it takes devices, method"),
        ({"devices": 0}, "devices=0 is no number of devices"),
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


def test_arguments_that_hide_tensors_are_refused() -> None:
    model = Answers(SHAPES["tensor"])
    with pytest.raises(CaptureError, match="in which no tensors can be told apart"):
        place(model)(torch.randn(5, 6), mask={torch.ones(12)})
    with pytest.raises(CaptureError, match="special kind"):
        place(model)(torch.eye(6).to_sparse())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("start", ["cpu", "cuda:0"])
def test_two_cuda_devices(start: str) -> None:
    torch.manual_seed(1)
    model = Branches().to(start)
    reference, placed = copy.deepcopy(model), place(model, devices=["cuda:0", "cuda:1"])
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (reference, placed)]
    for i in range(6):
        x, y = (t.to(start) for t in batch("branches", i))
        losses = []
        for module, optimizer in zip((reference, placed), optimizers, strict=True):
            torch.manual_seed(i)
            loss = cross_entropy(module.train()(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                losses += [loss.item(), cross_entropy(module.eval()(x), y).item()]
        assert losses[:2] == pytest.approx(losses[2:], rel=0.5 if start == "cpu" else 1e-3)  # dropout draws from the device's generator
    assert {p.device.index for p in placed.parameters()} == {0, 1}
    assert placed.report().placed_steps == 6
