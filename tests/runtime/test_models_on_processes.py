"""The built-in models on 1, 2 and 4 real worker processes compute bit for bit, step after step, what plain PyTorch does."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.runtime.forked_workers import ForkedWorkers
from tests.runtime.models_on_processes import STEPS
from tests.torch_steps import SMALL_MODELS

MODULE = "models_on_processes"
LARGE = ("inception_v3", "nasnet", "resnet101")
"""Models of thousands of ops, which take minutes to capture in each process. On 2 processes Inception is run each time; the others,
which have no structure that it lacks, are `slow`, and so is whatever runs on 1, which sends nothing, and Inception on 4. A small model is
run on 2, and every second one on 4."""
SMALL = [name for name in SMALL_MODELS if name not in LARGE]
RUNS = [(n, name) for n in (1, 2, 4) for name in SMALL_MODELS if name == "inception_v3" or name not in LARGE or n == 2]
EACH_TIME = {(2, "inception_v3"), *((2, name) for name in SMALL), *((4, name) for name in SMALL[::2])}
each_run = pytest.mark.parametrize(
    ("num_devices", "name"), [pytest.param(*run, marks=() if run in EACH_TIME else pytest.mark.slow) for run in RUNS]
)


@pytest.fixture(scope="module")
def found_on(workers: ForkedWorkers) -> Callable[[int, str], dict[str, Any]]:
    """The findings for a model: one group of this many workers for all the small ones, and one for each of the large."""
    found = cache(lambda num_devices, *names: json.loads(workers.run(MODULE, num_devices, *names)))
    return lambda num_devices, name: found(num_devices, *([name] if name in LARGE else _together(num_devices, name)))[name]


def _together(num_devices: int, name: str) -> list[str]:
    """The small models that are run beside this one: those of each time, or the others."""
    return [other for other in SMALL if ((num_devices, other) in EACH_TIME) == ((num_devices, name) in EACH_TIME)]


@pytest.mark.parametrize(("num_devices", "flags"), [pytest.param(2, [], marks=pytest.mark.slow), (3, ["--rendezvous"])])
def test_parity_without_tags(workers: ForkedWorkers, num_devices: int, flags: list[str]) -> None:
    """All tensors have one tag, so the order of sends and receives alone tells them apart, as NCCL does; no process waits for ever even
    where each waits for every end of a transfer."""
    found = json.loads(workers.run(MODULE, num_devices, "--untagged", *flags, "wide_towers", "gnmt_v2"))
    for name in ("wide_towers", "gnmt_v2"):
        parity = found[name]["parity"]
        assert set(parity) == {"m_etf", "scattered 1", "scattered 2", "scattered 3"}
        assert {(p["passed"], p["max_abs_diff"]) for p in parity.values()} == {(True, 0.0)}
        assert found[name]["losses"]["placed"] == found[name]["losses"]["eager"]


@each_run
def test_parity(found_on: Callable[[int, str], dict[str, Any]], num_devices: int, name: str) -> None:
    """Loss, every gradient, buffer and updated parameter."""
    model = found_on(num_devices, name)
    assert len(model["parity"]) == 2
    for method, parity in model["parity"].items():
        assert (parity["passed"], parity["max_abs_diff"]) == (True, 0.0), (method, parity)
        assert parity["compared"] > len(model["trained_alike"])
        assert model["devices"][method] == list(range(num_devices))


@each_run
def test_twenty_steps(found_on: Callable[[int, str], dict[str, Any]], num_devices: int, name: str) -> None:
    model = found_on(num_devices, name)
    losses = model["losses"]["eager"]
    assert model["losses"]["placed"] == losses
    assert len(losses) == STEPS
    assert len(set(losses)) >= 8
    assert losses[-1] < losses[0]
    assert [n for n, alike in model["trained_alike"].items() if not alike] == []
