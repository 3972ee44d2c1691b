"""The top of a run's page: the verdict, the step's times side by side, and how the run was made."""

import shlex
from collections.abc import Sequence
from typing import Any

from baechi_ext.simulate.one_device import one_device_timeline
from baechi_runtime.files.run_folder import RunFolder
from baechi_runtime.measure.samples import Ratio, Samples
from baechi_runtime.report.findings import load_text, prediction_error
from baechi_runtime.report.plan_files import other_costs
from baechi_runtime.report.report import COMPILED, SINGLE, Comparison, Run, Script, Step, Training
from baechi_runtime.report.tables import as_range, as_size, as_time

_MOST_NAMES = 6


def headline(run: RunFolder, report: Run) -> dict[str, Any]:
    """Title, verdict (tone, a few large words, a sentence), figures (label, value, detail) and facts, all of them text."""
    return {
        "title": report.model or run.graph.name or run.path.resolve().name,
        "method": run.plan.method,
        "lead": _lead(run),
        "figures": _figures(run, report),
        "verdict": _verdict(run, report),
        "facts": _facts(run, report),
        "command": report.made_by.command_line or run.made_by.command_line,
    }


def _lead(run: RunFolder) -> str:
    names, ops = [d.name for d in run.plan.cluster.devices], len(run.graph)
    shown = ", ".join(names[:_MOST_NAMES]) + (", \u2026" if len(names) > _MOST_NAMES else "")
    return f"{run.plan.method} on {len(names)} device{'s' * (len(names) != 1)} ({shown}), {ops} op{'s' * (ops != 1)}"


def _figures(run: RunFolder, report: Run) -> list[dict[str, str]]:
    step, bound = run.timeline.makespan_us, run.plan.lower_bound_us
    above = f"{step / bound - 1:.1%} above the lower bound of {as_time(bound)}" if bound else "no lower bound"
    figures = [figure("predicted step", as_time(step), above)]
    measured, unplaced = report.measured, _unplaced(report) or "plain eager"
    if measured is not None and measured.median:
        figures.append(figure("measured step", as_time(measured.median), f"{_spread(measured)}; {prediction_error(step, measured.median)}"))
    if isinstance(report, Step) and (eager := report.measured_step_us.get("eager")) is not None:
        figures.append(figure(unplaced, as_time(eager.median), _spread(eager)))
    for label, gain, predicted in (
        ("against one device", report.over_single, report.predicted_speedup if isinstance(report, Step) else None),
        (f"against {unplaced}", report.over_unplaced, None),
    ):
        if gain is not None:
            expected = "" if predicted is None else f"; predicted {predicted:.2f}"
            figures.append(figure(label, f"{gain.median:.2f} times as fast", f"{interval_text(gain, report.error)}{expected}"))
    moved = f"{len(run.timeline.transfers)} transfers a step"
    return [*figures, figure("moved", as_size(run.timeline.bytes_moved), moved)]


def figure(label: str, value: str, detail: str) -> dict[str, str]:
    """A number at the top of the page."""
    return {"label": label, "value": value, "detail": detail}


def _spread(steps: Samples) -> str:
    return "1 step" if len(steps.us) == 1 else f"{as_range(steps.us)}, {len(steps.us)} steps"


def interval_text(gain: Ratio, error: float = 0.05) -> str:
    return f"{100 * (1 - error):.4g}% interval {gain.low:.2f} to {gain.high:.2f}"


def verdict(tone: str, large: str, text: str) -> dict[str, str]:
    """A verdict: its tone, the words that a reader sees first, and a sentence."""
    return {"tone": tone, "large": large, "text": text}


def inconclusive(doubts: Sequence[str], advice: str) -> dict[str, str]:
    """The verdict on times that are in doubt."""
    return verdict("doubt", "Inconclusive", f"{'; '.join(doubts)}. {advice}")


def verdict_on(gain: Ratio, other: str, more: str = "", error: float = 0.05) -> dict[str, str]:
    """The verdict on a gain over another step that was measured; `more` is added."""
    large, interval = f"{gain.median:.2f} times as fast as {other}", interval_text(gain, error)
    if gain.low > 1:
        return verdict("good", large, f"Splitting pays ({interval}).{more}")
    clearly = "clearly " if gain.high > 1 else ""
    return verdict("bad", large, f"Splitting does not {clearly}pay here ({interval}).{more}")


def _verdict(run: RunFolder, report: Run) -> dict[str, str]:
    doubts, (gain, other) = report.doubts or [], _compared(report)
    if isinstance(report, Comparison) and report.recommendation:
        large = "" if gain is None else f"{gain.median:.2f} times as fast as {other}, with {run.plan.method}"
        if report.recommended == SINGLE:
            large = "Don't split"
        return verdict("doubt" if doubts else "good", "Inconclusive" if doubts else large, report.recommendation)
    if len(set(run.plan.placement)) < 2:
        return verdict("plain", "Not split", "The plan runs everything on one device.")
    if doubts:
        advice = "`baechi compare` measures in turn." if _unplaced(report) else "Run it again on a quiet machine, or with more --num_steps."
        return inconclusive(doubts, advice)
    if gain is None:
        step_us, whole_us = run.timeline.makespan_us, one_device_timeline(run.graph).makespan_us
        large = f"{whole_us / step_us:.2f} times as fast as one device, predicted" if step_us else ""
        return verdict("plain", large, "This step is predicted; how it compares with one device was not measured.")
    over_one = "" if gain is report.over_single or report.over_single is None else f" Over our program on one device: {report.over_single}."
    return verdict_on(gain, other, over_one, report.error)


def _compared(report: Run) -> tuple[Ratio | None, str]:
    """The gain and what it is over: the step as it is without us, the faster one of those that were measured, else our program on one
    device."""
    steps = report.measured_step_us if isinstance(report, Step) else {}
    compiled, placed, eager = (steps.get(name) for name in (COMPILED, "placed", "eager"))
    if compiled and placed and (eager is None or compiled.median < eager.median):
        return Ratio.of(compiled, placed, report.error), COMPILED
    if report.over_unplaced is not None:
        return report.over_unplaced, _unplaced(report) or "plain eager"
    return report.over_single, "one device"


def _facts(run: RunFolder, report: Run) -> list[tuple[str, str]]:
    plan, load, made_by = run.plan, report.load_of_others or None, report.made_by
    facts = [("plan", f"{plan.method}, {plan.status}, found in {plan.placement_seconds:.3g} s, seed {plan.seed}")]
    if report.executor:
        facts.append(("executor", report.executor))
    if isinstance(report, Step | Training) and report.parity is not None:
        facts.append(("parity", f"{'passed' if report.parity.passed else 'failed'}; {report.parity}"))
    if load is not None:
        facts.append(("CPU load", load_text(load)))
    noted = (*other_costs(plan, run.timeline), *report.notes, *(run.measured.notes if run.measured is not None else ()))
    facts += [("note", note) for note in noted]
    further = report.further if isinstance(report, Script) else ()
    facts += [("also placed", f"{name}: baechi report {shlex.quote(str(run.path / folder))}") for name, folder in further]
    return [*facts, ("versions", made_by.programs or run.made_by.programs or "not recorded")]


def _unplaced(report: Run) -> str:
    """The name of a script's unplaced step, which its placed one is compared with; empty for other runs."""
    return report.unplaced or "" if isinstance(report, Step) else ""
