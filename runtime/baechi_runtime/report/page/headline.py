"""The top of a run's page: the step's times side by side, the verdict, and how the run was made."""

import shlex
from collections.abc import Sequence
from typing import Any

from baechi_runtime.files.run_folder import RunFolder
from baechi_runtime.measure.samples import Ratio, Samples
from baechi_runtime.report.plan_files import other_costs
from baechi_runtime.report.report import load_text, prediction_error
from baechi_runtime.report.run_summary import RunSummary
from baechi_runtime.report.tables import as_range, as_size, as_time

_MOST_NAMES = 6


def headline(run: RunFolder, summary: RunSummary) -> dict[str, Any]:
    """Title, figures (label, value, detail), verdict (tone, sentence) and facts, all of them text."""
    return {
        "title": summary.model or run.graph.name or run.path.resolve().name,
        "method": run.plan.method,
        "lead": _lead(run),
        "figures": _figures(run, summary),
        "verdict": _verdict(run, summary),
        "facts": _facts(run, summary),
        "command": (summary.made_by.command_line or run.made_by.command_line),
    }


def _lead(run: RunFolder) -> str:
    names, ops = [d.name for d in run.plan.cluster.devices], len(run.graph)
    shown = ", ".join(names[:_MOST_NAMES]) + (", \u2026" if len(names) > _MOST_NAMES else "")
    return f"{run.plan.method} on {len(names)} device{'s' * (len(names) != 1)} ({shown}), {ops} op{'s' * (ops != 1)}"


def _figures(run: RunFolder, summary: RunSummary) -> list[dict[str, str]]:
    step, bound = run.timeline.makespan_us, run.plan.lower_bound_us
    above = f"{step / bound - 1:.1%} above the lower bound of {as_time(bound)}" if bound else "no lower bound"
    figures = [figure("predicted step", as_time(step), above)]
    if summary.measured is not None and summary.measured.median:
        median = summary.measured.median
        figures.append(figure("measured step", as_time(median), f"{_spread(summary.measured)}; {prediction_error(step, median)}"))
    if summary.unplaced_steps is not None:
        figures.append(figure(summary.unplaced, as_time(summary.unplaced_steps.median), _spread(summary.unplaced_steps)))
    for label, gain, predicted in (
        ("against one device", summary.over_single, summary.predicted_speedup),
        (f"against {summary.unplaced or 'eager'}", summary.over_eager, None),
    ):
        if gain is not None:
            expected = "" if predicted is None else f"; predicted {predicted:.2f}"
            figures.append(figure(label, f"{gain.median:.2f} times as fast", f"{interval_text(gain, summary.interval_error)}{expected}"))
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


def _verdict(run: RunFolder, summary: RunSummary) -> dict[str, str]:
    gain, other = (summary.over_eager, summary.unplaced) if summary.unplaced else (summary.over_single, "one device")
    if summary.recommendation:
        return {"tone": "doubt" if summary.doubts else "good", "text": summary.recommendation}
    if len(set(run.plan.placement)) < 2:
        return {"tone": "plain", "text": "The plan runs everything on one device."}
    if summary.unplaced and summary.doubts:
        return inconclusive(summary.doubts, "`baechi compare` measures in turn.")
    if gain is None:
        return {"tone": "plain", "text": "This step is predicted; how it compares with one device was not measured."}
    if summary.doubts:
        return inconclusive(summary.doubts, "Run it again on a quiet machine, or with more --num_steps.")
    return verdict_on(gain, f"{gain.median:.2f} times as fast as {other} ({interval_text(gain, summary.interval_error)})")


def _facts(run: RunFolder, summary: RunSummary) -> list[tuple[str, str]]:
    plan, load = run.plan, summary.load_of_others
    facts = [("plan", f"{plan.method}, {plan.status}, found in {plan.placement_seconds:.3g} s, seed {plan.seed}")]
    if summary.executor:
        facts.append(("executor", summary.executor))
    if summary.parity:
        facts.append(("parity", summary.parity))
    if load is not None:
        facts.append(("others' load", load_text(load)))
    noted = (*other_costs(plan, run.timeline), *summary.notes, *(run.measured.notes if run.measured is not None else ()))
    facts += [("note", note) for note in noted]
    facts += [("also placed", f"{name}: baechi report {shlex.quote(str(run.path / folder))}") for name, folder in summary.further]
    return [*facts, ("versions", summary.made_by.programs or run.made_by.programs or "not recorded")]
