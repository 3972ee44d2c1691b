"""`baechi export-device-map`: the device map that is nearest to a plan, how much of the plan it keeps, and what that costs."""

from dataclasses import dataclass
from typing import Any

from baechi_ext.ir import Plan
from baechi_ext.ir.hints import DeviceMap, nearest_map
from baechi_ext.ir.plan import memory_violations
from baechi_ext.place.trial import Trial, try_orders
from baechi_ext.simulate import Simulator, simulate
from baechi_runtime.report.tables import as_time


@dataclass(frozen=True, slots=True)
class ExportedMap:
    """A device map, and what it is worth beside the plan that it was made from."""

    devices: dict[str, int]
    kept_time: float
    """The part of the step's compute time that is on the plan's devices."""
    kept_bytes: float
    """The part of the persistent bytes that is."""
    plan_step_us: float
    placed: Trial

    @property
    def violations(self) -> list[str]:
        return memory_violations(self.placed.simulator.cluster, self.placed.timeline.peak_memory_bytes)

    def to_json(self) -> dict[str, Any]:
        return {
            "device_map": self.devices,
            "kept_time": self.kept_time,
            "kept_bytes": self.kept_bytes,
            "plan_step_us": self.plan_step_us,
            "predicted_step_us": self.placed.makespan_us,
            "peak_memory_bytes": list(self.placed.timeline.peak_memory_bytes),
            "violations": self.violations,
        }

    def lines(self) -> list[str]:
        """For people."""
        step_us = self.placed.makespan_us
        slower = f", {step_us / self.plan_step_us - 1:+.1%} beside the plan's {as_time(self.plan_step_us)}" if self.plan_step_us else ""
        return [
            f"device map      {len(self.devices)} names",
            f"kept            {self.kept_time:.1%} of the plan's compute time, {self.kept_bytes:.1%} of its parameters and states",
            f"predicted step  {as_time(step_us)}{slower}",
            f"violations      {'; '.join(self.violations) or 'none'}",
        ]


def export_device_map(plan: Plan) -> ExportedMap:
    """The device map that is nearest to the plan. Ops without a named module follow their neighbours, as they do when it is read.

    Raises GraphError for a graph whose ops don't know their modules.
    """
    graph, cluster = plan.graph, plan.cluster
    devices = nearest_map(graph, plan.placement)
    hinted = DeviceMap("the exported map", devices).apply(graph, [d.name for d in cluster.devices])
    placement = [op.expert or 0 for op in hinted.ops]
    kept = [v for v, (a, b) in enumerate(zip(placement, plan.placement, strict=True)) if a == b]
    times, sizes = ([getattr(op, cost) for op in graph.ops] for cost in ("compute_us", "persistent_bytes"))
    return ExportedMap(
        devices,
        sum(times[v] for v in kept) / (sum(times) or 1) if sum(times) else 1.0,
        sum(sizes[v] for v in kept) / (sum(sizes) or 1) if sum(sizes) else 1.0,
        simulate(graph, cluster, plan.placement, plan.priority).makespan_us,
        try_orders(Simulator(graph, cluster), placement, (plan.priority, None)),
    )
