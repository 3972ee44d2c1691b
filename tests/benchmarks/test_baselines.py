"""The baselines of torch itself do real steps: the loss of the whole batch, and memory of their own."""

import pytest
import torch

from baechi_runtime.drivers import pipeline
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.models.registry import MODELS, ModelOptions, make_step
from baechi_runtime.models.training_step import EagerStep, optimizer_spec
from baechi_runtime.torch.lowering.devices import cpu_devices
from benchmarks.baselines import DDP, NO_STAGES, PIPELINE, Baseline, reason_against


@pytest.mark.parametrize("kind", [DDP, PIPELINE])
def test_two_workers_train_the_model(kind: str) -> None:
    """Dropout draws other numbers there, so there is none; BatchNorm would see parts of the batch, so the model has none."""
    options = ModelOptions(batch_size=4, image_size=63, dropout=0.0)
    request = TrainRequest("alexnet", pipeline.PlanRequest(), options, learning_rate=0.05, timeout_seconds=200)
    step = make_step("alexnet", options, optimizer_spec("sgd", 0.05))
    eager = EagerStep(step, torch.device("cpu"))
    with Baseline(kind, request, cpu_devices(2)) as baseline:
        for _ in range(2):
            loss, times = baseline.run()
            expected = eager.run()
            if kind == PIPELINE:  # rank 0 of DistributedDataParallel knows the loss of its half alone
                torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
            assert times.wall_us > 0
            assert len(times.busy_us) == 2
        assert all(peak > 2**20 for peak in baseline.peak_bytes())
        assert baseline.cpu_seconds() > 0


def test_why_a_baseline_cannot_run() -> None:
    assert set(NO_STAGES) <= set(MODELS)
    step = make_step("transformer", ModelOptions(num_layers=1, d_model=8, d_ff=8, vocab_size=9), optimizer_spec("sgd", 0.1))
    assert "embedding" in reason_against(PIPELINE, step, 2)
    assert reason_against(DDP, step, 2) is None
    odd = make_step("alexnet", ModelOptions(batch_size=3, image_size=63), optimizer_spec("sgd", 0.1))
    assert reason_against(PIPELINE, odd, 2) == "its batch of 3 does not divide into 4 microbatches"
    assert reason_against(PIPELINE, odd, 4) == "it is cut into two stages here, not 4"
    assert reason_against(DDP, odd, 2) == "a batch of 3 does not divide among 2 workers"
