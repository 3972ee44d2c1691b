"""The order of the stages, and the checks between them. No other file knows it, and no stage calls the next."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from baechi_ext import hybrid
from baechi_ext.cost import vary_costs
from baechi_ext.errors import InfeasibleError, OptionError
from baechi_ext.group.colocation import with_colocation
from baechi_ext.group.grouping import Grouping, GroupOptions
from baechi_ext.group.registry import group
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.hints import DeviceMap, ExpertFile, Pin, require_hints, with_pins, with_pins_of_groups
from baechi_ext.ir.numbers import as_number
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.ir.plan import PlanFile, verify_placement
from baechi_ext.place.adjust import NOOP, adjust
from baechi_ext.place.common import PlaceOptions, PlanResult, Proposal, Task, Worth, begin, conclude, finish
from baechi_ext.place.registry import METHODS, place, require_taken
from baechi_ext.place.trial import try_orders
from baechi_ext.simulate import Timeline
from baechi_runtime.report.progress import progress
from baechi_runtime.report.tables import search_news

if TYPE_CHECKING:
    from baechi_ext.hybrid.placer import HybridResult, Placer
    from baechi_ext.hybrid.sharding import Sharding

R = TypeVar("R", bound=PlanResult)
SEARCHES = ("auto", "refine")
"""Methods that start from a plan."""
MAPPED = ("expert", *SEARCHES)
"""Methods that take a device map."""
LARGEST_SEED = 2**53
"""Up to here a number of a file is read as the whole number that it was."""
LEAST_GAIN = 0.05
"""Predictions of steps are off by as much; a split that promises less may well lose."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A request to place a graph: the names are keys of METHODS, GROUPERS, PLACER_TYPES and ADJUSTMENTS."""

    method: str = "auto"
    grouper: str = "tf"
    placer_type: str = "default"
    only_forward: bool = False
    expert_file: ExpertFile | None = None
    """Hints that take the place of the graph's own."""
    initial_plan: PlanFile | None = None
    """The plan that a search starts from."""
    device_map: DeviceMap | None = None
    """Devices by module: hints for `expert`, where a search starts for `auto` and `refine`."""
    pins: tuple[Pin, ...] = ()
    """Ops that have to be where a person wants them."""
    options: PlaceOptions = field(default_factory=PlaceOptions)
    group_options: GroupOptions = field(default_factory=GroupOptions)
    adjustment_method: str = NOOP
    adjustment_with_memory_limit: bool = False
    cost_factor: float = 1.0
    """Above 1: plan with costs that are wrong by up to that factor, and judge the plan with the right ones."""

    def __post_init__(self) -> None:
        """Raises OptionError for what is for other methods, and for two starts of one search."""
        for name, takers in {"expert_file": ("expert",), "initial_plan": SEARCHES, "device_map": MAPPED}.items():
            if getattr(self, name) is not None and self.method not in takers:
                methods = (" and " if len(takers) == 2 else ", ").join(takers)
                raise OptionError(f"--{name} is only for --placement_method={methods}; drop it or choose one of them")
            if name != "device_map" and None not in (self.device_map, getattr(self, name)):
                raise OptionError(f"--device_map and --{name} cannot be used together; give one of them")
        require_taken("auto" if self.method == hybrid.METHOD else self.method, self.options)

    @classmethod
    def of(
        cls, method: str, *, pins: Sequence[str] = (), device_map: DeviceMap | None = None, seed: int = 0, time_limit: float | None = None
    ) -> "PlanRequest":
        """The request in words, as Python calls have it; pins are written `encoder.*=0`, the limit is in seconds. Raises OptionError for an
        unknown method, a malformed pin, a device map for another method, or what is no seed or limit."""
        if method not in METHODS:
            raise OptionError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
        if device_map is not None and method not in MAPPED:
            raise OptionError(f"device_map is only for the methods {', '.join(MAPPED)}; drop it, or choose one of them by method=")
        if not isinstance(pins, (list, tuple)):
            raise OptionError(f"pins={pins!r} is no list; write one, such as pins=['encoder.*=0']")
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= LARGEST_SEED:
            raise OptionError(f"seed={seed!r} is not a whole number from 0 to {LARGEST_SEED}")
        limit = METHODS[method].time_limit_seconds if time_limit is None else as_number(time_limit, "time_limit", OptionError)
        options = PlaceOptions(seed=seed, time_limit_seconds=limit)
        return cls(method=method, options=options, pins=tuple(map(Pin.parse, pins)), device_map=device_map)

    def worthwhile(self, worth: Worth = Worth()) -> "PlanRequest":  # noqa: B008 - frozen
        """The same request, whose search ends where more time is not worth it for this many steps."""
        return replace(self, options=replace(self.options, worth=worth))

    def without_grouping(self) -> "PlanRequest":
        """The same request for the graph as it is: groups only bind."""
        return replace(self, grouper="tf", placer_type="default", only_forward=False, group_options=GroupOptions(), adjustment_method=NOOP)

    def to_json(self) -> dict[str, object]:
        """The request's part of a plan's options, `options` apart; Baechi's further flags only where they are used."""
        adjusts = self.adjustment_method != NOOP
        further = {
            **asdict(self.group_options),
            "expert_file": self.expert_file and self.expert_file.path,
            "initial_plan": self.initial_plan and self.initial_plan.path,
            "device_map": self.device_map and dict(self.device_map.devices),
            "pins": list(map(str, self.pins)),
            "adjustment_method": adjusts and self.adjustment_method,
            "adjustment_with_memory_limit": adjusts and self.adjustment_with_memory_limit,
            "cost_factor": self.cost_factor != 1 and self.cost_factor,
        }
        always = {"grouper": self.grouper, "placer_type": self.placer_type, "only_forward": self.only_forward}
        return always | {name: value for name, value in further.items() if value}


def prepared(graph: OpGraph, request: PlanRequest, devices: Sequence[str]) -> OpGraph:
    """The graph with the hints of the request's expert file or device map, where it has one, and with its pins; costs are not needed.

    Raises FileError where the file or map names what the graph has not, OptionError where the expert is to place a graph without hints,
    and for a pin that matches nothing, contradicts another or names none of the `devices`.
    """
    if request.expert_file is not None:
        graph = request.expert_file.apply(graph)
    if request.device_map is not None:
        graph = request.device_map.apply(graph, devices)
    if request.method == "expert":
        require_hints(graph)
    return with_pins(graph, request.pins, devices)


def plan_watched(
    graph: OpGraph, cluster: Cluster, request: PlanRequest, find: Callable[[OpGraph, Cluster, PlanRequest], R], number: str = ""
) -> R:
    """The value of `find`, which plans, such as `plan`; meanwhile the terminal shows how the search goes. `number`: which of several it
    is. Raises what `find` raises."""
    from baechi_ext.simulate.jit import is_first_use

    compiling = ", after compiling, which the first run does for all (half a minute, where the cores are free)" if is_first_use() else ""
    with progress(f"placing {len(graph)} ops on {len(cluster)} devices with {request.method}{compiling}{number}") as show:
        watched = replace(request, options=replace(request.options, watch=lambda search: show(search_news(search))))
        return find(graph, cluster, watched)


def plan(graph: OpGraph, cluster: Cluster, request: PlanRequest) -> PlanResult:
    """The plan of a costed graph: group it, place the coarse graph, expand the placement and judge it on the graph itself.

    Where the coarse graph, or what it expands to, fits nowhere, the graph is placed without grouping; the plan's options say
    what was done. With another adjustment method than noop the ops of a colocation group are placed one by one, and the group
    gets a device afterwards. The plan's `placement_seconds` cover all of it.

    Raises InfeasibleError (status "infeasible" where it is proven that no plan exists, "unknown" where none was found),
    OptionError for an unknown name, and what `prepared`, the grouper and the placer raise.
    """
    if request.method == hybrid.METHOD:
        raise OptionError(
            "--placement_method=hybrid splits layers, and how they split is known where PyTorch's training step of a built-in model "
            "is captured: baechi train --model_name=... plans so, and baechi pase --model_name=... shards alone; here choose another method"
        )
    graph = prepared(graph, request, [d.name for d in cluster.devices])
    if request.initial_plan is not None:
        given = request.initial_plan.on(graph, cluster)
        request = replace(request, options=replace(request.options, initial=Proposal(given.placement, (given.priority,))))
    elif request.device_map is not None and request.method != "expert":
        mapped = Proposal([op.expert or 0 for op in graph.ops])
        request = replace(request, options=replace(request.options, initial=mapped))
    task = begin(request.method, graph, cluster, request.options)
    if request.cost_factor == 1:
        result, done = _plan(task, request)
    else:
        seen, done = _plan(_with_wrong_costs(task, request.cost_factor), request)
        result = _judged(task, seen)
    verify_placement(graph, cluster, result.plan.placement, f"place {request.method}")
    options = done.to_json() | dict(result.plan.options)
    result = replace(result, notes=(*result.notes, *_mismatches(graph, cluster, request, result.plan.placement)))
    return replace(result, plan=replace(result.plan, options=options, placement_seconds=task.elapsed_seconds()))


def plan_hybrid(graph: OpGraph, cluster: Cluster, request: PlanRequest, sharding: "Sharding") -> "HybridResult":
    """The plan of a costed graph by `hybrid`, which `sharding` says how to split: `auto` places for each size of groups.

    Groups of one get the whole time limit, as `auto` alone does; all others together as much again. Raises what `plan` raises, and
    ShardError where the sharding is of another graph.
    """
    from baechi_ext.hybrid.groups import group_sizes
    from baechi_ext.hybrid.placer import hybrid as place_and_shard

    def placer(seconds: float) -> "Placer":
        auto = replace(request, method="auto", options=replace(request.options, time_limit_seconds=seconds))
        return lambda graph, cluster: plan(graph, cluster, auto)

    graph, seconds = prepared(graph, request, [d.name for d in cluster.devices]), request.options.time_limit_seconds
    searches = max(len(group_sizes(cluster)) - 2, 1)
    return place_and_shard(graph, cluster, sharding, placer(seconds), placer(seconds / searches))


def whole_if_faster(result: PlanResult, graph: OpGraph, cluster: Cluster, request: PlanRequest, single: Timeline) -> PlanResult:
    """`result`; or all ops on one device, where `auto` splits the graph for hardly less than that, the others idle, takes.

    The graph's costs are of devices at work beside others, by which one device looks slower than it is. So a plan that leaves the others
    idle comes back with the costs of `single`.
    """
    alone = single.graph
    least_us = alone.total_compute_us() / cluster.devices[cluster.fastest].speed
    worth = result.predicted_step_us < (1 - LEAST_GAIN) * least_us
    if request.method == "auto" and result.splits and not (request.pins or result.interrupted or worth):
        with contextlib.suppress(InfeasibleError):
            whole = plan(graph, cluster, replace(request.without_grouping(), method="single", initial_plan=None, device_map=None))
            spent = result.placement_seconds + whole.placement_seconds
            judged = _judged_alone(whole, alone, cluster, request)
            if result.predicted_step_us >= (1 - LEAST_GAIN) * judged.predicted_step_us:
                kept = replace(judged.plan, method=result.plan.method, placement_seconds=spent)
                return replace(judged, plan=kept, notes=result.notes, untried=result.untried)
    return result if result.splits else _judged_alone(result, alone, cluster, request)


def _judged_alone(result: PlanResult, alone: OpGraph, cluster: Cluster, request: PlanRequest) -> PlanResult:
    """A plan that leaves all devices but one idle, with the costs that ops have there."""
    judged = _judged(begin(request.method, alone, cluster, request.options), result)
    return replace(judged, plan=replace(judged.plan, placement_seconds=result.placement_seconds))


def _mismatches(graph: OpGraph, cluster: Cluster, request: PlanRequest, placement: Sequence[int]) -> tuple[str, ...]:
    """A note, where `expert` could not do all that a device map says."""
    if request.device_map is None or request.method != "expert":
        return ()
    hints = request.device_map.hints(graph, [d.name for d in cluster.devices])
    mismatches = sum(hint not in (None, d) for hint, d in zip(hints, placement, strict=True))
    why = "they are pinned, or share a colocation group with ops of other modules"
    return (f"{mismatches} ops are not where the device map has them: {why}",) if mismatches else ()


def _plan(task: Task, request: PlanRequest) -> tuple[PlanResult, PlanRequest]:
    """The plan, and the request that it answers: the given one, or that without grouping."""
    grouping = group(
        task.graph,
        grouper=request.grouper,
        placer_type=request.placer_type,
        only_forward=request.only_forward,
        cluster=task.cluster,
        options=request.group_options,
    )
    if grouping.coarse == task.graph and request.adjustment_method == NOOP:
        return place(request.method, task.graph, task.cluster, request.options), request
    try:
        return _place_grouped(task, grouping, request), request
    except InfeasibleError:
        return place(request.method, task.graph, task.cluster, request.options), request.without_grouping()


def _place_grouped(task: Task, grouping: Grouping, request: PlanRequest) -> PlanResult:
    graph, adjusts = with_pins_of_groups(grouping.coarse), request.adjustment_method != NOOP
    if adjusts:
        graph = with_colocation(graph, [None] * len(graph))
    options = task.options
    if options.initial is not None:
        options = replace(options, initial=_on_groups(options.initial, grouping, graph))
    result = place(task.method, graph, task.cluster, options)
    coarse = result.plan
    verify_placement(graph, task.cluster, coarse.placement, f"place {task.method} (grouped graph)")
    placement = coarse.placement
    if adjusts:
        limited, seed = request.adjustment_with_memory_limit, task.options.seed
        placement = adjust(grouping.coarse, task.cluster, placement, request.adjustment_method, with_memory_limit=limited, seed=seed)
    priorities = () if coarse.priority is None else (grouping.expand(coarse.priority),)
    return _as_found(result, conclude(task, [Proposal(grouping.expand(placement), priorities)]))


def _on_groups(proposal: Proposal, grouping: Grouping, coarse: OpGraph) -> Proposal:
    """A plan of the fine graph for the coarse one: each node, and what shares its device, goes where its first op goes."""
    first = [members[0] for members in grouping.members]
    device_of = {op.colocation: proposal.placement[v] for op, v in reversed(list(zip(coarse.ops, first, strict=True)))}
    device_of.pop(None, None)
    placement = [device_of.get(op.colocation, proposal.placement[v]) for op, v in zip(coarse.ops, first, strict=True)]
    return Proposal(placement, tuple(None if p is None else tuple(p[v] for v in first) for p in proposal.priorities))


def _with_wrong_costs(task: Task, factor: float) -> Task:
    graph, cluster = vary_costs(task.graph, task.cluster, factor, task.options.seed)
    return begin(task.method, graph, cluster, task.options)


def _judged(task: Task, seen: PlanResult) -> PlanResult:
    """A plan made with other costs, as it runs with those of the task; repaired where it no longer fits."""
    trial = try_orders(task.simulator, seen.plan.placement, [seen.plan.priority])
    if trial.valid:
        return _as_found(seen, finish(task, trial))
    return _as_found(seen, conclude(task, [Proposal(trial.placement)]))


def _as_found(found: PlanResult, result: PlanResult) -> PlanResult:
    """`result` with the plan options and notes of `found`, the one that it was made from, and whether that was interrupted."""
    plan = replace(result.plan, options=found.plan.options)
    return replace(result, plan=plan, interrupted=found.interrupted, notes=found.notes, untried=found.untried)
