"""Placed calls are compared with unplaced ones: which, what is found, and that a training goes on as if nothing had been placed."""

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

import baechi_ext
from baechi_ext.capture import torch_private
from baechi_ext.errors import CaptureError, ParityError
from baechi_runtime.torch.calls import verify
from baechi_runtime.torch.calls.call_report import kept_step
from baechi_runtime.torch.calls.phases import PhasedFragment
from baechi_runtime.torch.calls.placed_function import CASTS
from baechi_runtime.torch.calls.session import Session
from baechi_runtime.torch.calls.verify import ALWAYS, SHARE, Verification
from baechi_runtime.torch.lowering.random_state import RandomState


class Clock:
    """The module's clock in the place of time.monotonic: seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(verify, "time", made)
    return made


def due(
    verification: Verification, calls: int, cost_seconds: float, clock: Clock, backward: Callable[[int], bool] = lambda number: True
) -> list[int]:
    """The calls that are verified, which cost so much each; a call takes 1 second by itself. `backward`: has it a backward pass?"""
    verification.begun = clock.now
    found = []
    for number in range(1, calls + 1):
        clock.now += 1
        if verification.is_due(number):
            found.append(number)
            clock.now += cost_seconds
            verification.gone_forward(number, cost_seconds, is_all=False)
            if backward(number):
                verification.done(number)
    return found


def test_the_first_and_powers_of_two_are_verified_whatever_it_takes(clock: Clock) -> None:
    assert due(Verification(), 30, 1000.0, clock) == [1, 2, 4, 8, 16]
    assert due(Verification(always=6), 30, 1000.0, clock) == [1, 2, 3, 4, 5, 6, 8, 16]
    assert due(Verification(always=1), 30, 1000.0, clock) == [1, 4, 8, 16]
    assert ALWAYS == 16


def test_a_call_without_a_backward_pass_is_made_up_for(clock: Clock) -> None:
    assert due(found := Verification(), 20, 0.0, clock, lambda number: number > 1) == [1, 2, 3, 4, 8, 16]
    assert (found.steps, found.last) == (5, 16)
    assert due(found := Verification(), 20, 0.0, clock, lambda number: number > 4) == [1, 2, 3, 4, 5, 6, 8, 16]
    assert found.steps == 4
    assert due(found := Verification(), 20, 0.0, clock, lambda number: False) == [1, 2, 3, 4, 5, 6, 8, 16]
    assert (found.steps, found.last) == (0, 0)


def test_none_is_where_none_is_wanted(clock: Clock) -> None:
    assert due(Verification(0), 5000, 0.0, clock) == []


def test_later_ones_keep_within_a_share_of_the_time(clock: Clock) -> None:
    verification = Verification()
    found = due(verification, 10_000, 1.0, clock)
    assert found[:5] == [1, 2, 4, 8, 16]
    assert len(found) > 8
    assert verification.steps == len(found)
    assert verification.last == found[-1] > 5000
    share = verification.seconds / (clock.now - verification.begun)
    assert share <= SHARE + 1.0 / (clock.now - verification.begun)
    early = [n for n in found if 16 < n < 400]
    assert not early  # five verified calls are 1% of 500 seconds


def test_cheap_ones_are_verified_at_powers_of_two_and_at_others(clock: Clock) -> None:
    """Calls that only a number of their own tells apart are seen as well, about one of a thousand."""
    found = due(Verification(), 20_000, 1e-4, clock)
    powers = [1 << k for k in range(15)]
    assert set(powers) <= set(found)
    others = [n for n in found if n not in powers]
    assert 10 <= len(others) <= 40
    assert len({n % 10 for n in others}) > 3


def test_workers_verify_the_same_calls_whatever_their_clocks_say(clock: Clock) -> None:
    slow, fast = Verification(timed=False), Verification(timed=False)
    assert due(slow, 5000, 50.0, clock) == due(fast, 5000, 0.0, clock)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(self.norm(torch.tanh(self.a(x)))))


class Halves(Net):
    """Returns two views of one tensor that is not returned itself, as a variational autoencoder returns mean and variance."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return super().forward(x).chunk(2, 1)


def train(model: nn.Module, steps: int, before: Callable[[int], None] = lambda step: None) -> list[str]:
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    said = []
    for step in range(steps):
        before(step)
        optimizer.zero_grad()
        found = model(torch.randn(5, 6))
        loss = found.square().sum() if isinstance(found, Tensor) else found[0].square().sum() + found[1].exp().sum()
        loss.backward()
        optimizer.step()
        said.append(f"{loss.item():.17g} {torch.rand(1).item():.17g} {model.norm.running_mean.sum().item():.17g}")
    return [*said, *(f"{v.double().sum().item():.17g}" for v in model.state_dict().values())]


def session_of(model: nn.Module) -> Session:
    return model._compiled_call_impl.session


def corrupt_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary = PhasedFragment.forward

    def forward(self: PhasedFragment, args: list[Tensor]) -> tuple:
        outputs, kept, times = ordinary(self, args)
        return [o * 1.01 for o in outputs], kept, times

    monkeypatch.setattr(PhasedFragment, "forward", forward)


def corrupt_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary = PhasedFragment.forward

    def forward(self: PhasedFragment, args: list[Tensor]) -> tuple:
        found = ordinary(self, args)
        for i in self._part.written:
            if args[i].dtype.is_floating_point:
                args[i].data.add_(0.5)
        return found

    monkeypatch.setattr(PhasedFragment, "forward", forward)


def corrupt_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary = PhasedFragment.forward

    def forward(self: PhasedFragment, args: list[Tensor]) -> tuple:
        found = ordinary(self, args)
        torch.rand(1)
        return found

    monkeypatch.setattr(PhasedFragment, "forward", forward)


def corrupt_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary = PhasedFragment.backward

    def backward(self: PhasedFragment, tangents: list, kept: list) -> tuple:
        gradients, times = ordinary(self, tangents, kept)
        last = max(gradients)
        return {i: g * 1.01 if i == last else g for i, g in gradients.items()}, times

    monkeypatch.setattr(PhasedFragment, "backward", backward)


WRONG = {
    "output": (corrupt_forward, r"output 0"),
    "buffer": (corrupt_buffers, r"new value of norm\.running"),
    "random": (corrupt_random_numbers, r"drew other random numbers"),
    "gradient": (corrupt_backward, r"gradient of "),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("wrong_at", [1, 8])
def test_a_wrong_program_is_found_and_the_training_goes_on_as_the_plain_one(
    what: str, wrong_at: int, one_thread: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong from the first placed call on, or from the eighth one on, which is verified, too."""
    corrupt, named = WRONG[what]
    torch.manual_seed(1)
    model = Net()
    placed = baechi_ext.parallelize(copy.deepcopy(model), devices=2, method="random", keep_placed=True)
    expected = train(model, 12)
    found = train(placed, 12, lambda step: corrupt(monkeypatch) if step == wrong_at else None)
    assert found == expected
    report = baechi_ext.report(placed)
    assert report.placed_steps == wrong_at
    assert kept_step(session_of(placed), "train.py", report).report["parity"]["passed"] is False
    assert "differs from the unplaced one" in report.refusal or "random numbers" in report.refusal
    said = capsys.readouterr().err
    assert said.count("baechi: Net runs as it is: ") == 1
    assert session_of(placed).why_plain()
    lines = [line for line in said.splitlines() if "runs as it is" in line]
    assert re.search(named, lines[0])


@pytest.mark.parametrize("what", WRONG)
def test_it_is_an_error_where_all_is_to_be_placed(what: str, one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    corrupt, named = WRONG[what]
    torch.manual_seed(1)
    placed = baechi_ext.parallelize(Net(), devices=2, method="random", keep_placed=True, strict=True)
    corrupt(monkeypatch)
    seen = {}

    def note(step: int) -> None:
        seen["step"] = step

    with pytest.raises(ParityError, match=named):
        train(placed, 12, note)
    assert seen["step"] == 1


class Segments(nn.Module):
    """A head for segmentation, with or without attention. The biases before its normalisation have gradients that are rounding alone, and
    interpolation that is written out rounds otherwise."""

    def __init__(self, *, attends: bool) -> None:
        super().__init__()
        self.attends = attends
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 16)
        self.fuse, self.norm, self.last = nn.Conv2d(32, 16, 1, bias=False), nn.BatchNorm2d(16), nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        if self.attends:
            heads = first[:, None]  # four dimensions have a kernel of their own
            first = first + functional.scaled_dot_product_attention(heads, heads, heads)[:, 0]
        maps = [part.permute(0, 2, 1).reshape(-1, 16, 4, 4) for part in (first, self.second(first))]
        larger = [functional.interpolate(part, size=(16, 16), mode="bilinear") for part in maps]
        return self.last(torch.relu(self.norm(self.fuse(torch.cat(larger, 1)))))


@pytest.mark.parametrize("attends", [False, True])
@pytest.mark.parametrize("wrong", [False, True])
def test_rounding_alone_is_held_against_double_precision(
    *, wrong: bool, attends: bool, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPU devices, too: such a bias' gradient differed by some thousandths of the floor for small ones. A wrong gradient is found."""
    monkeypatch.setattr(torch_private, "_WHOLE", "multi_margin_loss")
    torch.manual_seed(1)
    model = baechi_ext.parallelize(Segments(attends=attends), devices=2, method="random", keep_placed=True)
    if wrong:
        corrupt_backward(monkeypatch)
    for _ in range(4):
        functional.cross_entropy(model(torch.randn(2, 16, 8)), torch.randint(0, 3, (2, 16, 16))).backward()
    report = baechi_ext.report(model)
    assert (report.placed_steps, "gradient of" in report.refusal) == ((1, True) if wrong else (3, False))
    assert report.verified.tolerance > 1e-5


def test_gradients_through_views_of_what_is_not_returned_are_compared(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model = Halves()
    options = {"devices": 2, "method": "random", "keep_placed": True, "strict": True}
    assert train(baechi_ext.parallelize(copy.deepcopy(model), **options), 12) == train(copy.deepcopy(model), 12)
    placed = baechi_ext.parallelize(model, **options)
    corrupt_backward(monkeypatch)
    with pytest.raises(ParityError, match="gradient of "):
        train(placed, 12)


def test_calls_whose_gradients_the_unplaced_run_makes_are_not_called_verified(
    one_thread: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong gradients of a later call are found though no earlier one had any of the placed call to compare."""
    model = baechi_ext.parallelize(Net(), devices=2, method="random", keep_placed=True)
    corrupt_backward(monkeypatch)
    for step in range(4):
        found = model(torch.randn(5, 6)).square().sum()
        if step < 3:
            torch.autograd.grad(found, [*model.parameters()], create_graph=True)
        assert baechi_ext.report(model).verified.steps == 0
    assert not capsys.readouterr().err
    found.backward()
    assert "gradient of " in capsys.readouterr().err


def test_what_is_not_verified_is_not_looked_at(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: the same wrong program runs to the end where nothing is compared."""
    torch.manual_seed(1)
    model = Net()
    placed = baechi_ext.parallelize(copy.deepcopy(model), devices=2, method="random", keep_placed=True, verify_steps=0, strict=True)
    corrupt_backward(monkeypatch)
    assert train(placed, 12) != train(model, 12)
    report = baechi_ext.report(placed)
    assert (report.placed_steps, report.verified.steps, report.refusal) == (11, 0, "")


def test_verified_calls_leave_the_generators_as_the_plain_run_does(one_thread: None) -> None:
    torch.manual_seed(1)
    model = Net()
    placed = baechi_ext.parallelize(copy.deepcopy(model), devices=2, method="random", keep_placed=True, verify_steps=12, strict=True)
    assert train(placed, 12) == train(model, 12)
    assert baechi_ext.report(placed).verified.steps == 11


def test_a_random_state_is_put_back() -> None:
    torch.manual_seed(3)
    state = RandomState()
    first = torch.rand(3)
    assert not state.is_now()
    state.restore()
    assert state.is_now()
    assert torch.equal(torch.rand(3), first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_behind_a_dropout_in_16_bits_are_rounded_as_unplaced(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.Linear(64, 64), nn.Dropout(0.3), nn.Linear(64, 8)).to(dtype)
    baechi_ext.parallelize(model, devices=2, method="random", strict=True, keep_placed=True)
    for _ in range(3):
        model(torch.randn(8, 16, dtype=dtype)).float().square().sum().backward()
    assert baechi_ext.report(model).verified.steps == 2
    assert baechi_ext.report(model).verified.max_rel_diff == 0


@pytest.mark.parametrize(("dtype", "kept"), [(torch.bfloat16, True), (torch.float16, True), (torch.bfloat16, False)])
def test_gradients_of_a_weight_that_is_read_again_under_autocast_are_added_up_as_unplaced(dtype: torch.dtype, kept: bool) -> None:
    """Autocast casts a weight once for all that read it, so that these gradients are added up in 16 bits; what is no leaf anew for each,
    all where it is told to keep no casts."""

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.normed = nn.Linear(16, 16), weight_norm(nn.Linear(16, 16))

        def forward(self, x: Tensor) -> Tensor:
            normed = self.normed.weight
            for _ in range(4):
                x = functional.linear(torch.tanh(self.layer(x)), normed)
            return x

    torch.manual_seed(0)
    model = baechi_ext.parallelize(Again(), devices=2, method="random", strict=True, keep_placed=True)
    for _ in range(3):
        with torch.autocast("cpu", dtype, cache_enabled=kept):
            loss = model(torch.randn(64, 16)).float().square().sum()
        loss.backward()
    assert baechi_ext.report(model).verified.steps == 2
    assert baechi_ext.report(model).verified.max_rel_diff == 0


class CastsApart(nn.Module):
    """The head computes in full precision whatever autocast says."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.body(x))
        with torch.autocast("cpu", enabled=False):
            return self.head(hidden.float())


def test_a_region_without_autocast_goes_backward_under_autocast_as_unplaced(one_thread: None) -> None:
    def trained(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(0)
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                model(torch.randn(8, 16)).square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    torch.manual_seed(0)
    model = CastsApart()
    placed = baechi_ext.parallelize(copy.deepcopy(model), devices=2, method="random", keep_placed=True, verify_steps=0)
    assert all(map(torch.equal, trained(placed), trained(model)))
    assert CASTS in baechi_ext.report(placed).refusal


def test_a_call_that_draws_nothing_leaves_the_generators_alone(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread, which makes batches, may draw from them just then."""
    model = baechi_ext.parallelize(nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 8)), devices=2, method="random", keep_placed=True)
    model(torch.randn(8, 16)).sum().backward()
    model(torch.randn(8, 16)).sum().backward()
    restored = []
    monkeypatch.setattr(RandomState, "restore", lambda state: restored.append(state))
    model(torch.randn(8, 16)).sum().backward()
    assert baechi_ext.report(model).verified.steps == 2
    assert not restored


def test_what_only_a_backward_pass_casts_is_cast_as_unplaced(one_thread: None) -> None:
    def trained(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(0)
        for _ in range(3):
            loss = model(torch.randn(8, 16)).square().sum()
            with torch.autocast("cpu", torch.bfloat16):
                loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    placed = baechi_ext.parallelize(copy.deepcopy(model), devices=2, method="random", keep_placed=True, verify_steps=0)
    assert all(map(torch.equal, trained(placed), trained(model)))
    assert CASTS in baechi_ext.report(placed).refusal
    train(net := baechi_ext.parallelize(Net(), devices=2, method="random", keep_placed=True), 3)
    loss = net(torch.randn(5, 6)).sum()
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    report = baechi_ext.report(net)
    assert report.refusal
    assert kept_step(session_of(net), "train.py", report).report["parity"]["passed"] is True  # all that was compared was equal
    strict = baechi_ext.parallelize(copy.deepcopy(model), devices=2, method="random", keep_placed=True, verify_steps=0, strict=True)
    with pytest.raises(CaptureError, match="under autocast"):
        trained(strict)
