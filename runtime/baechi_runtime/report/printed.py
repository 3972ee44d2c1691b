"""The kinds of Report that commands print and do not keep: about plans, links, learned placers and the installation."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from baechi_runtime.measure.samples import Number
from baechi_runtime.report.report import Object, ProbedLink, Report, Signed

# Plans of ops


class Placed(Report, frozen=True, kw_only=True, tag="baechi plan"):
    """A plan file's object, and what its step is simulated to be."""

    graph_fingerprint: str
    method: str
    status: str
    cluster: Object
    placement: dict[str, int]
    predicted_step_us: Number
    lower_bound_us: Number
    peak_memory_bytes: list[Number]
    placement_seconds: Number
    options: Object
    seed: int
    op_digests: dict[str, str]
    busy_us: list[Number]
    transfers: int
    notes: list[str]
    priority: dict[str, Signed] | UnsetType = UNSET
    device_groups: list[list[int]] | UnsetType = UNSET
    shard: dict[str, Object] | UnsetType = UNSET
    elsewhere: Object | UnsetType = UNSET


class NotPlaced(Report, frozen=True, kw_only=True, tag="baechi no plan"):
    """Why there is no plan."""

    status: str
    error: str
    conflict: list[str] | UnsetType = UNSET
    minimal: bool | UnsetType = UNSET


class Simulation(Struct, frozen=True, kw_only=True):
    """A simulated step; numbers by device."""

    makespan_us: Number
    busy_us: list[Number]
    peak_memory_bytes: list[Number]
    transfers: int
    bytes_moved: Number
    devices: list[str] | UnsetType = UNSET


class Simulated(Report, frozen=True, kw_only=True, tag="baechi simulated step"):
    """A plan's step; `before`: that of the plan as it is in its file, where something was changed."""

    makespan_us: Number
    busy_us: list[Number]
    peak_memory_bytes: list[Number]
    transfers: int
    bytes_moved: Number
    lower_bound_us: Number
    violations: list[str]
    notes: list[str]
    before: Simulation | UnsetType = UNSET


class Explanation(Report, frozen=True, kw_only=True, tag="baechi explanation"):
    """The bounds of a plan's step."""

    step_us: Number
    devices: list[str]
    critical_path: dict[str, list[Object]]
    data_path: dict[str, list[Object]]
    transfers: Object
    idle: list[Object]
    memory: list[Object]
    what_ifs: list[Object]
    notes: list[str]


class Choice(Struct, frozen=True, kw_only=True):
    """The step with ops on another device."""

    device: int
    step_us: Number
    fits: bool
    peak_memory_bytes: list[Number]
    transfers: int
    bytes_moved: Number


class Choices(Report, frozen=True, kw_only=True, tag="baechi choices of an op"):
    """Why an op is where it is."""

    ops: list[str]
    moved_ops: list[str]
    compute_us: Number
    persistent_bytes: Number
    device: int | None
    on_devices: list[int]
    pin: int | None
    verdict: str
    step_us: Number
    critical_us: Number
    choices: list[Choice]
    notes: list[str]


class Difference(Report, frozen=True, kw_only=True, tag="baechi difference of plans"):
    """The differences of two plans of one graph."""

    same: bool
    before: Simulation
    after: Simulation
    moved: list[dict[str, str]]
    moved_us: Number
    moved_bytes: Number
    modules: list[Object]
    reordered: list[str]
    recosted: list[str]
    priorities: list[bool]
    ranks_differ: int | None
    cluster_changes: list[str]
    crossed: dict[str, Number] | None
    renamed: Object | None
    notes: list[str]


class ExportedMap(Report, frozen=True, kw_only=True, tag="baechi device map"):
    """The device map that is nearest to a plan, and what it keeps of it."""

    device_map: dict[str, int]
    kept_time: Number
    kept_bytes: Number
    plan_step_us: Number
    predicted_step_us: Number
    peak_memory_bytes: list[Number]
    violations: list[str]


class ExportedStage(Struct, frozen=True, kw_only=True):
    device: int
    begins: str | None
    forward_ops: int
    forward_us: Number


class ExportedSplit(Report, frozen=True, kw_only=True, tag="baechi split spec"):
    split_spec: dict[str, str]
    stages: list[ExportedStage]


class ExportedDot(Report, frozen=True, kw_only=True, tag="baechi dot graph"):
    dot: str


class ExportedGraph(Report, frozen=True, kw_only=True, tag="baechi graph"):
    """A graph file's object, with device and times on its nodes."""

    directed: bool
    multigraph: bool
    graph: Object
    nodes: list[Object]
    edges: list[Object]


class Profiled(Report, frozen=True, kw_only=True, tag="baechi profile"):
    """A profile file's object."""

    graph_fingerprint: str
    clock: str
    warmup: int
    contention: Object | None
    metadata: Object
    op_digests: dict[str, str]
    ops: dict[str, Object]
    pass_us: list[Number] | UnsetType = UNSET
    by_op: bool | UnsetType = UNSET


class Pair(ProbedLink, frozen=True, kw_only=True):
    """A directed link, by its devices' names."""

    source: str
    target: str


class Links(Report, frozen=True, kw_only=True, tag="baechi link probe"):
    """The links of all pairs; `cluster` is what --cluster reads."""

    cluster: Object
    pairs: list[Pair]


# Plans of layers


class Sharding(Report, frozen=True, kw_only=True, tag="baechi shard plan"):
    """A shard plan file's object, and how it was found."""

    graph: str
    batch: int
    devices: int
    status: str
    cost_model: str
    cost_flop: Number
    lower_bound_flop: Number
    predicted_step_us: Number
    held_bytes: Number
    options: Object
    shard: dict[str, Object]
    search_seconds: list[Number]
    seconds: dict[str, Number]
    configurations: int
    largest_table_bytes: int
    operations: Number
    width: int
    captured: Object | UnsetType = UNSET
    executable: str | UnsetType = UNSET
    layers: list[Object] | UnsetType = UNSET
    others: list[Object] | UnsetType = UNSET


class ShardExplained(Report, frozen=True, kw_only=True, tag="baechi shard explanation"):
    """The parts of a sharded step; the costliest layer is the first."""

    step_us: Number
    status: str
    devices: int
    held_bytes: Number
    bound_by: str
    parts_us: dict[str, Signed]
    kinds_us: dict[str, Signed]
    layers: list[Object]


class LayerExplained(Report, frozen=True, kw_only=True, tag="baechi layer explanation"):
    """Why a layer is split as it is."""

    name: str
    op: str
    sizes: dict[str, int]
    splits: dict[str, int]
    others: list[Object]
    step_us: Number
    total_us: Signed
    is_cheapest: bool
    costs_us: dict[str, Signed] | UnsetType = UNSET
    held_bytes: Number | UnsetType = UNSET


class ShardDifference(Report, frozen=True, kw_only=True, tag="baechi difference of shard plans"):
    """The differences of two shard plans of one network."""

    same: bool
    before: Object
    after: Object
    changed: list[Object]
    layers: int


# Learned placers, data sets and the installation


class PolicyTrained(Report, frozen=True, kw_only=True, tag="baechi placeto training"):
    """A training of a learned placer; `exam` is null where there was none."""

    file: str
    updates: int
    done: bool
    graphs: int
    exam_graphs: int
    exam: Number | None


class SourceCompared(Report, frozen=True, kw_only=True, tag="baechi placeto comparison"):
    """Methods beside each other on the graphs of one source."""

    source: str
    evaluations: int
    seed: int
    policy: str
    policy_sha256: str
    cluster: Object
    summary: dict[str, dict[str, Number | None]]
    distributions: dict[str, list[Number]]
    graphs: list[Object]


class Evaluated(Report, frozen=True, kw_only=True, tag="baechi placeto evaluation"):
    comparisons: list[SourceCompared]


class StudyRow(Struct, frozen=True):
    """An order, or a control, on one source."""

    source: str
    order: str
    ratio: Number
    """Step at the end over the step at the beginning, the geometric mean of the graphs."""
    low: Number
    high: Number
    """95% of it."""
    over_reference: Number | None
    """Step over that of the reference order, the geometric mean; None of the reference itself and where it is not studied."""
    p: Number | None
    """The p-value of being equal to the reference; corrected among the orders of a source."""
    episodes: Number
    """Mean number after which a run's best step is within NEAR of its last one."""
    seconds: Number
    """Processor time, the mean of a run."""


class Studied(Report, frozen=True, kw_only=True, tag="baechi placeto study"):
    """`p` by source: that all orders are alike."""

    settings: Object
    runs: int
    rows: list[StudyRow]
    p: dict[str, Number]


class DataSets(Report, frozen=True, kw_only=True, tag="baechi data sets"):
    families: list[Object]


class Check(Struct, frozen=True, kw_only=True):
    """One part of the examination; `costs` says what does not work where it is not ok, and `remedy` what to do."""

    group: str
    name: str
    state: Literal["ok", "missing", "untried", "broken"]
    found: str
    costs: str
    remedy: str
    needed: bool


class Doctor(Report, frozen=True, kw_only=True, tag="baechi doctor"):
    healthy: bool
    checks: list[Check]
