"""What stands at the top of a run's page: the step's times side by side, the verdict, and how the run was made."""

import shlex
from collections.abc import Sequence
from statistics import median
from typing import Any

from runtime.plan_files import other_costs
from runtime.report_page.said import Interval, Said
from runtime.run_folder import RunFolder
from runtime.tables import as_size, as_time

_MOST_NAMES = 6


def headline(run: RunFolder, said: Said) -> dict[str, Any]:
    """Title, figures (label, value, detail), verdict (tone, sentence) and facts, all of them text."""
    return {
        "title": said.model or run.graph.name or run.path.resolve().name,
        "method": run.plan.method,
        "lead": _lead(run),
        "figures": _figures(run, said),
        "verdict": _verdict(run, said),
        "facts": _facts(run, said),
        "command": (said.made_by.command_line or run.made_by.command_line),
    }


def _lead(run: RunFolder) -> str:
    names, ops = [d.name for d in run.plan.cluster.devices], len(run.graph)
    shown = ", ".join(names[:_MOST_NAMES]) + (", \u2026" if len(names) > _MOST_NAMES else "")
    return f"{run.plan.method} on {len(names)} device{'s' * (len(names) != 1)} ({shown}), {ops} op{'s' * (ops != 1)}"


def _figures(run: RunFolder, said: Said) -> list[dict[str, str]]:
    step, bound = run.timeline.makespan_us, run.plan.lower_bound_us
    above = f"{step / bound - 1:.1%} above the lower bound of {as_time(bound)}" if bound else "no lower bound"
    figures = [_figure("predicted step", as_time(step), above)]
    if said.median_us:
        off = f"the prediction is {step / said.median_us - 1:+.1%} off"
        figures.append(_figure("measured step", as_time(said.median_us), f"{_spread(said.samples_us)}; {off}"))
    if said.unplaced_us:
        figures.append(_figure(said.unplaced, as_time(median(said.unplaced_us)), _spread(said.unplaced_us)))
    for label, gain, predicted in (
        ("against one device", said.over_single, said.predicted_speedup),
        (f"against {said.unplaced or 'eager'}", said.over_eager, None),
    ):
        if gain is not None:
            expected = "" if predicted is None else f"; predicted {predicted:.2f}"
            figures.append(_figure(label, f"{gain.median:.2f} times as fast", f"{_interval(gain, said)}{expected}"))
    moved = f"{len(run.timeline.transfers)} transfers a step"
    return [*figures, _figure("moved", as_size(run.timeline.bytes_moved), moved)]


def _figure(label: str, value: str, detail: str) -> dict[str, str]:
    return {"label": label, "value": value, "detail": detail}


def _spread(samples_us: Sequence[float]) -> str:
    if len(samples_us) == 1:
        return "1 step"
    return f"{as_time(min(samples_us))} to {as_time(max(samples_us))}, {len(samples_us)} steps"


def _interval(gain: Interval, said: Said) -> str:
    return f"{100 * (1 - said.interval_error):.4g}% interval {gain.low:.2f} to {gain.high:.2f}"


def _verdict(run: RunFolder, said: Said) -> dict[str, str]:
    gain, other = (said.over_eager, said.unplaced) if said.unplaced else (said.over_single, "one device")
    if said.recommendation:
        return {"tone": "doubt" if said.doubts else "good", "text": said.recommendation}
    if len(set(run.plan.placement)) < 2:
        return {"tone": "plain", "text": "The plan runs everything on one device."}
    if said.unplaced and said.doubts:
        return {"tone": "doubt", "text": f"Inconclusive: {'; '.join(said.doubts)}. `baechi compare` measures in turn."}
    if gain is None:
        return {"tone": "plain", "text": "This step is predicted; how it compares with one device was not measured."}
    if said.doubts:
        reasons = "; ".join(said.doubts)
        return {"tone": "doubt", "text": f"Inconclusive: {reasons}. Run it again on a quiet machine, or with more --num_steps."}
    times = f"{gain.median:.2f} times as fast as {other} ({_interval(gain, said)})"
    if gain.low > 1:
        return {"tone": "good", "text": f"Splitting pays: {times}."}
    clearly = "clearly " if gain.high > 1 else ""
    return {"tone": "bad", "text": f"Splitting does not {clearly}pay here: {times}."}


def _facts(run: RunFolder, said: Said) -> list[tuple[str, str]]:
    plan, load = run.plan, said.load_of_others
    facts = [("plan", f"{plan.method}, {plan.status}, found in {plan.placement_seconds:.3g} s, seed {plan.seed}")]
    if said.executor:
        facts.append(("executor", said.executor))
    if said.parity:
        facts.append(("parity", said.parity))
    if load is not None:
        facts.append(("others' load", f"{load:.1%} of the cores while measuring"))
    noted = (*other_costs(plan, run.timeline), *said.notes, *(run.measured.notes if run.measured is not None else ()))
    facts += [("note", note) for note in noted]
    facts += [("also placed", f"{name}: baechi report {shlex.quote(str(run.path / folder))}") for name, folder in said.further]
    return [*facts, ("versions", said.made_by.programs or run.made_by.programs or "not recorded")]
