"""DistributedDataParallel in workers of its own does real steps: the loss is the whole batch's, step after step."""

import torch

from baechi_runtime.drivers.pipeline import PlanRequest
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.models.registry import ModelOptions
from baechi_runtime.models.training_step import EagerStep
from baechi_runtime.torch.backend import build_step
from baechi_runtime.torch.lowering.devices import cpu_devices
from benchmarks.data_parallel import DataParallel


def test_two_workers_train_the_model() -> None:
    """Dropout draws other numbers there, so there is none; BatchNorm would see parts of the batch, so the model has none."""
    options = ModelOptions(batch_size=4, vocab_size=60, max_seq_length=6, num_layers=1, d_model=32, num_heads=4, dropout=0.0)
    request = TrainRequest("transformer", PlanRequest(), options, learning_rate=0.05, timeout_seconds=200)
    eager = EagerStep(build_step(request), torch.device("cpu"))
    with DataParallel(request, cpu_devices(2)) as workers:
        for _ in range(2):
            loss, times = workers.run()
            torch.testing.assert_close(loss, eager.run(), rtol=1e-4, atol=1e-4)
            assert times.wall_us > 0
            assert len(times.busy_us) == 2
