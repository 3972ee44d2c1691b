"""The request that `baechi train` makes, whichever framework computes it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from baechi_ext.ir import Cluster, Link
from baechi_ext.ir.made_by import MadeBy
from baechi_runtime.drivers import pipeline
from baechi_runtime.models.registry import ModelOptions

WorkerKind = Literal["thread", "process"]
Framework = Literal["torch", "tensorflow"]
_OF_PLACING = ("framework", "workers", "num_devices", "cuda", "cuda_graphs", "split_gpu", "use_free_memory", "cluster_hosts") + (
    "device_memory",
    "memory_fraction",
    "comm_cost_factor",
    "colocate_grads_with_ops",
    "relaxed_random",
    "microbatches",
    "batch_norm_per_part",
    "cost_path",
)


@dataclass(frozen=True, slots=True)
class RunOptions:
    steps: int
    """Where to stop, counted from the training's first step."""
    checkpoint: str | None = None
    """A folder; None: no checkpoints."""
    checkpoint_every: int = 100
    resume: bool = False
    command: tuple[str, ...] = ()
    """The command line, word by word, for the checkpoints."""
    keeps_parts: bool = False
    """Go on with the parts of the batch that the checkpoint has, as nobody names any."""


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
    microbatches: tuple[int, ...] | int | None = 1
    """The parts that a batch is split into: how many, or their sizes; None: as many as are best."""
    batch_norm_per_part: bool = False
    """BatchNorm may normalise over each part of the batch by itself."""
    num_devices: int = 2
    cuda: bool = False
    cuda_graphs: bool = False
    compile: bool = False
    """The unplaced step is measured under the framework's compiler, too."""
    split_gpu: bool = False
    """The devices are parts of the first GPU."""
    use_free_memory: bool = False
    workers: WorkerKind = "thread"
    """thread: this process runs all devices; process: it is one of a group of workers (baechi_runtime.torch.processes.worker_group)."""
    cluster: Cluster | None = None
    device_memory: int | None = None
    device_speeds: tuple[float, ...] | None = None
    """One for all devices, or one each."""
    memory_fraction: float = 1.0
    link: Link | None = None
    comm_cost_factor: float = 1.0
    cost_path: str | None = None
    """Where costs are read from, or written to with `costgen`."""
    cache: Path | None = None
    """The folder in which a script's plans are kept for later runs, and looked for first; None: they are not."""
    costgen: bool = False
    num_steps: int = 15
    timeout_seconds: float = 300.0
    out: str | None = None
    log_device_placement: bool = False
    run: RunOptions | None = None
    """Where given, the placed model is trained; otherwise its step is timed."""
    sharding: tuple[str, ...] = ()
    """Strategies by name, or shard plan files: the step is split by these, instead of placed."""
    mesh: tuple[int, ...] | None = None
    """The mesh of the processes it is split over; None: their count's prime factors."""
    framework: Framework = "torch"
    cluster_hosts: tuple[str, ...] | None = None
    """TensorFlow: host:port of each device's server."""
    task_index: int = 0
    """Which of them this process starts; the first one drives."""
    command: tuple[str, ...] = ()
    """The command line, word by word; empty where it was no command."""

    @property
    def made_by(self) -> MadeBy:
        """The signature of this run's files; its versions are of what is loaded by now."""
        return MadeBy(self.command)

    @property
    def limits_memory(self) -> bool:
        """True if devices may hold less than the machine has."""
        given = () if self.cluster is None else self.cluster.devices
        return self.device_memory is not None or self.memory_fraction < 1 or any(d.memory_bytes is not None for d in given)

    @property
    def reads_files(self) -> bool:
        """True if costs, hints or a plan come from files, which may change between runs."""
        return self.cost_path is not None or self.plan.initial_plan is not None or self.plan.expert_file is not None

    @property
    def is_ranked(self) -> bool:
        """True if it leaves it to `auto` how worker processes of this machine run a built-in model's step."""
        files = self.cluster, self.cost_path, None if self.run is None else self.run.checkpoint
        asked = any(given is not None for given in (*files, self.link, self.device_speeds))
        asked = asked or (self.comm_cost_factor, self.plan.cost_factor) != (1, 1) or self.costgen or self.log_device_placement
        free = self.microbatches is None and self.plan.method == "auto" and not (self.sharding or self.plan.only_forward)
        return free and self.framework == "torch" and self.workers == "process" and not (self.cuda or asked)

    def choices(self) -> dict[str, Any]:
        """The choices that decide how a graph is placed, apart from the graph and what is in files: values of JSON."""
        options = self.plan.options
        return {
            **{name: getattr(self, name) for name in _OF_PLACING},
            "cluster": None if self.cluster is None else self.cluster.to_json(),
            "device_speeds": None if self.device_speeds is None else list(self.device_speeds),
            "link": None if self.link is None else self.link.to_json(),
            "method": self.plan.method,
            "plan": self.plan.to_json(),
            "options": {**options.to_json(), "fits": options.fits},
        }

    @property
    def costs_file(self) -> str:
        """The file that `costgen` writes."""
        return self.cost_path or "cost.json"


@dataclass(frozen=True)
class ScriptRequest:
    """A script, its arguments, and how its model is to be placed."""

    path: str
    arguments: tuple[str, ...]
    request: TrainRequest
    verify_steps: int = 2
    strict: bool = False
    """End the script where something can't be placed; otherwise that runs as it is."""
    keep_placed: bool = False
    """Stay placed without asking whether that is faster."""


@dataclass(frozen=True)
class HardwareRequest:
    """A built-in model's step to plan for hardware that is not here."""

    request: TrainRequest
    hardware: str
    measured_on: str | None
    """The hardware that the costs in `cost_path` are of; None: costs are counted."""
