"""The order of the stages for a module's call: profile, place, load; and for another shape of the same call, what is kept of that."""

from dataclasses import dataclass, replace

import torch

from baechi_ext.capture.torch_module import CapturedCall
from baechi_ext.cost import Profile, attach_costs, scale_links
from baechi_ext.errors import MismatchError
from baechi_ext.ir import OpGraph
from baechi_ext.ir.check import memory_violations
from baechi_ext.place.common import PlanResult
from baechi_ext.simulate import Timeline, simulate
from runtime import pipeline
from runtime.calls.phases import ModuleStep
from runtime.executor import Executor
from runtime.links import LinkProbe
from runtime.profiler import ProfileOptions, profile_step
from runtime.program import one_device_timeline
from runtime.progress import progress
from runtime.tables import search_news
from runtime.train_request import TrainRequest
from runtime.training import find_cluster


@dataclass(frozen=True)
class Placement:
    """A module's call, profiled and placed."""

    graph: OpGraph
    """With costs."""
    profile: Profile | None
    """None on workers other than 0."""
    result: PlanResult
    single: Timeline
    """The prediction for one device."""
    probe: LinkProbe | None
    note: str = ""


def place_call(request: TrainRequest, executor: Executor, captured: CapturedCall, step: ModuleStep) -> Placement:
    """The plan of a captured call, with costs read from the request's `cost_path` or measured on device 0; the best one so far where its
    search was interrupted.

    Raises what the stages raise: ProfileError, MismatchError, InfeasibleError, ExecutionError.
    """
    profile = costs_of_call(request, executor, captured, step)
    graph = attach_costs(captured.graph, profile, contended=len(executor.devices) > 1)
    cluster, probe = find_cluster(request, executor)
    cluster = scale_links(cluster, request.comm_cost_factor)
    with progress(pipeline.announcement(graph, cluster, request.plan)) as show:
        result = pipeline.plan(graph, cluster, request.plan.watched(lambda search: show(search_news(search))))
    single = one_device_timeline(attach_costs(captured.graph, profile))
    result = pipeline.whole_if_faster(result, graph, cluster, request.plan, single)
    return Placement(graph if result.splits else single.graph, profile, result, single, probe)


def costs_of_call(request: TrainRequest, executor: Executor, captured: CapturedCall, step: ModuleStep) -> Profile:
    """Read from the request's `cost_path` or measured on device 0. Raises ProfileError, MismatchError, ExecutionError."""
    pipeline.prepared(captured.graph, request.plan, [d.name for d in executor.devices])  # what hints and pins need, told early
    if request.cost_path is None:
        return profile_step(executor, captured.graph, captured.binding, step, ProfileOptions())
    profile = Profile.load(request.cost_path, captured.graph)
    if profile.clock != executor.devices[0].clock_name:
        raise MismatchError(f"{request.cost_path}: the costs are of the clock {profile.clock!r}, this run's devices go by another one")
    return profile


def place_alike(earlier: Placement, captured: CapturedCall) -> Timeline | None:
    """The call of another shape, placed op by op as the earlier one; None where it has other ops, or does not fit in that way."""
    graph = captured.graph
    if graph.index != earlier.graph.index or [op.colocation for op in graph.ops] != [op.colocation for op in earlier.graph.ops]:
        return None
    known = zip(graph.ops, earlier.graph.ops, strict=True)
    graph = graph.replace_ops([replace(op, compute_us=k.compute_us, temporary_bytes=k.temporary_bytes) for op, k in known])
    timeline = earlier.result.timeline
    rank = {v: i for i, v in enumerate(timeline.started)}
    alike = simulate(graph, timeline.cluster, timeline.placement, [rank[v] for v in range(len(graph))])
    return None if memory_violations(alike.cluster, alike.peak_memory_bytes) else alike


def home_of(live: dict[str, torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> torch.device:
    """The device that an unplaced call returns its outputs on: that of its parameters, or its inputs."""
    return next((t.device for t in (*live.values(), *inputs)), torch.device("cpu"))
