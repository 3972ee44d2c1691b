"""Report: the one type of what `--json` prints, report.json and compare.json. A subclass is a kind; its fields are its JSON.

Whoever writes a report makes one, and whoever reads a file gets one from `report.reading`: there is no other list of the fields. The schema
docs/report.schema.json is made from it (`python -m tests.docs.report_schema`). Fields are null, or empty, where they are not known; those
with UNSET are left out then.
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType, field, to_builtins

from baechi_ext.ir.files import SCHEMA_VERSION
from baechi_ext.ir.made_by import MadeBy
from baechi_runtime.measure.parity_result import Parity, in_json
from baechi_runtime.measure.samples import ERROR, Number, Ratio, Samples

if TYPE_CHECKING:
    from baechi_runtime.measure.link_probe import LinkProbe

Signed = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""Any finite number."""
Object = dict[str, Any]
"""A JSON object whose fields docs/files.md says, where it is a file's own format or of a command that only prints it."""
_MOST_DOTS = 300
SINGLE, COMPILED = "single", "torch.compile"
"""The names, where several are compared, of the step on one device, and of the unplaced step as torch compiles it."""
DDP, FSDP2 = REPLICAS = "ddp", "fsdp2"
"""The names of torch's own ways to split a batch: DistributedDataParallel, and fully sharded."""


# Sections that several kinds have


class Sides(Struct, frozen=True, kw_only=True):
    """A predicted step on one device, and placed."""

    single: Number | None = None
    placed: Number | None = None


class PerDevice(Struct, frozen=True, kw_only=True):
    """Numbers of each device, as predicted and as measured; none where nobody measured."""

    predicted: list[Number] | UnsetType = UNSET
    measured: list[Number] | UnsetType = UNSET
    measured_by: str | UnsetType = UNSET

    @property
    def found(self) -> str:
        """The word for how the bytes were found: measured, or computed as sums over live tensors, where devices share memory."""
        return "computed" if self.measured_by == "accounting" else "measured"


class ParityCheck(Struct, frozen=True, kw_only=True):
    """A placed step compared with the unplaced one, or `steps` of a script's until the one numbered `last`. Differences that are null are
    infinite; scripts know the relative one."""

    passed: bool = False
    compared: int = 0
    max_rel_diff: Number | None = None
    max_abs_diff: Number | None | UnsetType = UNSET
    worst: str | UnsetType = UNSET
    tolerance: Number | UnsetType = UNSET
    steps: int | UnsetType = UNSET
    last: int | UnsetType = UNSET
    decided_by_rounding: int | UnsetType = UNSET

    @classmethod
    def of(cls, parity: Parity) -> "ParityCheck":
        return cls(
            passed=parity.passed,
            compared=parity.compared,
            max_rel_diff=in_json(parity.max_rel_diff),
            max_abs_diff=in_json(parity.max_abs_diff),
            worst=parity.worst,
            tolerance=parity.tolerance,
        )

    def __str__(self) -> str:
        if isinstance(self.max_abs_diff, float | int):
            difference = f"difference {self.max_abs_diff:.3g}"
        else:
            difference = "relative difference " + ("infinite" if self.max_rel_diff is None else f"{self.max_rel_diff:.3g}")
        return f"{self.compared} tensors, largest {difference}"


class Variant(Struct, frozen=True, kw_only=True):
    """A way to run the step that others are compared with. `ratio`: its speed-up over one device, or over the step that is not split."""

    name: str = ""
    note: str = ""
    predicted_step_us: Number | None = None
    measured_step_us: Samples | None = None
    ratio: Ratio | None = None

    def shown(self) -> dict[str, Any]:
        """The variant as pages show it."""
        steps, gain = self.measured_step_us, self.ratio
        return {
            "name": self.name,
            "note": self.note,
            "predicted_us": self.predicted_step_us,
            "median_us": None if steps is None else steps.median,
            "samples_us": [] if steps is None else _some(steps.us),
            "gain": None if gain is None else {"median": gain.median, "low": gain.low, "high": gain.high},
        }


def _some(us: tuple[float, ...]) -> list[float]:
    """Times that stand for all of these, the least and the greatest among them: no page shows a dot for each of 100,000 steps."""
    ordered, last = sorted(us), len(us) - 1
    return list(us) if last < _MOST_DOTS else [ordered[round(i * last / (_MOST_DOTS - 1))] for i in range(_MOST_DOTS)]


class Report(Struct, frozen=True, kw_only=True, tag_field="kind"):
    """The fields of every kind; command and versions where they are known."""

    schema_version: int = SCHEMA_VERSION
    command: list[str] | UnsetType = UNSET
    versions: dict[str, str] | UnsetType = UNSET

    @property
    def made_by(self) -> MadeBy:
        return MadeBy(tuple(self.command or ()), self.versions or {})

    def to_json(self) -> dict[str, Any]:
        """The report's JSON object (docs/files.md)."""
        found: dict[str, Any] = to_builtins(self, enc_hook=_plain)
        return found


def _plain(value: Any) -> Any:
    """A number of numpy, or a version of torch, as the float or text that it is."""
    for kind in (str, float, int):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a report holds {value!r}, which JSON can't say")


# Steps that were run, whose reports are files


class Run(Report, frozen=True, kw_only=True):
    """Steps that were run, in whatever way."""

    model: str | UnsetType = UNSET
    executor: str | UnsetType = UNSET
    notes: list[str] = []
    load_of_others: Number | None | UnsetType = UNSET
    """CPU time of other processes over that of the run's cores; null where the system does not tell."""
    doubts: list[str] | UnsetType = UNSET
    """Why nothing can be concluded."""

    # Properties in which pages and plots see every kind; what a kind does not know is None or empty.

    @property
    def measured(self) -> Samples | None:
        """The placed step."""
        return None

    @property
    def over_single(self) -> Ratio | None:
        return None

    @property
    def over_unplaced(self) -> Ratio | None:
        return None

    @property
    def peaks(self) -> PerDevice:
        return PerDevice()

    @property
    def error(self) -> float:
        """The share of cases in which an interval may be wrong."""
        return ERROR


class Planned(Run, frozen=True, kw_only=True):
    """A step that was planned; null where there is no plan."""

    method: str | None = None
    num_devices: int | None = None
    status: str | None = None
    predicted_speedup: Number | None = None
    lower_bound_us: Number | None = None
    placement_seconds: Number | None = None
    transfers: int = 0
    bytes_moved: Number = 0


class ProbedLink(Struct, frozen=True, kw_only=True):
    """A link's costs as cluster files have them, with the line through the one-way times, and these by size in bytes."""

    us_per_byte: Number
    latency_us: Number
    one_way: dict[str, Signed]
    samples_us: dict[str, list[Number]]
    send_us: Number | UnsetType = UNSET
    send_us_per_byte: Number | UnsetType = UNSET
    receive_us: Number | UnsetType = UNSET
    receive_us_per_byte: Number | UnsetType = UNSET
    issue_us: Number | UnsetType = UNSET
    doubt: str | UnsetType = UNSET
    """The reason why `one_way` is not the line through the samples, where it is not."""

    @classmethod
    def of(cls, probe: "LinkProbe") -> "ProbedLink":
        samples = {str(size): list(us) for size, us in probe.samples_us.items()}
        return cls(**probe.to_link().to_json(), one_way=asdict(probe.fit), samples_us=samples, doubt=probe.doubt or UNSET)


class Verified(Struct, frozen=True):
    """The outcome of comparing placed calls with unplaced ones."""

    steps: int
    of: int
    """Calls that ran placed."""
    last: int
    """The number of the last one that was compared."""
    max_rel_diff: Number | None = None
    """None: infinite."""
    rounding: list[str] = []
    """Results and variables that rounding alone decides, and that may therefore differ."""
    tolerance: Number | UnsetType = UNSET
    """The largest relative difference that is allowed."""

    def __str__(self) -> str:
        largest = f"largest relative difference {'inf' if self.max_rel_diff is None else f'{self.max_rel_diff:.2g}'}"
        largest += f"; rounding decides {len(self.rounding)} variables" if self.rounding else ""
        return f"verified {self.steps} of {self.of}, last at call {self.last} ({largest})"


class Call(Planned, frozen=True, kw_only=True, tag="baechi call report"):
    """The calls of a module, or a training step, of a user's own program. `folder` has its files, where it is one of a script's."""

    module: str | UnsetType = UNSET
    step: str | UnsetType = UNSET
    predicted_step_us: Sides = Sides()
    measured_step_us: dict[str, Samples | None] = {}
    devices: list[str] = []
    num_ops: list[int] = []
    fragments: int = 0
    microbatches: list[int] = []
    """The sizes of the parts of its batch; empty where that is whole."""
    peak_memory_bytes: PerDevice = PerDevice()
    verification: Verified | None = None
    placed_steps: int = 0
    unplaced_steps: int = 0
    unplaced_calls: dict[str, int] = {}
    shapes: int = 0
    setup_seconds: Number | None = None
    refusal: str = ""
    graph_breaks: list[str] = []
    recompiles: list[str] = []
    folder: str | None | UnsetType = UNSET


class Step(Planned, frozen=True, kw_only=True, tag="baechi step report"):
    """A measured step of a built-in model, or of a script (then with `unplaced`, the name of the step that its placed one is compared with,
    and without a step of one device's program)."""

    parity: ParityCheck | None = None
    predicted_step_us: Sides = Sides()
    measured_step_us: dict[str, Samples | None] = {}
    speedup: Number | UnsetType = UNSET
    speedup_interval: Ratio | None | UnsetType = UNSET
    overhead_of_one_device_program: Ratio | UnsetType = UNSET
    unplaced: str | UnsetType = UNSET
    eager_step: str | UnsetType = UNSET
    """The name of the unplaced step that is timed beside the others; unlike `unplaced`, it is of no script."""
    speedup_over_eager: Ratio | None = None
    busy_us: PerDevice = PerDevice()
    peak_memory_bytes: PerDevice = PerDevice()
    link_probe: ProbedLink | None = None
    conclusive: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError where samples that are compared in pairs have none."""
        steps = self.measured_step_us
        if len({len(found.us) for name in (COMPILED, "placed") if (found := steps.get(name)) is not None}) > 1:
            raise ValueError(f"expected as many samples of {COMPILED} as of placed")

    @property
    def measured(self) -> Samples | None:
        return self.measured_step_us.get("placed")

    @property
    def over_single(self) -> Ratio | None:
        return self.speedup_interval or None

    @property
    def over_unplaced(self) -> Ratio | None:
        return self.speedup_over_eager

    @property
    def peaks(self) -> PerDevice:
        return self.peak_memory_bytes


class Script(Step, frozen=True, kw_only=True, tag="baechi script report"):
    """A script's first placed step, as Step has it, and all of its modules, or with TensorFlow steps, that were to be placed."""

    modules: list[Call] | UnsetType = UNSET
    steps: list[Call] | UnsetType = UNSET
    summary: list[str] = []

    @property
    def further(self) -> Iterator[tuple[str, str]]:
        """Names and folders of the placed steps but the first."""
        for call in (*(self.modules or ()), *(self.steps or ())):
            if call.folder not in (None, UNSET, "."):
                yield call.module or call.step or "", str(call.folder)


class Checkpoint(Struct, frozen=True, kw_only=True):
    """A folder, and the last step kept there."""

    folder: str = ""
    step: int | None = None


class Training(Planned, frozen=True, kw_only=True, tag="baechi training report"):
    """A training of many steps."""

    parity: ParityCheck | None = None
    cluster: Object = {}
    steps: int = 0
    losses: list[float] = []
    resumed_from: int | None = None
    checkpoint: Checkpoint | None = None
    predicted_step_us: Number | None = None
    measured_step_us: Samples | None = None

    @property
    def measured(self) -> Samples | None:
        return self.measured_step_us


class Method(Variant, frozen=True, kw_only=True):
    """A method of a comparison."""

    name: str = field(default="", name="method")
    differs_from_one_device: bool | None = None
    differs_from_best: bool | None = None
    plan: str | None = None
    splits: bool | None = None
    lower_bound_us: Number | None = None
    placement_seconds: Number | None = None
    transfers: int | None = None
    bytes_moved: Number | None = None
    peak_memory_bytes: PerDevice = PerDevice()
    parity: ParityCheck | None = None
    flag: str = ""
    """The flag by which `train` runs it, where that is not the method's name."""


class Comparison(Run, frozen=True, kw_only=True, tag="baechi comparison"):
    """Several methods' steps, taken in turn. `planned` is the one whose plan stands beside the report: the recommended one, where it has a
    plan."""

    methods: list[Method] = []
    unplaced: Variant | None = None
    interval_error: Number = ERROR
    recommended: str | None = None
    planned: str | None = None
    recommendation: str = ""

    @property
    def rows(self) -> list[Variant]:
        """The methods, after the unplaced step where that was measured."""
        return [*([] if self.unplaced is None else [self.unplaced]), *self.methods]

    @property
    def _chosen(self) -> Method | None:
        return next((method for method in self.methods if method.name == (self.planned or self.recommended)), None)

    @property
    def measured(self) -> Samples | None:
        return None if self._chosen is None else self._chosen.measured_step_us

    @property
    def over_single(self) -> Ratio | None:
        return None if self._chosen is None or self._chosen.name == SINGLE else self._chosen.ratio

    @property
    def peaks(self) -> PerDevice:
        return PerDevice() if self._chosen is None else self._chosen.peak_memory_bytes

    @property
    def over_unplaced(self) -> Ratio | None:
        """The gain of the plan beside the report over the unplaced step, both measured in turn."""
        steps, unplaced = self.measured, None if self.unplaced is None else self.unplaced.measured_step_us
        return Ratio.of(unplaced, steps, self.error) if steps and unplaced and len(steps.us) == len(unplaced.us) else None

    @property
    def error(self) -> float:
        return self.interval_error


class StepParts(Struct, frozen=True, kw_only=True):
    """The parts that add up to a predicted step."""

    calls_us: Signed = 0.0
    moves_us: Signed = 0.0
    gradients_us: Signed = 0.0
    update_us: Signed = 0.0
    executor_us: Signed = 0.0


class Layer(StepParts, frozen=True, kw_only=True):
    name: str = ""


class Sent(Struct, frozen=True, kw_only=True):
    """Messages and bytes that a process sends in a step by one kind of collective."""

    messages: Number = 0
    bytes: Number = 0


class SentBy(Struct, frozen=True, kw_only=True):
    """By kind of collective; the prediction is null where it is not known."""

    predicted: dict[str, Sent] | None = None
    counted: dict[str, Sent] = {}


class Held(Struct, frozen=True, rename=lambda name: f"{name}_bytes"):
    """Bytes of one process: of parameters and buffers, of their gradients, of the optimizer's state, and of what the forward pass keeps for
    the backward pass, these left out. Messages and what an op needs while it runs are not counted."""

    weights: Number = 0
    gradients: Number = 0
    optimizer: Number = 0
    kept: Number = 0


class Strategy(Variant, frozen=True, kw_only=True):
    """A way to split the step, or the step that every process runs whole. `plan`: the file of its shard plan."""

    plan: str | None = None
    predicted_parts_us: StepParts | None = None
    sent_bytes: Number = 0
    collectives: dict[str, int] = {}
    sent: SentBy = SentBy()
    held_bytes: list[Held] = []
    layers: list[Layer] = []
    parity: ParityCheck | None = None
    losses: list[float] = []


class MeasuredMachine(Struct, frozen=True):
    """Each process as it was measured."""

    tera_flops: Number
    gigabytes_per_second: Number
    latency_us: Number


class Sharded(Run, frozen=True, kw_only=True, tag="baechi sharding report"):
    """A step split over processes, in one way or several."""

    num_devices: int = 0
    mesh: list[int] = []
    machine: MeasuredMachine | None = None
    executable: str | None = ""
    single_step_us: Samples | None = None
    whole: Strategy | None = None
    strategies: list[Strategy] = []
    interval_error: Number = ERROR
    kendall_tau: Signed | None = None

    @property
    def error(self) -> float:
        return self.interval_error
