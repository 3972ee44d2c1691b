"""The order of the stages for a module's call: profile, place, load; and for another shape of the same call, what is kept of that.
Where an earlier run kept the costs and the plan of the same call, they are taken from there."""

import math
import os
from dataclasses import replace

import torch

from baechi_ext.capture.torch_autocast import without_autocast
from baechi_ext.capture.torch_counts import with_counts
from baechi_ext.capture.torch_fragments import CapturedCall
from baechi_ext.cost import scale_links
from baechi_ext.ir import Link, OpGraph
from baechi_ext.ir.plan import memory_violations, placement_violations
from baechi_ext.place.common import PlanResult
from baechi_ext.place.trial import Trial
from baechi_ext.simulate import Simulator, Timeline, simulate
from baechi_ext.simulate.one_device import one_device_timeline
from baechi_runtime.drivers import pipeline
from baechi_runtime.drivers.costing import host_of, with_costs
from baechi_runtime.drivers.placement import Placement, place
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.torch.backend import costed
from baechi_runtime.torch.calls.capturing import CallStep
from baechi_runtime.torch.calls.experience import plan_key
from baechi_runtime.torch.calls.plan_cache import KeptPlan, find_plan, keep_plan
from baechi_runtime.torch.calls.search_process import Search, is_serializable, plan_to_json
from baechi_runtime.torch.cluster import find_cluster
from baechi_runtime.torch.lowering.random_state import as_it_was
from baechi_runtime.torch.processes.executor import Executor
from baechi_runtime.torch.profiler import QUICK

KEPT = "plan and costs are from an earlier run"
ANEW = "--no_cache, or cache=False, measures and searches again"
FEWEST_OPS = 200
"""A search for fewer is over before another process has started."""
_ROUNDING = 1e-9


@without_autocast()
def place_call(request: TrainRequest, executor: Executor, captured: CapturedCall, step: CallStep) -> Placement:
    """The plan of a captured call, with costs read from the request's `cost_path` or measured on device 0; the best one so far where its
    search was interrupted. Costs and plan of an earlier run where the request has a `cache` with those of the same call.

    Raises what the stages raise: ProfileError, MismatchError, InfeasibleError, ExecutionError.
    """
    prepared = _prepared(request, executor, captured.graph)  # what it lacks is told early
    cache, key = None if request.reads_files else request.cache, ""
    if cache is not None:
        key = _key(request, executor, captured)
        kept = find_plan(cache, key, prepared)
        placement = None if kept is None else _placed_as_kept(request, executor, with_counts(captured.graph, captured.binding), kept)
        if placement is not None:
            return placement.noting(f"{KEPT}, kept in {cache}; {ANEW}")
    costs = costed(request, executor, captured.graph, captured.binding, step, QUICK)
    placement = place(request, costs, find_cluster(request, executor))
    result, profile = placement.result, placement.profile
    if cache is None or result.interrupted or profile is None:
        return placement
    reason = keep_plan(cache, key, KeptPlan(profile, result.plan, result.notes, result.untried), request.made_by)
    return placement.noting(f"plan and costs can't be kept in {cache}: {reason}") if reason else placement


@without_autocast()
def begin_search(request: TrainRequest, executor: Executor, captured: CapturedCall, step: CallStep) -> Search | None:
    """A search for the call's plan in another process, with costs measured here; it ends with the plan in the request's `cache`, where
    `place_call` finds it. None where that is over as soon here, no core is left for it, the process can't be told what is asked, or the
    plan is there already. Raises what measuring costs raises."""
    if len(captured.graph) < FEWEST_OPS or request.cache is None or request.reads_files or not is_serializable(request.plan):
        return None
    if not request.cuda and torch.get_num_threads() >= len(os.sched_getaffinity(0)):
        return None
    prepared, key = _prepared(request, executor, captured.graph), _key(request, executor, captured)
    if find_plan(request.cache, key, prepared) is not None:
        return None
    with as_it_was(step):
        costs = costed(request, executor, captured.graph, captured.binding, step, QUICK)
        cluster = scale_links(find_cluster(request, executor)[0], request.comm_cost_factor)
    asked = {
        "plan": plan_to_json(request.plan),
        "graph": prepared.to_json(),
        "profile": costs.profile.to_json(),
        "cluster": cluster.to_json(),
        "host": host_of(request),
        "cache": str(request.cache),
        "key": key,
        "command": list(request.made_by.command),
    }
    return Search(asked)


def _prepared(request: TrainRequest, executor: Executor, graph: OpGraph) -> OpGraph:
    return pipeline.prepared(graph, request.plan, [d.name for d in executor.devices])


def _key(request: TrainRequest, executor: Executor, captured: CapturedCall) -> str:
    return plan_key(request.choices(), executor.devices, captured.graph, captured.binding)


def _placed_as_kept(request: TrainRequest, executor: Executor, captured: OpGraph, kept: KeptPlan) -> Placement | None:
    """The placement of an earlier run; None where its plan is for other devices, or its step is not what it says."""
    unprobed = request if request.cluster is not None else replace(request, link=request.link or Link())
    cluster, _ = find_cluster(unprobed, executor)
    cluster = scale_links(cluster, request.comm_cost_factor)
    if request.cluster is None and request.link is None:
        cluster = replace(cluster, default=kept.plan.cluster.default, pairs=kept.plan.cluster.pairs)
    if cluster != kept.plan.cluster:
        return None
    costs = with_costs(captured, kept.profile, len(cluster), host_of(request))
    single = one_device_timeline(costs.alone, cluster.devices[0].speed)
    graph = costs.graph if len(set(kept.plan.placement)) > 1 else costs.alone
    planned = _prepared(request, executor, graph)
    if placement_violations(planned, cluster, kept.plan.placement):
        return None
    plan = replace(kept.plan, graph=planned)
    trial = Trial(plan.placement, plan.priority, Simulator(planned, cluster))
    same = math.isclose(trial.makespan_us, plan.predicted_step_us, rel_tol=_ROUNDING)
    if not same or memory_violations(cluster, trial.peak_memory_bytes):
        return None
    return Placement(graph, kept.profile, PlanResult(plan, trial, notes=kept.notes, untried=kept.untried), single)


def place_alike(earlier: Placement, captured: CapturedCall) -> Timeline | None:
    """The call of another shape, placed op by op as the earlier one; None where it has other ops, or does not fit in that way."""
    graph = captured.graph
    if graph.index != earlier.graph.index or [op.colocation for op in graph.ops] != [op.colocation for op in earlier.graph.ops]:
        return None
    costs = [{name: getattr(k, name) for name in ("compute_us", "temporary_bytes", "issue_us")} for k in earlier.graph.ops]
    graph = graph.replace_ops([replace(op, **own) for op, own in zip(graph.ops, costs, strict=True)])
    timeline = earlier.result.timeline
    alike = simulate(graph, timeline.cluster, timeline.placement, timeline.rank)
    return None if memory_violations(alike.cluster, alike.peak_memory_bytes) else alike
