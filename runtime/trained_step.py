"""A placed step of PyTorch's, as a training takes it."""

from collections.abc import Sequence
from pathlib import Path

import torch

from runtime.checkpoint_folder import Shard
from runtime.executor import LoadedStep
from runtime.random_state import decoded, encoded


class TrainedStep:
    """See runtime.training_run.Trained."""

    def __init__(self, placed: LoadedStep) -> None:
        self._placed = placed

    @property
    def random_state(self) -> str:
        return encoded(self._placed.random_device.random_state())

    @random_state.setter
    def random_state(self, text: str) -> None:
        self._placed.random_device.set_random_state(decoded(text))

    def begin(self) -> None:
        torch.manual_seed(self._placed.step.seed)

    def run(self) -> tuple[float, float]:
        loss, times = self._placed.run()
        return loss.item(), times.wall_us

    def save(self, folder: Path) -> list[Shard]:
        return self._placed.save(folder)

    def restore(self, checkpoint: Path, shards: Sequence[Shard]) -> None:
        self._placed.restore(checkpoint, shards)
