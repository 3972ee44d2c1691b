"""Plans as the commands that ask about them find them: beside their graph, on single devices or on groups."""

from pathlib import Path

from baechi_ext.errors import FileError
from baechi_ext.hybrid.plan import HybridPlan
from baechi_ext.ir.plan import Plan

PLAN, GRAPH = "plan.json", "graph.json"
"""Their names in the folders that `baechi train --out` writes."""


def plan_and_graph(plan: str, graph: str | None) -> tuple[Path, Path]:
    """The plan's file, and the graph's: `graph`, else the one beside it. Raises FileError where there is none."""
    file = Path(plan) / PLAN if Path(plan).is_dir() else Path(plan)
    beside = file.parent / GRAPH
    if graph is None and not beside.exists():
        raise FileError(
            f"{file}: a plan is explained with its graph, and there is no {GRAPH} beside it; name the graph's file: --graph=FILE"
        )
    return file, beside if graph is None else Path(graph)


def on_devices(plan: Plan) -> Plan:
    """The plan; of one on groups of devices, the plan whose devices are the groups."""
    return plan.of_groups if isinstance(plan, HybridPlan) else plan
