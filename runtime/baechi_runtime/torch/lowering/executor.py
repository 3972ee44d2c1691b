"""The protocol of executors: ThreadExecutor, whose devices are threads, and ProcessExecutor, whose devices are processes."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from baechi_ext.capture.torch_joint import Binding
from baechi_ext.simulate import Timeline
from baechi_runtime.files.checkpoint_folder import Shard
from baechi_runtime.measure.device_speeds import Pace
from baechi_runtime.measure.link_probe import PROBE_BYTES, LinkProbe
from baechi_runtime.measure.recording import Recording
from baechi_runtime.measure.timing import StepTimes
from baechi_runtime.models.training_step import TrainingStep
from baechi_runtime.torch.lowering.devices import TorchDevice

T = TypeVar("T")


class LoadedStep(Protocol):
    """One plan, loaded; `run` does one training step."""

    step: TrainingStep

    def run(self) -> tuple[torch.Tensor, StepTimes]:
        """The loss and the times of one step."""

    def gather(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The last step's gradients, where they were kept, and the parameters and buffers as they are now, by name."""

    @property
    def random_device(self) -> TorchDevice:
        """The device whose generator the step's random numbers are drawn from, one after the other."""

    def save(self, folder: Path) -> list[Shard]:
        """Every device writes what lives there into the folder: its shard of a checkpoint."""

    def restore(self, checkpoint: Path, shards: Sequence[Shard]) -> None:
        """Takes up the parameters, buffers and optimizer state of a checkpoint, which may be of another plan. Raises CheckpointError."""

    def peak_bytes(self) -> tuple[int, ...]:
        """Peak bytes of every device during one step; see baechi_runtime.torch.threads.accounting."""

    def record(self) -> Recording:
        """A few more steps, recorded; see baechi_runtime.torch.threads.step_recorder."""


class Executor(Protocol):
    """Devices that run placed steps. Device 0 also runs functions: profiling, and the unplaced step."""

    devices: tuple[TorchDevice, ...]
    timeout_seconds: float
    shared_memory: bool
    """True if all devices are in one process."""

    def call(self, device: int, function: Callable[[], T]) -> T:
        """Runs a function on a device and returns its value."""

    def memory_bytes(self) -> list[int]:
        """Bytes that each device may hold."""

    def cpu_seconds(self) -> float:
        """CPU time that all processes of this executor have used."""

    def probe_link(self, source: int = 0, target: int = 1, sizes: Sequence[int] = PROBE_BYTES) -> LinkProbe:
        """The link between two devices, from transfers of `sizes` bytes."""

    def paces(self, windows: int, window_seconds: float) -> list[Pace]:
        """The pace of each device while all are at work."""

    def keep_busy(self, companions: int, timeline: Timeline, binding: Binding, step: TrainingStep) -> AbstractContextManager[None]:
        """While it is entered, that many of the devices other than 0 run `timeline`, a step on one device, each its own, over and over."""

    def load(self, timeline: Timeline, binding: Binding, step: TrainingStep, *, keep_gradients: bool = False) -> LoadedStep:
        """The step, placed as the timeline says."""
