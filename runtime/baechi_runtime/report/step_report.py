"""StepReport: what a placed step was predicted to take and what it took, for people and as JSON."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from baechi_ext.place.common import PlanResult
from baechi_ext.simulate import Timeline
from baechi_runtime.measure.link_probe import LinkProbe
from baechi_runtime.measure.samples import Measurement
from baechi_runtime.report.report import PlanReport, inconclusive, labelled, load_text, parity_text, prediction_error
from baechi_runtime.report.tables import as_range, as_size, as_time, console, say, share_of, table_of


@dataclass(frozen=True, kw_only=True)
class StepReport(PlanReport):
    """Everything `baechi train` found out about one step, of a built-in model or of a user's own script."""

    model: str
    executor: str
    result: PlanResult
    single: Timeline
    parity: Mapping[str, Any] | None
    """In JSON; None where nothing was compared."""
    measurement: Measurement
    peak_bytes: tuple[int | float, ...]
    """One entry per device; empty where they were not measured."""
    peaks_measured_by: str
    """See baechi_runtime.torch.threads.accounting.how_measured."""
    probe: LinkProbe | None
    unplaced: str = "eager, one device"
    """The unplaced step's name in reports."""

    def facts(self) -> dict[str, Any]:
        measured, timeline, over_unplaced = self.measurement, self.result.timeline, self.measurement.over_unplaced
        doubts = measured.doubts()
        return {
            "model": self.model,
            "executor": self.executor,
            **self.plan_facts(),
            "parity": None if self.parity is None else dict(self.parity),
            "measured_step_us": measured.steps_json(),
            **(self._over_one_device() if measured.in_turn else {"unplaced": self.unplaced}),
            "speedup_over_eager": None if over_unplaced is None else over_unplaced.to_json(),
            "busy_us": {"predicted": list(timeline.busy_us), "measured": list(measured.busy_us.get("placed", ()))},
            "peak_memory_bytes": {
                "predicted": list(timeline.peak_memory_bytes),
                "measured": list(self.peak_bytes),
                "measured_by": self.peaks_measured_by if self.peak_bytes else "none",
            },
            "link_probe": None if self.probe is None else self.probe.to_json(),
            "load_of_others": measured.load_of_others,
            "conclusive": not doubts,
            "doubts": doubts,
        }

    def _over_one_device(self) -> dict[str, Any]:
        speedup, overhead = self.measurement.ratio("single"), self.measurement.ratio("single", "eager")
        return {
            "speedup": speedup.median,
            "speedup_interval": speedup.to_json(),
            "overhead_of_one_device_program": overhead.to_json(),
        }

    def print(self) -> None:
        """Prints the tables and the verdict on stdout."""
        out = console(160)
        out.print(self._steps())
        say(out, "")
        out.print(self._devices())
        say(out, "", *self.lines())

    def _steps(self) -> Table:
        measured, timeline = self.measurement, self.result.timeline
        table = table_of("step", "predicted", "measured", "min to max", "eager / it", "95% interval")
        predictions = {"single": self.single.makespan_us, "placed": timeline.makespan_us}
        titles = {"eager": self.unplaced, "single": "our program, one device", "placed": f"{self.result.plan.method}, placed"}
        for name, samples in measured.samples.items():
            ratio = measured.ratio("eager", name)
            table.add_row(
                Text(titles.get(name, name)),
                as_time(predictions[name]) if name in predictions else "-",
                as_time(samples.median),
                as_range(samples.us),
                f"{ratio.median:.2f}",
                f"{ratio.low:.2f} to {ratio.high:.2f}",
            )
        return table

    def _devices(self) -> Table:
        timeline, measured = self.result.timeline, self.measurement
        peak = "peak accounted" if self.peaks_measured_by == "accounting" else "peak measured"
        table = table_of("device", "ops", "busy predicted", "busy measured", "peak predicted", peak, "limit")
        step = measured.samples["placed"].median
        for i, (device, order) in enumerate(zip(timeline.cluster.devices, timeline.device_order(), strict=True)):
            table.add_row(
                Text(device.name),
                str(len(order)),
                share_of(timeline.busy_us[i], timeline.makespan_us),
                share_of(measured.busy_us["placed"][i], step) if "placed" in measured.busy_us else "-",
                as_size(timeline.peak_memory_bytes[i]),
                as_size(self.peak_bytes[i]) if self.peak_bytes else "-",
                "-" if device.memory_bytes is None else as_size(device.memory_bytes),
            )
        return table

    def lines(self) -> Iterator[str]:
        """The verdict on measured steps that took turns, and the facts behind it."""
        timeline, measured, bound = self.result.timeline, self.measurement, self.result.lower_bound_us
        ratio, error = measured.ratio("single"), prediction_error(timeline.makespan_us, measured.samples["placed"].median)
        above = f"the plan is predicted {timeline.makespan_us / bound - 1:.1%} above it ({self.result.status})" if bound else ""
        predicted = self.single.makespan_us / max(timeline.makespan_us, 1e-9)
        yield labelled("speed-up", f"{ratio} over one device, predicted {predicted:.2f}; {error}")
        yield labelled("lower bound", f"{as_time(bound)}; {above}" if bound else "none")
        yield labelled("moved", f"{len(timeline.transfers)} tensors, {as_size(timeline.bytes_moved)} a step")
        if self.parity is not None:
            relative = "infinite" if self.parity["max_rel_diff"] is None else f"{self.parity['max_rel_diff']:.3g}"
            yield labelled("parity", f"{parity_text(self.parity)} ({relative} relative, allowed {self.parity['tolerance']:g})")
        yield labelled("others' load", load_text(measured.load_of_others))
        yield from (labelled("note", note) for note in self.notes)
        if doubts := measured.doubts():
            yield inconclusive(doubts, ", or with more --num_steps")
        elif self.result.untried and not self.result.splits:
            yield labelled("verdict", self.result.why_whole)
        elif ratio.low <= 1.0:
            yield labelled("verdict", f"splitting does not pay here: one device is {'as fast' if ratio.high > 1.0 else 'faster'}")
