"""What `baechi train` is asked for, whichever framework computes it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baechi_ext.ir import Cluster, Link
from baechi_ext.ir.made_by import MadeBy
from runtime import pipeline
from runtime.models.registry import ModelOptions

if TYPE_CHECKING:
    from runtime.training_run import RunOptions


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """One run of the main job. None: the default, or what a probe finds."""

    model: str
    plan: pipeline.PlanRequest
    model_options: ModelOptions = field(default_factory=ModelOptions)
    optimizer: str = "sgd"
    learning_rate: float = 0.01
    colocate_grads_with_ops: bool = False
    relaxed_random: bool = False
    num_devices: int = 2
    cuda: bool = False
    cuda_graphs: bool = False
    split_gpu: bool = False
    """The devices are parts of the first GPU."""
    use_free_memory: bool = False
    workers: str = "thread"
    """thread: this process runs all devices; process: it is one of a group of workers (runtime.processes.worker_group)."""
    cluster: Cluster | None = None
    device_memory: int | None = None
    memory_fraction: float = 1.0
    link: Link | None = None
    comm_cost_factor: float = 1.0
    cost_path: str | None = None
    """Where costs are read from, or written to with `costgen`."""
    costgen: bool = False
    num_steps: int = 15
    timeout_seconds: float = 300.0
    out: str | None = None
    log_device_placement: bool = False
    run: "RunOptions | None" = None
    """Where given, the placed model is trained; otherwise its step is timed."""
    sharding: tuple[str, ...] = ()
    """Strategies by name, or shard plan files: the step is split by these, instead of placed."""
    mesh: tuple[int, ...] | None = None
    """Of the processes it is split over; None: their count's prime factors."""
    framework: str = "torch"
    cluster_hosts: tuple[str, ...] | None = None
    """TensorFlow: host:port of each device's server."""
    task_index: int = 0
    """Which of them this process starts; the first one drives."""
    command: tuple[str, ...] = ()
    """What was called, word by word; empty where it was no command."""

    @property
    def made_by(self) -> MadeBy:
        """What signs this run's files; its versions are of what is loaded by now."""
        return MadeBy(self.command)

    @property
    def costs_file(self) -> str:
        """Where `costgen` writes."""
        return self.cost_path or "cost.json"


@dataclass(frozen=True)
class ScriptRequest:
    """A script, its arguments, and how its model is to be placed."""

    path: str
    arguments: tuple[str, ...]
    request: TrainRequest
    verify_steps: int = 2
    fallback: bool = False
