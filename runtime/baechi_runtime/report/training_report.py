"""RunReport: a training that went on for many steps, its losses, and where it began."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from baechi_ext.place.common import PlanResult
from baechi_ext.simulate import Timeline
from baechi_runtime.measure.samples import Samples
from baechi_runtime.report.report import PlanReport, labelled, parity_text
from baechi_runtime.report.tables import as_time

_LOSSES_SHOWN = 12


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


@dataclass(frozen=True, kw_only=True)
class RunReport(PlanReport):
    """A training: what was run where, and its losses."""

    model: str
    executor: str
    result: PlanResult
    single: Timeline
    parity: Mapping[str, Any]
    progressed: Progressed
    checkpoint: str | None

    def facts(self) -> dict[str, Any]:
        timeline, run = self.result.timeline, self.progressed
        return {
            "model": self.model,
            "executor": self.executor,
            **self.plan_facts(),
            "cluster": timeline.cluster.to_json(),
            "parity": dict(self.parity),
            "steps": len(run.losses),
            "losses": list(run.losses),
            "resumed_from": run.resumed_from,
            "checkpoint": None if self.checkpoint is None else {"folder": self.checkpoint, "step": run.checkpoint_step},
            "predicted_step_us": timeline.makespan_us,
            "measured_step_us": Samples(run.step_us).to_json() if run.step_us else None,
        }

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
        yield labelled("parity", parity_text(self.parity))
        if self.checkpoint is not None:
            yield labelled("checkpoint", f"step {run.checkpoint_step} in {self.checkpoint}")
        yield from (labelled("note", note) for note in self.notes)
