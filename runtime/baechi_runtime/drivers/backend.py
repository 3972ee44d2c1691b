"""The protocol that all devices implement: capture, apply, check, run; and of those that run placed steps also profile, record and account
memory. The drivers know nothing else of them.

Opened and closed by `on_devices` of baechi_runtime.torch.backend (threads, processes, CUDA), of baechi_runtime.tensorflow.backend
(servers, logical devices, GPUs) and of baechi_runtime.sharding.training (groups that split a step), and `with_call` of
baechi_runtime.torch.calls.call_backend (a script's call).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from baechi_ext.cost import Profile
from baechi_ext.errors import ExecutionError
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.ir.measured import MeasuredStep
from baechi_ext.simulate import Timeline
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.files.checkpoint_folder import Shard
from baechi_runtime.measure.link_probe import LinkProbe
from baechi_runtime.measure.parity_result import Parity
from baechi_runtime.measure.samples import Measurement

S = TypeVar("S")
"""A captured step."""
P = TypeVar("P", contravariant=True)
"""A plan of it."""
L = TypeVar("L")
"""A plan that is loaded."""


@dataclass(frozen=True)
class Captured:
    """A training step with its costs; a backend adds the step itself."""

    graph: OpGraph
    """With the costs of a device beside others at work, where there are others."""
    alone: OpGraph
    """With the costs of a device that works alone."""
    profile: Profile

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for reports on how it was captured."""
        return ()

    @property
    def batch(self) -> int | None:
        """The number of examples in a step's batch, where that is known."""
        return None

    @property
    def microbatches(self) -> tuple[int, ...] | None:
        """The sizes of the parts of the batch that have ops of their own; None: it is captured as a whole."""
        return None

    @property
    def seeded_ops(self) -> int:
        """The number of ops that draw random numbers in a fixed order."""
        return 0


class Trained(Protocol):
    """A loaded step of any framework's, as a training takes it."""

    random_state: str = ""
    """The state of the random generator, as text. Setting it raises CheckpointError for what is no such state."""

    def begin(self) -> None:
        """Before the first step of all: random numbers begin anew."""

    def run(self) -> tuple[float, float]:
        """One step: its loss, and its wall time in microseconds."""

    def save(self, folder: Path) -> list[Shard]:
        """Writes what lives on every device into the folder, a shard each."""
        raise ExecutionError("the steps of these devices are not kept")

    def restore(self, checkpoint: Path, shards: Sequence[Shard]) -> None:
        """Takes up a checkpoint, which may be of another plan. Raises CheckpointError."""
        raise ExecutionError("the steps of these devices are not kept")


class Splitting(Protocol[S]):
    """A source of captured steps, which can capture its request's again over parts of the batch."""

    request: TrainRequest

    def in_parts(self, captured: S, parts: int | Sequence[int], /) -> S:
        """The captured step over so many parts of its batch, or parts of these sizes, with their costs. Raises CaptureError where the batch
        can't be split, and what `capture` raises."""


class Backend(Protocol[S, P, L]):
    """The devices of one run, and steps on them by plans. Everything that fails on them raises ExecutionError, naming the device and the
    op."""

    request: TrainRequest
    unplaced: str
    """The name that reports give to the step without a plan."""

    def capture(self) -> S:
        """The request's model, with costs.

        Raises CaptureError, ProfileError, MismatchError; and first what the request's hints and pins raise.
        """

    def load(self, captured: S, plan: P, /) -> L:
        """The step by a plan, with its first values. Raises ExecutionError."""

    def check(self, captured: S, plan: P, /) -> Parity | None:
        """The parity of one step by a plan with the unplaced one; None where no second run draws the same random numbers. The step's state
        is put back. Raises ExecutionError, and ParityError where the backend knows that rounding does not explain the difference."""

    def measure(self, captured: S, loaded: Mapping[str, L], num_steps: int, on_step: Callable[[int], None]) -> Measurement:
        """Times `num_steps` rounds of the unplaced step and one of each loaded one; `on_step` is called with each round's number."""


class PlacingBackend(Backend[S, Timeline, L], Splitting[S], Protocol[S, L]):
    """Devices that run placed steps. Their costs are read from `cost_path` or measured on device 0. With `alone` a step is one that others
    are compared with, on one device."""

    kind: str
    """The name that reports give to what runs the devices."""
    peaks_measured_by: str
    """The source of peak memory: "allocator", "system", "accounting" or "none"."""

    def cluster(self) -> tuple[Cluster, LinkProbe | None]:
        """The devices as the placer sees them, and the link probe, where one was needed. Raises ClusterError."""

    def load(self, captured: S, plan: Timeline, /, *, alone: bool = False) -> L:
        """See Backend."""

    def check(self, captured: S, plan: Timeline, /, *, alone: bool = False) -> Parity | None:
        """See Backend."""

    def compiled(self, captured: S, /) -> tuple[Any, Parity | None, str]:
        """The unplaced step as the framework's own compiler makes it, to be timed beside loaded ones; its parity, None where it draws other
        random numbers; and a note on the compiling. Raises ExecutionError where it can't be compiled."""
        raise ExecutionError("the steps of these devices are not compiled")

    def rehearsed_us(self, captured: S, plan: Timeline, /) -> float:
        """Microseconds of a placed step, predicted by a few real ones; the step's state is put back. Raises ExecutionError."""
        raise ExecutionError("the steps of these devices are not rehearsed")

    def peak_bytes(self, captured: S, plan: Timeline, /, *, alone: bool = False) -> tuple[int, ...]:
        """Peak bytes that each device holds in a real step, which is run for it; empty where nothing tells. Raises ExecutionError, also
        where a part of a GPU held more than its limit."""

    def record(self, captured: S, loaded: L) -> MeasuredStep:
        """A further step of a loaded plan, op by op. The state goes on with it. Raises CaptureError where it can't be told op by op."""

    def notes(self, loaded: L) -> Sequence[str]:
        """Notes for reports on the devices and on what is loaded there."""


class TrainingBackend(PlacingBackend[S, L], Protocol):
    """Devices that train the steps placed on them: updates are parts of these."""

    def trained(self, loaded: L) -> Trained:
        """The loaded step as a training takes it."""

    def arithmetic(self) -> str:
        """The kind of device that decides how results round; a checkpoint is resumed on the same kind."""
