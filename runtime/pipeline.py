"""The order of the stages, and the checks between them. No other file knows it, and no stage calls the next."""

from dataclasses import dataclass, field, replace

from baechi_ext.errors import InfeasibleError, PlanError
from baechi_ext.group.grouping import Grouping
from baechi_ext.group.registry import group
from baechi_ext.ir.check import verify_placement
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.expert import ExpertFile
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.common import PlaceOptions, PlanResult, Proposal, Task, begin, conclude
from baechi_ext.place.expert import require_hints
from baechi_ext.place.registry import place


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """How a graph is to be placed: the names are keys of METHODS, GROUPERS and PLACER_TYPES."""

    method: str = "m_sct"
    grouper: str = "tf"
    placer_type: str = "default"
    only_forward: bool = False
    expert_file: ExpertFile | None = None
    """Hints that take the place of the graph's own."""
    options: PlaceOptions = field(default_factory=PlaceOptions)

    def without_grouping(self) -> "PlanRequest":
        """The same request for the graph as it is: groups only bind."""
        return replace(self, grouper="tf", placer_type="default", only_forward=False)


def hinted(graph: OpGraph, request: PlanRequest) -> OpGraph:
    """The graph with the hints of the request's expert file, where it has one; costs are not needed.

    Raises FileError where the file names what the graph has not, OptionError where the expert is to place a graph without hints.
    """
    if request.expert_file is not None:
        graph = request.expert_file.apply(graph)
    if request.method == "expert":
        require_hints(graph)
    return graph


def plan(graph: OpGraph, cluster: Cluster, request: PlanRequest) -> PlanResult:
    """The plan of a costed graph: group it, place the coarse graph, expand the placement and judge it on the graph itself.

    Where the coarse graph, or what it expands to, fits nowhere, the graph is placed without grouping; the plan's options say
    what was done. The plan's `placement_seconds` cover all of it.

    Raises InfeasibleError (status "infeasible" where it is proven that no plan exists, "unknown" where none was found),
    OptionError for an unknown name, and what `hinted`, the grouper and the placer raise.
    """
    graph = hinted(graph, request)
    task = begin(request.method, graph, cluster, request.options)
    grouping = group(
        graph,
        grouper=request.grouper,
        placer_type=request.placer_type,
        only_forward=request.only_forward,
        num_devices=len(cluster),
    )
    _verify_grouping(grouping)
    if grouping.coarse == graph:
        result = place(request.method, graph, cluster, request.options)
    else:
        try:
            result = _place_grouped(task, grouping)
        except InfeasibleError:
            request = request.without_grouping()
            result = place(request.method, graph, cluster, request.options)
    verify_placement(graph, cluster, result.plan.placement, f"place {request.method}")
    options = {"grouper": request.grouper, "placer_type": request.placer_type, "only_forward": request.only_forward}
    options |= {} if request.expert_file is None else {"expert_file": request.expert_file.path}
    options |= result.plan.options
    return replace(result, plan=replace(result.plan, options=options, placement_seconds=task.elapsed_seconds()))


def _place_grouped(task: Task, grouping: Grouping) -> PlanResult:
    coarse = place(task.method, grouping.coarse, task.cluster, task.options).plan
    verify_placement(grouping.coarse, task.cluster, coarse.placement, f"place {task.method} (grouped graph)")
    priorities = () if coarse.priority is None else (grouping.expand(coarse.priority),)
    return conclude(task, [Proposal(grouping.expand(coarse.placement), priorities)])


def _verify_grouping(grouping: Grouping) -> None:
    """Raises PlanError where a fine op stands in no group or in two."""
    count = [0] * len(grouping.fine)
    for members in grouping.members:
        for v in members:
            count[v] += 1
    wrong = [f"op {op.id!r} stands in {k} groups" for op, k in zip(grouping.fine.ops, count, strict=True) if k != 1]
    if wrong:
        raise PlanError(f"group: {'; '.join(wrong[:5])}; expected one group for each op")
