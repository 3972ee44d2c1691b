"""Explains what bounds the step of a plan, where its time goes, and what would change it."""

from dataclasses import asdict, dataclass
from typing import Any

from baechi_ext.explain.idle import DeviceIdle, idle_devices
from baechi_ext.explain.memory import DeviceMemory, device_memories
from baechi_ext.explain.path import OP, Part, Paths, Stretch
from baechi_ext.explain.sensitivity import TransferCosts, WhatIf, sensitivity, transfer_costs
from baechi_ext.ir.plan import Plan
from baechi_ext.simulate.simulator import Simulator
from baechi_ext.simulate.timeline import Timeline


@dataclass(frozen=True, slots=True)
class PlanExplanation:
    """Everything that is said of a plan's simulated step."""

    timeline: Timeline
    critical_path: tuple[Stretch, ...]
    critical_parts: tuple[Part, ...]
    """They add up to the step, the longest first."""
    data_parts: tuple[Part, ...]
    """The same for the data path, whose waits for busy devices and links are parts of their own."""
    transfers: TransferCosts
    idle: tuple[DeviceIdle, ...]
    memory: tuple[DeviceMemory, ...]
    what_ifs: tuple[WhatIf, ...]

    def to_json(self) -> dict[str, Any]:
        """The output of `baechi explain --json` (docs/files.md); devices are indices."""
        timeline, step_us = self.timeline, self.timeline.makespan_us
        return {
            "step_us": step_us,
            "devices": [device.name for device in timeline.cluster.devices],
            "critical_path": {
                "parts": [part.to_json(step_us) for part in self.critical_parts],
                "stretches": [stretch.to_json(timeline) for stretch in self.critical_path],
            },
            "data_path": {"parts": [part.to_json(step_us) for part in self.data_parts]},
            "transfers": self.transfers.to_json(timeline.graph),
            "idle": [idle.to_json(timeline) for idle in self.idle],
            "memory": [memory.to_json(timeline.graph) for memory in self.memory],
            "what_ifs": [asdict(what_if) for what_if in self.what_ifs],
        }


def explain_plan(plan: Plan) -> PlanExplanation:
    """The explanation of a plan of single devices, or of the groups of a hybrid one (`HybridPlan.of_groups`)."""
    timeline = Simulator(plan.graph, plan.cluster).run(plan.placement, plan.priority)
    paths = Paths(timeline)
    critical = paths.critical()
    handled = {stretch.op for stretch in critical if stretch.kind == OP and paths.handling_us(stretch.op) > 0}
    return PlanExplanation(
        timeline=timeline,
        critical_path=critical,
        critical_parts=paths.parts(critical),
        data_parts=paths.parts(paths.data()),
        transfers=transfer_costs(timeline, plan.priority, critical, handled),
        idle=idle_devices(paths),
        memory=device_memories(timeline),
        what_ifs=sensitivity(timeline, plan.priority),
    )
