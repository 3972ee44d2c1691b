"""Every built-in model on 2 real worker processes, and most on 1 and 4, compute bit for bit, step after step, what plain PyTorch does."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.models_on_processes import STEPS
from tests.torch_steps import SMALL_MODELS

ROOT = Path(__file__).parents[2]


FEWER = [name for name in SMALL_MODELS if name not in ("nasnet", "resnet101")]
"""What 1 and 4 processes run: these two have no structure that inception_v3 has not, and each process captures its thousands of ops."""
RUNS = [*((1, name) for name in FEWER), *((2, name) for name in SMALL_MODELS), *((4, name) for name in FEWER)]


@pytest.fixture(scope="module")
def found_on() -> Callable[[int], dict[str, Any]]:
    """What one group of so many workers found for all its models."""
    return cache(lambda num_devices: on_processes(num_devices, *(name for size, name in RUNS if size == num_devices)))


def on_processes(num_devices: int, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.runtime.models_on_processes", str(num_devices), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("num_devices", "flags"), [(2, []), (3, ["--rendezvous"])])
def test_parity_without_tags(num_devices: int, flags: list[str]) -> None:
    """All tensors have one tag, so the order of sends and receives alone tells them apart, as NCCL does; no process waits for ever even
    where each waits for every end of a transfer."""
    found = on_processes(num_devices, "--untagged", *flags, "wide_towers", "gnmt_v2")
    for name in ("wide_towers", "gnmt_v2"):
        parity = found[name]["parity"]
        assert set(parity) == {"m_etf", "scattered 1", "scattered 2", "scattered 3"}
        assert {(p["passed"], p["max_abs_diff"]) for p in parity.values()} == {(True, 0.0)}
        assert found[name]["losses"]["placed"] == found[name]["losses"]["eager"]


@pytest.mark.parametrize(("num_devices", "name"), RUNS)
def test_parity(found_on: Callable[[int], dict[str, Any]], num_devices: int, name: str) -> None:
    """Loss, every gradient, buffer and updated parameter."""
    model = found_on(num_devices)[name]
    assert len(model["parity"]) == 2
    for method, parity in model["parity"].items():
        assert (parity["passed"], parity["max_abs_diff"]) == (True, 0.0), (method, parity)
        assert parity["compared"] > len(model["trained_alike"])
        assert model["devices"][method] == list(range(num_devices))


@pytest.mark.parametrize(("num_devices", "name"), RUNS)
def test_twenty_steps(found_on: Callable[[int], dict[str, Any]], num_devices: int, name: str) -> None:
    model = found_on(num_devices)[name]
    losses = model["losses"]["eager"]
    assert model["losses"]["placed"] == losses
    assert len(losses) == STEPS
    assert len(set(losses)) >= 8
    assert losses[-1] < losses[0]
    assert [n for n, alike in model["trained_alike"].items() if not alike] == []
