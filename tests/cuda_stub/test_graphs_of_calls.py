"""Graphs of placed calls amid a user's own work on the devices, which get to their work in any order."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from baechi_runtime.torch.calls.graphed import GraphedFragment
from baechi_runtime.torch.streams.step_graph import CudaRecorder
from tests.cuda_stub import kernels
from tests.runtime.graphed_loops import fragment_of, ordinary, pair, siamese, train

devices = pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0", "cuda:1"]], ids=["one GPU", "two GPUs"])
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method")


@pytest.fixture(autouse=True)
def _traced_anew() -> None:
    torch.compiler.reset()


def losses(devices: list[str], loop: Callable[..., Any], seed: int) -> tuple[list[float], list[float]]:
    """Those of a module as it is, and of the same placed, whose devices work in an order by chance."""
    plain, placed = pair(devices)
    expected = train(plain, loop)
    kernels.order(seed)
    return expected, train(placed, loop)


@devices
@pytest.mark.parametrize("loop", [ordinary, siamese])
@pytest.mark.parametrize("seed", [1, 2])
def test_losses_are_the_same_in_any_order(devices: list[str], loop: Callable[..., Any], seed: int) -> None:
    expected, found = losses(devices, loop, seed)
    assert found == pytest.approx(expected, rel=1e-4)


@devices
def test_a_forgotten_wait_would_be_found(devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = GraphedFragment._replayed

    def forgetful(self: GraphedFragment, *given: Any) -> Any:
        with monkeypatch.context() as within:
            within.setattr(GraphedFragment, "_callers_streams", lambda _: [])
            return replayed(self, *given)

    monkeypatch.setattr(GraphedFragment, "_replayed", forgetful)
    try:
        expected, found = losses(devices, ordinary, 1)
    except Exception:  # noqa: BLE001 - of a verified call, or of a kernel, whose operand is nonsense
        return
    assert found != pytest.approx(expected, rel=1e-4)


@devices
def test_passes_that_cannot_be_captured_run_op_by_op(devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(self: CudaRecorder, work: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(CudaRecorder, "capture", capture)
    plain, placed = pair(devices)
    assert train(placed, ordinary) == pytest.approx(train(plain, ordinary), rel=1e-4)
    assert fragment_of(placed).note == "no CUDA graphs of its passes: operation not permitted when stream is capturing"
