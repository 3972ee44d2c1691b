"""A plan for hardware that is not here: what is said of it beside any other plan, above all how far its step may be off."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from baechi_ext.cost.hardware import CPU, OF_OPS, Hardware, spread_on, uncounted
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.common import PlanResult
from baechi_ext.simulate import Timeline
from baechi_runtime.report.tables import as_limit, as_range, as_size, as_time


@dataclass(frozen=True)
class Elsewhere:
    """Where a plan's costs are from; `single` is the whole step on one of those devices."""

    target: Hardware
    source: Hardware | None
    """The hardware on which they were measured; None: they were counted."""
    single: Timeline
    graph: OpGraph

    def facts(self, result: PlanResult) -> dict[str, str]:
        """Lines for people, by title."""
        spread = spread_on(self.target, self.source)
        of = "ops" if spread is OF_OPS else "such predictions"
        compared = "" if self.target.name == CPU else "; no step on a GPU was compared"
        source = self.source
        costs = "counted operations and bytes" if source is None else f"measured on {source.name} ({source.source}), scaled"
        return {
            "planned for": f"{len(result.timeline.cluster)} x {self.target.name}, not run",
            "range": f"{as_range(spread.around(result.predicted_step_us))}, if off by as much as 90% of {of} were on CPU cores{compared}",
            "verdict": self._verdict(result),
            "costs": "; ".join([costs, *self.notes()]),
            "figures": self.target.source,
        }

    def notes(self) -> Iterable[str]:
        """Sentences on what is not in the costs."""
        unknown = uncounted(self.graph.ops)
        if unknown:
            yield f"operations of {', '.join(unknown)} are not known: taken to move bytes alone, which is too little"
        if not any(op.temporary_bytes for op in self.graph.ops):
            yield "memory that ops need while they run, beyond their outputs, is not known and not in the peaks"

    def _verdict(self, result: PlanResult) -> str:
        held, room = self.single.peak_memory_bytes[0], result.timeline.cluster.devices[0].memory_bytes
        of_one = f"one device takes {as_time(self.single.makespan_us)} and holds {as_size(held)}"
        if room is not None and held > room:
            return f"split: one device does not hold it, {as_size(held)} of {as_limit(room)}"
        if not result.splits:
            return f"do not split: nothing faster than one device was found; {of_one}"
        times = self.single.makespan_us / result.predicted_step_us
        return f"{'split' if times > 1 else 'do not split'}: {times:.3g} times as fast as one device; {of_one}"

    def to_json(self, result: PlanResult) -> dict[str, Any]:
        """The field `elsewhere` of `--json`."""
        return {
            "hardware": self._figures(self.target),
            "measured_on": None if self.source is None else self._figures(self.source),
            "step_range_us": list(spread_on(self.target, self.source).around(result.predicted_step_us)),
            "one_device_us": self.single.makespan_us,
            "one_device_bytes": self.single.peak_memory_bytes[0],
            "verdict": self._verdict(result),
        }

    @staticmethod
    def _figures(hardware: Hardware) -> dict[str, Any]:
        return asdict(hardware) | {"link": hardware.link.to_json()}
