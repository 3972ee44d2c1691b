"""Every built-in model on 1, 2 and 4 real worker processes computes, bit for bit, what plain PyTorch computes, step after step."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.models_on_processes import STEPS
from tests.torch_steps import SMALL_MODELS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=[1, 2, 4])
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What one group of workers found for all models; "num_devices" besides."""
    return on_processes(request.param, *SMALL_MODELS)


def on_processes(num_devices: int, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.runtime.models_on_processes", str(num_devices), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "num_devices": num_devices}


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


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_parity(found: dict[str, Any], name: str) -> None:
    """Loss, every gradient, buffer and updated parameter."""
    model = found[name]
    assert len(model["parity"]) == 2
    for method, parity in model["parity"].items():
        assert (parity["passed"], parity["max_abs_diff"]) == (True, 0.0), (method, parity)
        assert parity["compared"] > len(model["trained_alike"])
        assert model["devices"][method] == list(range(found["num_devices"]))


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_twenty_steps(found: dict[str, Any], name: str) -> None:
    model = found[name]
    losses = model["losses"]["eager"]
    assert model["losses"]["placed"] == losses
    assert len(losses) == STEPS
    assert len(set(losses)) >= 8
    assert losses[-1] < losses[0]
    assert [n for n, alike in model["trained_alike"].items() if not alike] == []
