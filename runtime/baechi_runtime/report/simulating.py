"""`baechi simulate`: what a plan is worth, as it is or with something changed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from baechi_ext.cost import scale_links, vary_costs
from baechi_ext.hybrid.plan import load_plan
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.hints import Pin, with_pins
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.ir.plan import memory_violations, placement_violations
from baechi_ext.simulate import Timeline, lower_bound_us
from baechi_runtime.report import tables
from baechi_runtime.report.comparing_plans import print_what_if
from baechi_runtime.report.plan_files import as_planned, on_devices, other_costs, timeline_of


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A request to simulate: a plan's file, another cluster where one is given, and what is to be different.

    `cluster_from`: the cluster to simulate on, of the plan's or the given one.
    """

    plan: str
    cluster: Cluster | None
    cluster_from: Callable[[Cluster], Cluster]
    comm_cost_factor: float = 1.0
    cost_factor: float = 1.0
    seed: int = 0
    pins: tuple[Pin, ...] = ()


@dataclass(frozen=True)
class Simulated:
    """A plan's step; `before`: the step of the plan as it is in its file, where that is not the same."""

    timeline: Timeline
    lower_bound_us: float
    violations: list[str]
    before: Timeline | None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The JSON that `baechi simulate --json` prints (docs/files.md)."""
        value = {**self.timeline.to_json(), "lower_bound_us": self.lower_bound_us, "violations": self.violations}
        value["notes"] = list(self.notes)
        return value if self.before is None else {**value, "before": self.before.to_json()}

    def print(self) -> None:
        """Prints the step on stdout."""
        facts = {"violations": "; ".join(self.violations) or "none"} | ({"note": "; ".join(self.notes)} if self.notes else {})
        if self.before is None:
            tables.print_timeline(self.timeline, self.lower_bound_us, facts)
        else:
            bound = {"lower bound": f"{tables.as_time(self.lower_bound_us)} (of what if)"}
            print_what_if(self.before, self.timeline, bound | facts, self.violations)


def simulated(graph: OpGraph, asked: WhatIf) -> Simulated:
    """The step of a plan of `graph`. Raises FileError, PlanError, MismatchError, OptionError."""
    plan = load_plan(asked.plan, graph, asked.cluster)
    before = on_devices(plan) if asked.cluster is None else as_planned(asked.plan, graph)
    after = on_devices(plan.on(scale_links(asked.cluster_from(plan.cluster), asked.comm_cost_factor)))
    if asked.pins:
        pinned = with_pins(after.graph, asked.pins, [device.name for device in after.cluster.devices])
        after = replace(after, graph=pinned, placement=pinned.pinned(after.placement))
    if asked.cost_factor != 1:
        costed, cluster = vary_costs(after.graph, after.cluster, asked.cost_factor, asked.seed)
        after = replace(after, graph=costed, cluster=cluster)
    is_same = asked.cost_factor == 1 and before is not None and (before.placement, before.cluster) == (after.placement, after.cluster)
    timeline = timeline_of(after)
    found = placement_violations(after.graph, after.cluster, after.placement)
    found += memory_violations(after.cluster, timeline.peak_memory_bytes)
    bound = lower_bound_us(after.graph, after.cluster)
    planned = timeline if is_same or before is None else timeline_of(before)
    return Simulated(timeline, bound, found, None if before is None or is_same else planned, other_costs(before, planned))
