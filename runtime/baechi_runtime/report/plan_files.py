"""Plans as the commands that ask about them find them: beside their graph, on single devices or on groups; or plans of layers, sharded."""

from pathlib import Path

from baechi_ext.errors import FileError, PlanError
from baechi_ext.hybrid.plan import HybridPlan, load_plan
from baechi_ext.ir.files import read_json, require_there
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.ir.plan import Plan
from baechi_ext.shard.plan import KIND, ShardPlan
from baechi_ext.simulate import Timeline, lower_bound_us, simulate
from baechi_runtime.files.run_folder import sharded_plan_of
from baechi_runtime.report.tables import as_time

PLAN, GRAPH = "plan.json", "graph.json"
"""Their names in the folders that `baechi train --out` writes."""
_ALIKE = 1e-3
"""Steps that differ by less are of the same costs: the simulator gives the same number for them everywhere."""


def plan_and_graph(plan: str, graph: str | None) -> tuple[Path, Path]:
    """The plan's file, and the graph's: `graph`, else the one beside it. Raises FileError where there is none."""
    file = Path(plan) / PLAN if Path(plan).is_dir() else Path(plan)
    beside = file.parent / GRAPH
    require_there(file, "plan")
    if graph is None and not beside.exists():
        raise FileError(
            f"{file}: a plan is explained with its graph, and there is no {GRAPH} beside it; name the graph's file: --graph=FILE"
        )
    return file, beside if graph is None else Path(graph)


def shard_plan_at(plan: str) -> ShardPlan | None:
    """The shard plan in this file, or of the sharded run in this folder; None where a plan of ops is there, or nothing.

    Raises what reading it raises.
    """
    file = sharded_plan_of(Path(plan)) if Path(plan).is_dir() else Path(plan)
    if file is None or not file.is_file() or read_json(file, "plan").get("kind") != KIND:
        return None
    return ShardPlan.load(file)


def on_devices(plan: Plan) -> Plan:
    """The plan; of one on groups of devices, the plan whose devices are the groups."""
    return plan.of_groups if isinstance(plan, HybridPlan) else plan


def as_planned(path: str | Path, graph: OpGraph) -> Plan | None:
    """The plan on its own cluster, whatever it is to be seen on; None where its file has none."""
    try:
        return on_devices(load_plan(path, graph))
    except PlanError:
        return None


def timeline_of(plan: Plan) -> Timeline:
    """The plan's step."""
    return simulate(plan.graph, plan.cluster, plan.placement, plan.priority)


def bound_of(plan: Plan, timeline: Timeline) -> float:
    """The lower bound that a plan's file says, or, where its graph has other costs than it was made with, the one of these; 0 where none is
    known. `timeline` is the plan's step."""
    return lower_bound_us(plan.graph, plan.cluster) if other_costs(plan, timeline) else plan.lower_bound_us


def other_costs(plan: Plan | None, timeline: Timeline | None = None) -> tuple[str, ...]:
    """A note where a plan's file, of the plan as `as_planned` has it, says another step than its graph gives on the plan's own cluster.
    `timeline` is that step, where it is known."""
    if plan is None or not plan.predicted_step_us:  # of another program
        return ()
    us = (timeline or timeline_of(plan)).makespan_us
    if abs(us / plan.predicted_step_us - 1) <= _ALIKE:
        return ()
    return (
        f"the plan was made with other costs: its file says a step of {as_time(plan.predicted_step_us)}, on this graph it takes "
        f"{as_time(us)}; name the graph that it was made with, or place this one anew",
    )
