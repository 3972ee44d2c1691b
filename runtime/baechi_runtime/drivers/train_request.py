"""The requests that `baechi train` makes, whichever framework computes them; one that contradicts itself can't be made."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from baechi_ext.errors import OptionError
from baechi_ext.ir import Cluster, Link
from baechi_ext.ir.made_by import MadeBy
from baechi_ext.ir.numbers import MOST_SECONDS, as_number
from baechi_runtime.drivers import pipeline
from baechi_runtime.models.registry import ModelOptions

WorkerKind = Literal["thread", "process"]
Framework = Literal["torch", "tensorflow"]
_OF_PLACING = ("framework", "workers", "num_devices", "cuda", "split_gpu", "use_free_memory", "cluster_hosts") + (
    "device_memory",
    "memory_fraction",
    "comm_cost_factor",
    "colocate_grads_with_ops",
    "relaxed_random",
    "microbatches",
    "batch_norm_per_part",
    "cost_path",
)
_OF_TORCH = ("cuda_graphs", "compile", "use_free_memory", "relaxed_random")
_OF_RUNNING = (
    *("framework", "sharding", "costgen", "cluster", "run", "split_gpu", "cuda_graphs", "use_free_memory", "workers", "cluster_hosts"),
    *("log_device_placement", "compile"),
)
"""Choices that a plan for other hardware has no use for."""


def refuse(fault: object, message: str) -> None:
    """Raises OptionError with this message where there is a fault."""
    if fault:
        raise OptionError(message)


@dataclass(frozen=True, kw_only=True)
class DevicesRequest:
    """The devices of a run, and what all runs on devices take."""

    num_devices: int = 2
    cuda: bool = False
    split_gpu: bool = False
    """The devices are parts of the first GPU."""
    use_free_memory: bool = False
    workers: WorkerKind = "thread"
    """thread: this process runs all devices; process: it is one of a group of workers (baechi_runtime.torch.processes.worker_group)."""
    framework: Framework = "torch"
    timeout_seconds: float = 300.0
    out: str | None = None
    command: tuple[str, ...] = ()
    """The command line, word by word; empty where it was no command."""

    def __post_init__(self) -> None:
        """Raises OptionError for an unknown kind of workers, for what is no time, and for devices that contradict each other."""
        seconds = as_number(self.timeout_seconds, "timeout_seconds", OptionError)
        refuse(not 0 < seconds <= MOST_SECONDS, f"timeout_seconds is {seconds:g}; expected a number above 0 and up to {MOST_SECONDS:g}")
        refuse(self.workers not in get_args(WorkerKind), f"workers={self.workers!r} is unknown; choose process or thread")
        refuse(self.split_gpu and self.workers == "process", "--split_gpu is for one process; drop --workers=process")
        refuse(self.use_free_memory and not self.cuda, "--use_free_memory is for CUDA devices; add --num_gpus=N, or drop it")

    @property
    def made_by(self) -> MadeBy:
        """The signature of this run's files; its versions are of what is loaded by now."""
        return MadeBy(self.command)


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


@dataclass(frozen=True)
class TrainRequest(DevicesRequest):
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
    cuda_graphs: bool | None = None
    """None: on CUDA devices of one process; see `as_graphs`."""
    compile: bool = False
    """The unplaced step is measured under the framework's compiler, too."""
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
    log_device_placement: bool = False
    run: RunOptions | None = None
    """Where given, the placed model is trained; otherwise its step is timed."""
    sharding: tuple[str, ...] = ()
    """Strategies by name, or shard plan files: the step is split by these, instead of placed."""
    mesh: tuple[int, ...] | None = None
    """The mesh of the processes it is split over; None: their count's prime factors."""
    cluster_hosts: tuple[str, ...] | None = None
    """TensorFlow: host:port of each device's server."""
    task_index: int = 0
    """Which of them this process starts; the first one drives."""

    def __post_init__(self) -> None:
        """Raises OptionError for choices that contradict each other."""
        super().__post_init__()
        self._verify_sharding()
        self._verify_hosts()
        counts = type(self.num_steps) is int and self.num_steps >= 1
        refuse(not counts, f"num_steps={self.num_steps!r} is not a number of steps; give a whole number of at least 1")
        of_torch, in_parts = self.framework == "torch", self.microbatches != 1
        for name in _OF_TORCH:
            refuse(getattr(self, name) and not of_torch, f"--{name} is for --framework=torch; drop it")
        if self.cluster is not None:
            refuse(self.link, "--cluster and --comm_cost_coeffs cannot be used together; give one of them")
            refuse(self.device_speeds, "--cluster and --device_speeds cannot be used together; give the speeds in the file")
        refuse(
            self.cuda_graphs and (self.workers == "process" or not self.cuda),
            "--cuda_graphs is for CUDA devices of one process; add --num_gpus=N or --split_gpu=N, and no --workers=process",
        )
        for flag, given in {"--sharding": self.sharding, "--train_steps": self.run, "--costgen": self.costgen}.items():
            why = f"{flag} measures no placed step; drop one of them"
            refuse(self.compile and given, f"--compile compares a placed step with a compiled one, and {why}")
        refuse(
            in_parts and (self.sharding or not of_torch),
            "--microbatches is for a built-in model or a script of PyTorch that is placed; drop it",
        )
        refuse(
            self.batch_norm_per_part and not of_torch,
            "--batch_norm=per_part is for parts of a batch, and TensorFlow's steps are not split into any; drop it",
        )
        whole = "--cost_path has the costs of a step with its whole batch; drop it, or give --microbatches=1"
        refuse(in_parts and self.cost_path is not None, whole)
        refuse(self.costgen and self.microbatches not in (1, None), "--costgen profiles a step with its whole batch; drop --microbatches")
        refuse(self.costgen and self.run is not None, "--costgen only profiles and --train_steps trains; give one of them")

    def _verify_sharding(self) -> None:
        if not self.sharding:
            refuse(self.mesh, "--mesh is for --sharding; give --sharding=pase as well")
            return
        for flag, given in {
            f"--framework={self.framework}": self.framework != "torch",
            "--workers=thread": self.workers == "thread",
            "--costgen": self.costgen,
            "--cluster": self.cluster is not None,
            "--device_speeds": self.device_speeds is not None,
            "--relaxed_random": self.relaxed_random,
            "--memory_fraction, or add --device_memory=SIZE": self.memory_fraction < 1 and self.device_memory is None,
            "--comm_cost_coeffs": self.link is not None,
            "--comm_cost_factor": self.comm_cost_factor != 1,
            "--cost_path": self.cost_path is not None,
            f"--placement_method={self.plan.method}": self.plan.method != "auto",
            "--batch_norm=per_part": self.batch_norm_per_part,
            "--colocate_grads_with_ops": self.colocate_grads_with_ops,
            "--log_device_placement": self.log_device_placement,
        }.items():
            refuse(given, f"--sharding splits a built-in model of torch's over worker processes; drop {flag}")

    def _verify_hosts(self) -> None:
        if self.cluster_hosts is None:
            refuse(self.task_index, "--task_index is a place in --cluster_hosts; give that as well")
            return
        count, elsewhere = len(self.cluster_hosts), "with PyTorch start the workers by torchrun (docs/several_nodes.md)"
        refuse(self.framework != "tensorflow", f"--cluster_hosts is for --framework=tensorflow; {elsewhere}")
        refuse(self.workers != "process", "--cluster_hosts names servers; drop --workers=thread")
        named = f"--cluster_hosts names {count} devices; drop --num_devices and --split_gpu"
        refuse(self.num_devices != count or self.split_gpu, named)
        no_place = f"--task_index={self.task_index} is not a place in --cluster_hosts; its {count} places are numbered from 0"
        refuse(not 0 <= self.task_index < count, no_place)

    @property
    def as_graphs(self) -> bool:
        """True if a step, or each pass of a call, becomes a CUDA graph, where it can be one."""
        usual = self.cuda and self.workers == "thread" and self.framework == "torch"
        return usual if self.cuda_graphs is None else self.cuda_graphs

    @property
    def limits_memory(self) -> bool:
        """True if devices may hold less than the machine has."""
        given = () if self.cluster is None else self.cluster.devices
        return self.device_memory is not None or self.memory_fraction < 1 or any(d.memory_bytes is not None for d in given)

    @property
    def plan_memory(self) -> int | None:
        """The bytes of each device's `device_memory` that a plan may use; None: as many as there are."""
        return None if self.device_memory is None else int(self.device_memory * self.memory_fraction)

    @property
    def reads_files(self) -> bool:
        """True if costs, hints or a plan come from files, which may change between runs."""
        return self.cost_path is not None or self.plan.initial_plan is not None or self.plan.expert_file is not None

    @property
    def is_ranked(self) -> bool:
        """True if it leaves it to `auto` how worker processes of this machine run a built-in model's step."""
        checkpoint = None if self.run is None else self.run.checkpoint
        asked = any(given is not None for given in (self.cluster, checkpoint, self.link, self.device_speeds))
        asked = asked or (self.comm_cost_factor, self.plan.cost_factor) != (1, 1)
        asked = asked or self.costgen or self.log_device_placement or self.relaxed_random
        free = self.microbatches is None and self.plan.method == "auto" and not self.plan.only_forward
        return free and self.workers == "process" and not (self.cuda or asked)

    def choices(self) -> dict[str, Any]:
        """The choices that decide how a graph is placed, apart from the graph and what is in files: values of JSON."""
        options = self.plan.options
        return {
            **{name: getattr(self, name) for name in _OF_PLACING},
            "cuda_graphs": self.as_graphs,
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

    def __post_init__(self) -> None:
        """Raises OptionError for what is for built-in models alone."""
        asked, split = self.request, f"baechi pase {self.path} finds how a script's layers are best split"
        refuse(asked.costgen, "--costgen profiles a built-in model; drop it, and --out=DIR keeps the profile of a script's model")
        refuse(asked.sharding, f"--sharding splits a built-in model; {split}")
        one = "a script's model runs on all CUDA devices of a machine from one process; drop --workers=process"
        refuse(asked.workers == "process" and asked.cuda, one)


@dataclass(frozen=True)
class HardwareRequest:
    """A built-in model's step to plan for hardware that is not here."""

    request: TrainRequest
    hardware: str
    measured_on: str | None
    """The hardware that the costs in `cost_path` are of; None: costs are counted."""

    def __post_init__(self) -> None:
        """Raises OptionError for half of what costs are made of, and for choices of a run, as a model is planned here and not run."""
        half = "--cost_path and --measured_on go together with --hardware: costs to scale, and what they were measured on; give both"
        refuse((self.request.cost_path is None) != (self.measured_on is None), half)
        usual = {f.name: f.default for f in fields(TrainRequest)}
        flags = {"framework": f"framework={self.request.framework}", "run": "train_steps"}
        if self.request.cuda_graphs is False:
            flags["cuda_graphs"] = "no_cuda_graphs"
        for name in _OF_RUNNING:
            dropped = f"plans a built-in model of PyTorch's and runs nothing; drop --{flags.get(name, name)}"
            refuse(getattr(self.request, name) != usual[name], f"--hardware={self.hardware} {dropped}")
