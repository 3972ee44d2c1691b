"""Options of `baechi_ext.parallelize` and `plan`, as keyword arguments that type checkers know. Their defaults are in `baechi_runtime`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    import torch

    from baechi_ext.ir.cluster import Cluster, Link


class ApplyOptions(TypedDict, total=False):
    """The options of `Run.apply`. A module takes all but `num_steps`, a TensorFlow step all but that and `strict`, a built-in model
    `num_steps` and `timeout_seconds`, a graph none. CUDA devices run CUDA graphs, as for `PlanOptions`."""

    verify_steps: int
    """Number of first calls of each fragment that are also run as they are, with everything compared (2); later ones are too, more and
    more seldom, within 1% of the time. 0: none. TensorFlow: the first calls of each shape, and no later one; a difference is a
    ParityError, or with `fallback` a line on stderr."""
    strict: bool
    """Raise an error for what can't be placed, or differs; otherwise (False) the module goes on as it is, and says so on stderr once."""
    keep_placed: bool
    """Stay placed without asking whether that is faster; otherwise (False) placed and plain steps take turns, and the slower is dropped."""
    timeout_seconds: float
    """Time that a device may take to answer (300)."""
    num_steps: int
    """The steps that are measured of each kind (15)."""


class PlanOptions(TypedDict, total=False):
    """The options of `plan`. On CUDA devices plans are for graphs; only `parallelize(cuda_graphs=False)` and `--no_cuda_graphs` turn them
    off."""

    method: str
    """The placement method ("auto"); `baechi place --help` lists all."""
    link: "str | Link"
    """A graph's: the speed of the link between any two devices, "25GB/s", or its costs (by default Baechi's own). Links between a module's
    devices are probed; `Run.what_if(link=...)` changes them."""
    device_memory: int | str
    """Bytes of every device, or a text such as "16GiB"; by default an equal part of what the process may use, or all of a CUDA device's; no
    limit for a graph."""
    pins: Sequence[str]
    """Ops pinned to devices: "encoder.*=0", as for `baechi place --pin`."""
    seed: int
    """For methods that draw random numbers (0)."""
    time_limit: float
    """Seconds that a search or solver may take."""
    cache: bool
    """Keep a module's plans and costs for later runs (True), as for `parallelize`."""
    optimizer: str
    """The optimizer of a built-in model ("sgd")."""
    workers: Literal["process", "thread"]
    """A TensorFlow step's, as for `parallelize`."""


class ParallelizeOptions(TypedDict, total=False):
    """The options of `parallelize`."""

    devices: "int | Sequence[str | torch.device]"
    """Number of CPU workers (2), each a thread on a core of its own; or names of devices: ["cuda:0", "cuda:1"]. If torchrun started several
    processes: their number, as each of them is a CPU worker. TensorFlow: number of servers, each a process with one thread on a core of its
    own; with workers="thread" of logical devices of this process."""
    method: str
    """The placement method ("auto"); `baechi place --help` lists all."""
    verify_steps: int
    """As for `ApplyOptions`."""
    strict: bool
    """PyTorch: as for `ApplyOptions`."""
    keep_placed: bool
    """As for `ApplyOptions`."""
    fallback: bool
    """TensorFlow: where a call can't be captured, or differs, go on with the step as it is, and say so on stderr (False)."""
    device_memory: int | str | None
    """Bytes of every device; by default an equal part of what the process may use, or all of a CUDA device's."""
    microbatches: int | Sequence[int] | str
    """PyTorch: the parts that a call's batch is split into (1), each with ops of its own that are placed: how many, or their sizes; "auto":
    one for each device, where that is predicted to be faster. Where it is not proven to compute the same, the batch stays whole."""
    batch_norm: str
    """PyTorch: "per_part": BatchNorm may normalise over each part of the batch by itself, as DistributedDataParallel does it ("whole")."""
    time_limit: float | None
    """Seconds that a search or solver may take."""
    seed: int
    """For methods that draw random numbers (0)."""
    cluster: "Cluster | None"
    """The devices as the placer is to see them, instead of what is found and probed."""
    pins: Sequence[str]
    """Ops pinned to devices: "encoder.*=0", as for `baechi place --pin`."""
    device_map: "Mapping[str, int | str | torch.device] | None"
    """PyTorch: devices by module, as accelerate has them: method "expert" does what it says, "auto" and "refine" start from it."""
    workers: Literal["process", "thread"]
    """TensorFlow: a server process per device ("process"), or logical devices of this process, which share its threads."""
    timeout_seconds: float
    """Time that a device may take to answer (300)."""
    cache: bool
    """PyTorch: keep plans, costs and the outcome of turns for later runs (True) in $BAECHI_CACHE, else `baechi` in $XDG_CACHE_HOME or
    ~/.cache."""
    cuda_graphs: bool | None
    """PyTorch: launch the passes of a call on CUDA devices as one CUDA graph each, where they can be one (None: yes)."""
