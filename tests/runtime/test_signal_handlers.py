"""Exceptions of a script's own signal handlers reach the script, wherever its module's call is: SIGALRM where its time is up."""

import signal
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import baechi_ext
from baechi_ext.capture import torch_guards
from baechi_ext.errors import CaptureError
from baechi_runtime.host.interrupts import raise_if_asked_for
from baechi_runtime.torch.calls import session
from baechi_runtime.torch.calls.dynamo_backend import baechi

QUICK = {"devices": 2, "method": "random", "keep_placed": True}


class OverError(Exception):
    """The time is up."""


def end(kind: type[Exception], number: int, frame: FrameType | None) -> None:
    raise kind("time is up")


@pytest.fixture
def ended_by() -> Iterator[Callable[[type[Exception]], None]]:
    """Has SIGALRM raise this. TorchDynamo forgets other tests' modules: with torch 2.11 it traces those of one class eight times in all."""
    torch.compiler.reset()
    before = signal.getsignal(signal.SIGALRM)
    yield lambda kind: signal.signal(signal.SIGALRM, partial(end, kind))
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def placed_step(width: int) -> tuple[nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    model = baechi_ext.parallelize(nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64)), **QUICK)
    return model, lambda: model(torch.randn(64, 64)).square().mean().backward()


@pytest.mark.parametrize("kind", [TimeoutError, OverError])
def test_while_a_placed_call_waits_for_its_devices(kind: type[Exception], ended_by: Callable[[type[Exception]], None]) -> None:
    """TimeoutError is what waiting for a device raises, too."""
    model, step = placed_step(8192)
    for _ in range(4):
        step()
    ended_by(kind)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 1.0)
    with pytest.raises(kind, match="time is up"):
        for _ in range(1000):
            step()
    signal.setitimer(signal.ITIMER_REAL, 0)
    step()
    assert baechi_ext.report(model).refusal == ""


@pytest.mark.parametrize("place", [(session, "place_call"), (session.Session, "backend")], ids=["profile and search", "trace"])
@pytest.mark.parametrize("kind", [TimeoutError, OverError])
def test_while_a_call_is_traced_and_placed(
    kind: type[Exception], place: tuple[Any, str], ended_by: Callable[[type[Exception]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = place
    real = getattr(owner, name)

    def alarmed(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGALRM)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, alarmed)
    ended_by(kind)
    model, step = placed_step(64)
    with pytest.raises(kind, match="time is up"):
        for _ in range(3):
            step()
    for _ in range(3):
        step()
    assert (baechi_ext.report(model).refusal, baechi_ext.report(model).placed_steps > 0) == ("", True)


@pytest.fixture
def alarm_in_a_guard(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has the next guard of ours be checked while an alarm comes."""

    def alarmed(*_: Any) -> bool:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGALRM)
        return True

    return lambda: monkeypatch.setattr(torch_guards._Hooks, "__call__", alarmed)  # noqa: SLF001


@pytest.mark.parametrize("kind", [TimeoutError, OverError])
def test_while_guards_of_a_placed_call_are_checked(
    kind: type[Exception], ended_by: Callable[[type[Exception]], None], alarm_in_a_guard: Callable[[], None]
) -> None:
    ended_by(kind)
    model, step = placed_step(64)
    for _ in range(4):
        step()
    alarm_in_a_guard()
    with pytest.raises(kind, match="time is up"):
        step()
    before = baechi_ext.report(model).placed_steps
    for _ in range(3):  # TorchDynamo has traced it once more
        step()
    assert (baechi_ext.report(model).refusal, baechi_ext.report(model).placed_steps > before) == ("", True)


def test_while_guards_of_a_compiled_model_are_checked(
    ended_by: Callable[[type[Exception]], None], alarm_in_a_guard: Callable[[], None]
) -> None:
    """By its name the backend belongs to no call of ours, which would ask once it has ended."""
    ended_by(TimeoutError)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    compiled = torch.compile(model, backend=baechi, options={**QUICK, "seed": 7})
    for _ in range(4):
        compiled(torch.randn(8, 8)).square().mean().backward()
    alarm_in_a_guard()
    with pytest.raises(TimeoutError, match="time is up"):
        compiled(torch.randn(8, 8))
    compiled(torch.randn(8, 8)).square().mean().backward()


def test_what_a_script_is_handling_already_is_not_raised_again(
    ended_by: Callable[[type[Exception]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended_by(TimeoutError)
    model, step = placed_step(64)
    monkeypatch.setattr(session, "place_call", _not_placed)
    try:
        signal.raise_signal(signal.SIGALRM)
    except TimeoutError:
        for _ in range(3):
            step()
    assert baechi_ext.report(model).refusal == "not this time"


def _not_placed(*_: Any, **__: Any) -> None:
    raise CaptureError("not this time")


def test_other_errors_are_not_taken_for_a_handlers(ended_by: Callable[[type[Exception]], None]) -> None:
    ended_by(OverError)
    error, other = OverError("of no signal"), OverError("nor this")
    error.__cause__, other.__cause__ = other, error
    raise_if_asked_for(error)
