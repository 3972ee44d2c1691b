"""The settings of a session."""

from dataclasses import dataclass

from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.torch.calls.workers import Workers
from baechi_runtime.torch.threads.executor import ThreadExecutor


@dataclass(frozen=True)
class Settings:
    """The settings for placing a module's calls."""

    request: TrainRequest
    executor: ThreadExecutor | Workers
    verify_steps: int = 2
    strict: bool = False
    """Raise an error for what cannot be placed; otherwise it runs as it is, and that is said once."""
    keep_placed: bool = False
    """Stay placed without asking whether that is faster."""
    record: bool = False
    """Record some calls; see baechi_runtime.torch.calls.recording."""
