"""StepReport: what a placed step was predicted to take and what it took, for people and as JSON."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from baechi_ext.ir.files import SCHEMA_VERSION
from baechi_ext.place.common import PlanResult
from baechi_ext.simulate import Timeline
from runtime.links import LinkProbe
from runtime.parity_result import Parity
from runtime.samples import Measurement
from runtime.tables import as_size, as_time


@dataclass(frozen=True)
class StepReport:
    """Everything `baechi train` found out about one step."""

    model: str
    executor: str
    result: PlanResult
    single: Timeline
    """The prediction for one device."""
    parity: Parity
    measurement: Measurement
    measured_peak_bytes: tuple[int, ...]
    peak_measured_by: str
    """See runtime.accounting.how_measured; "none" where it was not."""
    probe: LinkProbe | None
    notes: tuple[str, ...]
    unplaced: str = "eager, one device"
    """What the table calls the unplaced step."""
    sent_bytes: Mapping[str, float] | None = None
    """Of a plan on groups: what all processes sent in a step, between groups and inside them."""

    @property
    def conclusive(self) -> bool:
        return not self.measurement.doubts()

    def to_json(self) -> dict[str, Any]:
        """What `train --json` prints (docs/files.md), but for who made it."""
        measured, timeline = self.measurement, self.result.timeline
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "method": self.result.plan.method,
            "executor": self.executor,
            "num_devices": len(self.result.plan.cluster),
            "status": self.result.status,
            "parity": self.parity.to_json(),
            "predicted_step_us": {"single": self.single.makespan_us, "placed": timeline.makespan_us},
            "measured_step_us": {name: samples.to_json() for name, samples in measured.samples.items()},
            "speedup": measured.ratio("single").median,
            "speedup_interval": measured.ratio("single").to_json(),
            "speedup_over_eager": measured.ratio("eager").to_json(),
            "overhead_of_one_device_program": measured.ratio("single", "eager").to_json(),
            "predicted_speedup": self.single.makespan_us / timeline.makespan_us if timeline.makespan_us else 1.0,
            "busy_us": {"predicted": list(timeline.busy_us), "measured": list(measured.busy_us["placed"])},
            "peak_memory_bytes": {
                "predicted": list(timeline.peak_memory_bytes),
                "measured": list(self.measured_peak_bytes),
                "measured_by": self.peak_measured_by,
            },
            "lower_bound_us": self.result.lower_bound_us,
            "placement_seconds": self.result.placement_seconds,
            "transfers": len(timeline.transfers),
            "bytes_moved": timeline.bytes_moved,
            **({} if self.sent_bytes is None else {"sent_bytes": dict(self.sent_bytes)}),
            "link_probe": None if self.probe is None else self.probe.to_json(),
            "load_of_others": measured.load_of_others,
            "conclusive": self.conclusive,
            "doubts": measured.doubts(),
            "notes": list(self.notes),
        }

    def print(self) -> None:
        """Prints the tables and the verdict on stdout."""
        console = Console(file=sys.stdout, highlight=False)
        if not console.is_terminal:
            console = Console(file=sys.stdout, highlight=False, width=160)
        console.print(self._steps())
        console.print()
        console.print(self._devices())
        console.print()
        for line in self._verdict():
            console.print(Text(line), soft_wrap=True)

    def _steps(self) -> Table:
        measured, timeline = self.measurement, self.result.timeline
        table = _table("step", "predicted", "measured", "min to max", "eager / it", "95% interval")
        predictions = {"single": self.single.makespan_us, "placed": timeline.makespan_us}
        titles = {"eager": self.unplaced, "single": "our program, one device", "placed": f"{self.result.plan.method}, placed"}
        for name, samples in measured.samples.items():
            ratio = measured.ratio("eager", name)
            table.add_row(
                Text(titles.get(name, name)),
                as_time(predictions[name]) if name in predictions else "-",
                as_time(samples.median),
                f"{as_time(samples.min)} to {as_time(max(samples.us))}",
                f"{ratio.median:.2f}",
                f"{ratio.low:.2f} to {ratio.high:.2f}",
            )
        return table

    def _devices(self) -> Table:
        timeline, measured = self.result.timeline, self.measurement
        peak = "peak accounted" if self.peak_measured_by == "accounting" else "peak measured"
        table = _table("device", "ops", "busy predicted", "busy measured", "peak predicted", peak, "limit")
        step = measured.samples["placed"].median
        for i, (device, order) in enumerate(zip(timeline.cluster.devices, timeline.device_order(), strict=True)):
            table.add_row(
                Text(device.name),
                str(len(order)),
                _share(timeline.busy_us[i], timeline.makespan_us),
                _share(measured.busy_us["placed"][i], step) if measured.busy_us["placed"] else "-",
                as_size(timeline.peak_memory_bytes[i]),
                as_size(self.measured_peak_bytes[i]) if self.measured_peak_bytes else "-",
                "-" if device.memory_bytes is None else as_size(device.memory_bytes),
            )
        return table

    def _verdict(self) -> Sequence[str]:
        timeline, measured = self.result.timeline, self.measurement
        ratio, error = measured.ratio("single"), timeline.makespan_us / measured.samples["placed"].median - 1
        load = "unknown" if measured.load_of_others is None else f"{measured.load_of_others:.1%} of the cores"
        bound = self.result.lower_bound_us
        lines = [
            f"speed-up       {ratio} over one device, predicted {self.single.makespan_us / max(timeline.makespan_us, 1e-9):.2f}; "
            f"the predicted step is {error:+.1%} off the measured one",
            f"lower bound    {as_time(bound)}; the plan is predicted {timeline.makespan_us / bound - 1:.1%} above it ({self.result.status})"
            if bound
            else "lower bound    none",
            f"moved          {len(timeline.transfers)} tensors, {as_size(timeline.bytes_moved)} a step",
            f"parity         {self.parity.compared} tensors, largest difference {self.parity.max_abs_diff:.3g} "
            f"({self.parity.max_rel_diff:.3g} relative, allowed {self.parity.tolerance:g})",
            f"others' load   {load} while measuring",
            *(f"note           {note}" for note in self.notes),
        ]
        if self.sent_bytes is not None:
            between, inside = (as_size(self.sent_bytes[f"{where}_groups"]) for where in ("between", "inside"))
            lines.insert(3, f"sent           {between} between groups and {inside} inside them a step, by all devices (counted)")
        doubts = measured.doubts()
        if doubts:
            lines.append(f"inconclusive   {'; '.join(doubts)}: run again on a quiet machine, or with more --num_steps")
        elif self.result.untried and not self.result.splits:
            lines.append(f"verdict        {self.result.why_whole}")
        elif ratio.low <= 1.0:
            as_fast = "as fast" if ratio.high > 1.0 else "faster"
            lines.append(f"verdict        splitting does not pay here: one device is {as_fast}")
        return lines


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole > 0 else "-"
