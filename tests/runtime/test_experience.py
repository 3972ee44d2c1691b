"""Verdicts of earlier runs, and fragments that are too small to be captured."""

import gc
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import baechi_ext
from baechi_ext.errors import CaptureError
from baechi_runtime.drivers import pipeline
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.measure.turns import PLACED, Turns
from baechi_runtime.torch.calls import fragments
from baechi_runtime.torch.calls.capturing import MANY_OPS, SMALL_US, TINY_OP_US, backward_ops, why_too_small
from baechi_runtime.torch.calls.experience import Experience, Verdict, _parts
from baechi_runtime.torch.calls.fragments import Prepared
from baechi_runtime.torch.calls.module_call import call_of
from baechi_runtime.torch.calls.session import Session
from baechi_runtime.torch.lowering.devices import cpu_devices

SAVES_A_SECOND = Verdict(True, "", plain_us=3000.0, placed_us=2000.0, setup_seconds=0.0, steps=1000)


@pytest.mark.parametrize(("setup_seconds", "pays"), [(0.9, True), (1.1, False)])
def test_placing_pays_where_it_saves_more_than_setting_it_up_again_takes(tmp_path: Path, setup_seconds: float, pays: bool) -> None:
    request = TrainRequest("a script", pipeline.PlanRequest(), cache=tmp_path)
    experience = Experience(request, cpu_devices(2), nn.Linear(3, 3), ((torch.ones(2, 3),), {}))
    assert experience.why_not() == ("", 0)
    experience.keep(replace(SAVES_A_SECOND, setup_seconds=setup_seconds))
    why = "placing saved 1 s in the 1000 steps of an earlier run, and set-up takes 1.1 s (--no_cache, or cache=False, asks again)"
    assert experience.why_not() == (("", 0) if pays else (why, 1000))
    slower = replace(SAVES_A_SECOND, setup_seconds=setup_seconds, placed_us=4000.0)
    experience.keep(slower)
    assert experience.why_not()[0].startswith("placing lost 1 s in the 1000 steps")
    assert experience.why_not()[1] == 0


ROUNDS = 1


class Rounds(nn.Module):
    """A layer applied so many times as an attribute says, and a global value."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.layer, self.rounds = nn.Linear(3, 3), rounds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.rounds * ROUNDS):
            x = self.layer(x)
        return x


def test_a_verdict_is_of_the_settings_that_the_code_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with gradient checkpointing, say, or with more rounds, has the same structure and other work."""
    request, given = TrainRequest("a script", pipeline.PlanRequest(), cache=tmp_path), ((torch.ones(2, 3),), {})
    Experience(request, cpu_devices(2), Rounds(1), given).keep(Verdict(False, "it is too small"))
    assert Experience(request, cpu_devices(2), Rounds(1), given).why_not()[0].startswith("it is too small")
    assert Experience(request, cpu_devices(2), Rounds(50), given).why_not() == ("", 0)
    with torch.autocast("cpu", torch.bfloat16):
        assert Experience(request, cpu_devices(2), Rounds(1), given).why_not() == ("", 0)
    other = Rounds(1)
    other.activation = torch.tanh
    assert Experience(request, cpu_devices(2), other, given).why_not() == ("", 0)
    monkeypatch.setattr(f"{__name__}.ROUNDS", 50)
    assert Experience(request, cpu_devices(2), Rounds(1), given).why_not() == ("", 0)


def test_a_short_run_keeps_a_longer_one_unplaced_for_as_many_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Placing that did not pay in a few steps may pay in many; the next run goes by the longer one."""
    monkeypatch.setenv("BAECHI_CACHE", str(tmp_path))
    model, x = nn.Sequential(nn.Linear(600, 900), nn.Tanh(), nn.Linear(900, 600)), torch.ones(128, 600)
    baechi_ext.parallelize(model, devices=2, method="single")
    monkeypatch.setattr(Experience, "why_not", lambda self: ("set-up takes longer", 3))
    held = call_of(model).session
    for step in range(7):
        model(x).sum().backward()
        if step == 1:
            held.conclude(ended=True)  # a run that ended here has nothing to add
            assert not (tmp_path / "verdicts").exists()
    assert held.unplaced["set-up takes longer"] == 3
    assert len(held.groups) == 1
    held.conclude(ended=True)
    (verdict,) = (json.loads(file.read_text()) for file in (tmp_path / "verdicts").glob("*.json"))
    assert verdict["steps"] == 3 + held.calls > 4


@pytest.mark.parametrize("ends", [baechi_ext.unplace, lambda model: None])
def test_the_steps_of_a_loop_of_ones_own_are_counted_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: Callable[[nn.Module], object]
) -> None:
    """A verdict made once it was clear which kind is faster would call every run one of some twenty steps."""
    monkeypatch.setenv("BAECHI_CACHE", str(tmp_path))
    monkeypatch.setattr(Turns, "_decision", lambda self: PLACED)
    model = nn.Sequential(nn.Linear(600, 900), nn.Tanh(), nn.Linear(900, 600))
    baechi_ext.parallelize(model, devices=2, method="contiguous")
    for _ in range(30):
        model(torch.ones(128, 600)).sum().backward()
    assert not (tmp_path / "verdicts").exists()
    monkeypatch.setattr(call_of(model).session.settings.executor, "process", 0)  # at the process's end its threads end first
    ends(model)
    del model
    gc.collect()
    (verdict,) = (json.loads(file.read_text()) for file in (tmp_path / "verdicts").glob("*.json"))
    assert (verdict["placed"], verdict["steps"]) == (True, 30)


@pytest.mark.parametrize("verdicts", [False, True])
def test_a_small_batch_at_first_is_no_reason_to_give_all_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, verdicts: bool) -> None:
    monkeypatch.setenv("BAECHI_CACHE", str(tmp_path))
    monkeypatch.setattr(fragments, "why_too_small", lambda us, values, args: "it is too small" if len(values[0]) == 1 else "")
    model = nn.Sequential(nn.Linear(60, 90), nn.Tanh(), nn.Linear(90, 60))
    baechi_ext.parallelize(model, devices=2, method="single", cache=verdicts)
    for size in (1, 1, 8, 8):
        model(torch.ones(size, 60)).sum().backward()
    assert len(call_of(model).session.groups) == 1
    assert call_of(model).session.unplaced["it is too small"] == 1


def test_what_stays_too_small_is_given_up_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragments, "why_too_small", lambda us, values, args: "it is too small")
    model = nn.Sequential(nn.Linear(60, 90), nn.Tanh(), nn.Linear(90, 60))
    baechi_ext.parallelize(model, devices=2, method="single", cache=False)
    for step in range(20):
        model(torch.ones(8, 60)).sum().backward()
        assert call_of(model).session.refusal == ("it is too small" if step >= 15 else "")
    assert "not placed; it is too small" in baechi_ext.report(model).line()


@pytest.mark.parametrize(("why", "searched"), [("", False), ("it is too small", False), ("it is too small", True)])
def test_a_run_that_ends_before_its_call_is_planned_comes_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, why: str, searched: bool
) -> None:
    monkeypatch.setenv("BAECHI_CACHE", str(tmp_path))
    model = nn.Sequential(nn.Linear(60, 90), nn.Tanh(), nn.Linear(90, 60))
    baechi_ext.parallelize(model, devices=2, method="single")
    for size in (8, 7):  # the last batch is smaller: either kind ran once
        model(torch.ones(size, 60)).sum().backward()
    held = call_of(model).session
    held.fragments[0].why_not, held._aside = why, Prepared([], None, 0.0) if searched else None
    held.conclude(ended=True)
    assert not (tmp_path / "verdicts").exists()


@pytest.mark.parametrize(("why", "calls", "kept"), [("it draws", 3, True), ("it is too small", 3, False), ("it is too small", 17, True)])
def test_what_is_known_of_all_of_a_module_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str, calls: int, *, kept: bool
) -> None:
    """A small batch at first, such as a trial's, is no reason."""
    monkeypatch.setenv("BAECHI_CACHE", str(tmp_path))
    monkeypatch.setattr(fragments, "why_too_small", lambda us, values, args: "it is too small")
    model = nn.Sequential(nn.Linear(60, 90), nn.Tanh(), nn.Linear(90, 60))
    baechi_ext.parallelize(model, devices=2, method="single")
    for _ in range(calls):
        model(torch.ones(8, 60)).sum().backward()
    held = call_of(model).session
    held.fragments[0].why_not = why
    held.conclude(ended=True)
    assert (tmp_path / "verdicts").exists() == kept


@pytest.mark.parametrize(("placed_us", "kept"), [(90.0, True), (110.0, False)])
def test_a_few_steps_do_not_tell_that_placing_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placed_us: float, *, kept: bool
) -> None:
    monkeypatch.setenv("BAECHI_CACHE", str(tmp_path))
    model = nn.Sequential(nn.Linear(60, 90), nn.Tanh(), nn.Linear(90, 60))
    baechi_ext.parallelize(model, devices=2, method="single")
    model(torch.ones(8, 60)).sum().backward()
    held = call_of(model).session
    held.lead._kind = SimpleNamespace(turns=Turns(placed_us=[placed_us], plain_us=[100.0]))
    held.conclude(ended=True)
    assert (tmp_path / "verdicts").exists() == kept


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, CaptureError])
def test_an_interrupted_plan_and_lack_of_memory_are_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fails(*_: object) -> None:
        raise error("now")

    monkeypatch.setenv("BAECHI_CACHE", str(tmp_path))
    monkeypatch.setattr(Session, "_captured", fails)
    model = nn.Sequential(nn.Linear(600, 900), nn.Tanh(), nn.Linear(900, 600))
    baechi_ext.parallelize(model, devices=2, method="single")
    model(torch.ones(128, 600)).sum().backward()
    with pytest.raises(KeyboardInterrupt) if error is KeyboardInterrupt else nullcontext():
        model(torch.ones(128, 600))
    call_of(model).session.conclude(ended=True)
    assert (tmp_path / "verdicts").exists() == (error is CaptureError)


class Unwilling(nn.Linear):
    def extra_repr(self) -> str:
        raise ValueError("it has no description yet")


def test_of_a_module_that_can_not_be_described_nothing_is_known(tmp_path: Path) -> None:
    request = TrainRequest("a script", pipeline.PlanRequest(), cache=tmp_path)
    experience = Experience(request, cpu_devices(2), Unwilling(3, 3), ((torch.ones(2, 3),), {}))
    experience.keep(Verdict(False, "it is too small"))
    assert experience.why_not() == ("", 0)
    assert not list(tmp_path.iterdir())


def test_buffers_without_shapes_wait_for_the_first_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAECHI_CACHE", str(tmp_path))
    model = nn.Sequential(nn.Linear(600, 900), nn.LazyBatchNorm1d(affine=False), nn.Linear(900, 600))
    baechi_ext.parallelize(model, devices=2, method="single")
    for _ in range(4):
        model(torch.ones(128, 600)).sum().backward()
    assert "its parameters had no shapes yet" in call_of(model).session.unplaced
    assert baechi_ext.report(model).placed_steps + baechi_ext.report(model).setup_seconds > 0


def test_a_verdict_leaves_out_what_the_next_run_finds_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAECHI_CACHE", str(tmp_path))
    model = nn.Sequential(nn.Linear(600, 900), nn.Tanh(), nn.Linear(900, 600))
    baechi_ext.parallelize(model, devices=2, method="single")
    for _ in range(4):
        model(torch.ones(128, 600)).sum().backward()
    took, planning = baechi_ext.report(model).setup_seconds, call_of(model).session.groups[0].planning_seconds
    (verdict,) = (json.loads(file.read_text()) for file in (tmp_path / "verdicts").glob("*.json"))
    assert 0 < verdict["setup_seconds"] == pytest.approx(took - planning)
    assert planning > 0


def test_ops_of_a_step_are_counted_once() -> None:
    x = torch.ones(3, requires_grad=True)
    twice = x * 2
    assert backward_ops([twice.exp(), twice.sin(), torch.ones(3)]) == 3
    assert backward_ops([twice.exp(), twice.sin().cos(), torch.ones(3)], [x, twice, torch.ones(3)]) == 3
    assert backward_ops([twice, twice.exp()], [twice]) == 1


def test_what_is_too_small() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x
    for _ in range(MANY_OPS):
        y = y + 1
    long = MANY_OPS * TINY_OP_US
    assert why_too_small(SMALL_US - 1, [x.exp()]) == "it is too small to gain: its forward pass takes 199 us"
    assert why_too_small(SMALL_US, [x.exp()]) == ""
    assert why_too_small(long, [y]) == ""
    assert why_too_small(long / 2, [y.exp().sin()], [y, 3]) == ""  # what comes before it is not its own
    assert why_too_small(long / 2, [y, 3, None]) == "its ops are too small to gain: 1000 with a gradient, 25 us each in the forward pass"


def test_a_verdict_is_for_the_same_numbers_and_autocast() -> None:
    """An attribute or an argument may say how often a shared block runs."""

    def parts(times: int, *more: object) -> list[object]:
        module = nn.Sequential(nn.Linear(4, 4))
        module.times = times
        return _parts(module, ((torch.zeros(2, 4), *more), {}))

    assert parts(1) == parts(1)
    with torch.autocast("cpu", torch.bfloat16):
        under = parts(1)
    found = [parts(1), parts(200), parts(1, 3), parts(1, 300), parts(1, None), under]
    assert len({str(each) for each in found}) == len(found)
