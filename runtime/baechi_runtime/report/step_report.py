"""Reports of a model's placed step: StepReport, what it was predicted to take and what it took, and RunReport, a training of many steps."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec import structs

from baechi_ext.place.common import PlanResult
from baechi_ext.simulate import Timeline
from baechi_runtime.measure.link_probe import LinkProbe
from baechi_runtime.measure.samples import Measurement, Samples, too_few
from baechi_runtime.report.findings import PlanFindings, labelled, load_text, prediction_error
from baechi_runtime.report.report import COMPILED, Checkpoint, ParityCheck, PerDevice, ProbedLink, Sides, Step, Training
from baechi_runtime.report.tables import as_limit, as_range, as_size, as_time, share_of, show, table_of
from baechi_runtime.report.verdict import decisive, line_of, short_name, step_verdict

if TYPE_CHECKING:
    from rich.table import Table

_LOSSES_SHOWN = 12


@dataclass(frozen=True, kw_only=True, repr=False)
class _ModelReport(PlanFindings):
    """A report on a step that was placed and run."""

    model: str
    executor: str
    result: PlanResult
    single: Timeline
    parity: ParityCheck | None
    """None where nothing was compared."""

    def planned(self) -> dict[str, Any]:
        return {"model": self.model, "executor": self.executor, **super().planned(), "parity": self.parity}


@dataclass(frozen=True, kw_only=True, repr=False)
class StepReport(_ModelReport):
    """Everything `baechi train` found out about one step, of a built-in model or of a user's own script."""

    measurement: Measurement
    peak_bytes: tuple[int | float, ...]
    """One entry per device; empty where they were not measured."""
    peaks_measured_by: str
    """See baechi_runtime.torch.measure.how_measured."""
    probe: LinkProbe | None
    unplaced: str = "eager, one device"
    """The unplaced step's name in reports."""

    def report(self) -> Step:
        measured, timeline = self.measurement, self.result.timeline
        measured_by = self.peaks_measured_by if self.peak_bytes else "none"
        found = Step(
            **self.planned(),
            **(self._over_one_device() if measured.in_turn else {"unplaced": self.unplaced}),
            predicted_step_us=Sides(single=self.predicted_single_us, placed=self.predicted_us),
            measured_step_us=measured.reported(),
            speedup_over_eager=measured.over_unplaced,
            busy_us=PerDevice(predicted=list(timeline.busy_us), measured=list(measured.busy_us.get("placed", ()))),
            peak_memory_bytes=PerDevice(
                predicted=list(timeline.peak_memory_bytes), measured=list(self.peak_bytes), measured_by=measured_by
            ),
            link_probe=None if self.probe is None else ProbedLink.of(self.probe),
            load_of_others=measured.load_of_others,
        )
        doubts = measured.doubts(decisive(found)[0])
        return structs.replace(found, conclusive=not doubts, doubts=doubts)

    def _over_one_device(self) -> dict[str, Any]:
        speedup, overhead = self.measurement.ratio("single"), self.measurement.ratio("single", "eager")
        found = {"speedup": speedup.median, "speedup_interval": speedup, "overhead_of_one_device_program": overhead}
        return {**found, "eager_step": self.unplaced}

    def print(self) -> None:
        """Prints the verdict, the tables and the facts behind it on stdout."""
        verdict, *facts = self.lines()
        show(verdict, "", self._steps(), "", self._devices(), "", *facts, width=160)

    def _steps(self) -> "Table":
        measured = self.measurement
        predictions = {"single": self.single.makespan_us, "placed": self.result.timeline.makespan_us}
        titles = {"eager": self.unplaced, "single": "our program, one device", "placed": f"{self.result.plan.method}, placed"}
        titles |= {COMPILED: f"{COMPILED}, one device"}

        def row(name: str, samples: Samples) -> tuple[str, ...]:
            ratio, predicted = measured.ratio("eager", name), as_time(predictions[name]) if name in predictions else "-"
            times = predicted, as_time(samples.median), as_range(samples.us)
            return titles.get(name, name), *times, f"{ratio.median:.2f}", f"{ratio.low:.2f} to {ratio.high:.2f}"

        interval = "range" if too_few(len(measured.samples["placed"].us)) else "95% interval"
        names = ("step", "predicted", "measured", "min to max", f"speed-up over {short_name(self.unplaced)}", interval)
        return table_of(names, (row(name, samples) for name, samples in measured.samples.items()))

    def _devices(self) -> "Table":
        timeline, busy_us = self.result.timeline, self.measurement.busy_us.get("placed")
        step_us = self.measurement.samples["placed"].median
        rows = (
            (
                device.name,
                str(len(order)),
                share_of(timeline.busy_us[i], timeline.makespan_us),
                "-" if busy_us is None else share_of(busy_us[i], step_us),
                as_size(timeline.peak_memory_bytes[i]),
                as_size(self.peak_bytes[i]) if self.peak_bytes else "-",
                as_limit(device.memory_bytes),
            )
            for i, (device, order) in enumerate(zip(timeline.cluster.devices, timeline.device_order(), strict=True))
        )
        peak = f"peak {PerDevice(measured_by=self.peaks_measured_by).found}"
        return table_of(("device", "ops", "busy predicted", "busy measured", "peak predicted", peak, "limit"), rows)

    def lines(self) -> Iterator[str]:
        """The verdict on measured steps that took turns, and the facts behind it."""
        timeline, measured, bound = self.result.timeline, self.measurement, self.result.lower_bound_us
        why_whole = self.result.why_whole if self.result.untried else ""
        found = step_verdict(self.report(), splits=self.result.splits, why_whole=why_whole)
        yield "" if found is None else line_of(found)
        ratio, error = measured.ratio("single"), prediction_error(timeline.makespan_us, measured.samples["placed"].median)
        above = f"the plan is predicted {timeline.makespan_us / bound - 1:.1%} above it ({self.result.status})" if bound else ""
        predicted = self.single.makespan_us / max(timeline.makespan_us, 1e-9)
        yield labelled("speed-up", f"{ratio} over one device, predicted {predicted:.2f}; {error}")
        yield labelled("lower bound", f"{as_time(bound)}; {above}" if bound else "none")
        yield labelled("transferred", f"{len(timeline.transfers)} tensors, {as_size(timeline.bytes_moved)} per step")
        if self.parity is not None:
            relative = "infinite" if self.parity.max_rel_diff is None else f"{self.parity.max_rel_diff:.3g}"
            yield labelled("parity", f"{self.parity} ({relative} relative, allowed {self.parity.tolerance or 0:g})")
        yield labelled("CPU load", load_text(measured.load_of_others))
        yield from (labelled("note", note) for note in self.notes)


@dataclass(frozen=True)
class Progressed:
    """The course of a run."""

    losses: tuple[float, ...]
    """Losses of all steps, including those before the checkpoint it went on from."""
    resumed_from: int | None
    """The step of that checkpoint; None where the run began at the beginning."""
    step_us: tuple[float, ...]
    """Wall time of each step of this run."""
    checkpoint_step: int | None
    """The last checkpoint's step."""


@dataclass(frozen=True, kw_only=True, repr=False)
class RunReport(_ModelReport):
    """A training: what was run where, and its losses."""

    progressed: Progressed
    checkpoint: str | None
    """The folder of its checkpoints."""

    def report(self) -> Training:
        timeline, run = self.result.timeline, self.progressed
        return Training(
            **self.planned(),
            cluster=timeline.cluster.to_json(),
            steps=len(run.losses),
            losses=list(run.losses),
            resumed_from=run.resumed_from,
            checkpoint=None if self.checkpoint is None else Checkpoint(folder=self.checkpoint, step=run.checkpoint_step),
            predicted_step_us=timeline.makespan_us,
            measured_step_us=Samples(run.step_us) if run.step_us else None,
        )

    def lines(self) -> Iterator[str]:
        """The losses, evenly spread where there are many, and the facts."""
        run, result = self.progressed, self.result
        last = len(run.losses)
        shown = sorted({round(1 + i * (last - 1) / (_LOSSES_SHOWN - 1)) for i in range(_LOSSES_SHOWN)})
        width = len(str(last))
        yield from (f"step {step:>{width}}   loss {run.losses[step - 1]:.9g}" for step in shown)
        begun = "the beginning" if run.resumed_from is None else f"the checkpoint of step {run.resumed_from}"
        median, predicted = statistics.median(run.step_us or [0.0]), as_time(result.timeline.makespan_us)
        took = f", {as_time(median)} each (median), predicted {predicted}" if run.step_us else ""
        devices = len(result.plan.cluster)
        yield ""
        yield labelled("trained", f"{self.model}, {len(run.step_us)} steps from {begun}{took}")
        yield labelled("placed", f"{result.plan.method}, {devices} device{'s' * (devices > 1)}, {self.executor}")
        if self.parity is not None:
            yield labelled("parity", str(self.parity))
        if self.checkpoint is not None:
            yield labelled("checkpoint", f"step {run.checkpoint_step} in {self.checkpoint}")
        yield from (labelled("note", note) for note in self.notes)
