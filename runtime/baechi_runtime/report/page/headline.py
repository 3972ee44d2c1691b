"""The top of a run's page: the step's times side by side, the verdict, and how the run was made."""

import shlex
from collections.abc import Sequence
from typing import Any

from baechi_runtime.files.run_folder import RunFolder
from baechi_runtime.measure.samples import Ratio, Samples
from baechi_runtime.report.findings import load_text, prediction_error
from baechi_runtime.report.plan_files import other_costs
from baechi_runtime.report.report import Comparison, Run, Script, Step, Training
from baechi_runtime.report.tables import as_range, as_size, as_time

_MOST_NAMES = 6


def headline(run: RunFolder, report: Run) -> dict[str, Any]:
    """Title, figures (label, value, detail), verdict (tone, sentence) and facts, all of them text."""
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
    measured, unplaced, eager = report.measured, _unplaced(report), None
    if measured is not None and measured.median:
        figures.append(figure("measured step", as_time(measured.median), f"{_spread(measured)}; {prediction_error(step, measured.median)}"))
    if unplaced and isinstance(report, Step) and (eager := report.measured_step_us.get("eager")) is not None:
        figures.append(figure(unplaced, as_time(eager.median), _spread(eager)))
    for label, gain, predicted in (
        ("against one device", report.over_single, report.predicted_speedup if isinstance(report, Step) else None),
        (f"against {unplaced or 'eager'}", report.over_unplaced, None),
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


def inconclusive(doubts: Sequence[str], advice: str) -> dict[str, str]:
    """The verdict on times that are in doubt."""
    return {"tone": "doubt", "text": f"Inconclusive: {'; '.join(doubts)}. {advice}"}


def verdict_on(gain: Ratio, times: str, more: str = "") -> dict[str, str]:
    """The verdict on a gain that was measured: `times` says how large it is over what, `more` is added."""
    if gain.low > 1:
        return {"tone": "good", "text": f"Splitting pays: {times}.{more}"}
    clearly = "clearly " if gain.high > 1 else ""
    return {"tone": "bad", "text": f"Splitting does not {clearly}pay here: {times}.{more}"}


def _verdict(run: RunFolder, report: Run) -> dict[str, str]:
    unplaced, doubts = _unplaced(report), report.doubts or []
    gain, other = (report.over_unplaced, unplaced) if unplaced else (report.over_single, "one device")
    if isinstance(report, Comparison) and report.recommendation:
        return {"tone": "doubt" if doubts else "good", "text": report.recommendation}
    if len(set(run.plan.placement)) < 2:
        return {"tone": "plain", "text": "The plan runs everything on one device."}
    if unplaced and doubts:
        return inconclusive(doubts, "`baechi compare` measures in turn.")
    if gain is None:
        return {"tone": "plain", "text": "This step is predicted; how it compares with one device was not measured."}
    if doubts:
        return inconclusive(doubts, "Run it again on a quiet machine, or with more --num_steps.")
    return verdict_on(gain, f"{gain.median:.2f} times as fast as {other} ({interval_text(gain, report.error)})")


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
