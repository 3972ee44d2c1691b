"""The top of a run's page: the verdict, the step's times side by side, and how the run was made."""

import shlex
from collections.abc import Iterator
from typing import Any

from baechi_ext.cost import attach_costs
from baechi_ext.cost.profile import Host
from baechi_ext.simulate import Timeline
from baechi_ext.simulate.one_device import one_device_timeline
from baechi_runtime.files.run_folder import RunFolder
from baechi_runtime.measure.samples import Samples
from baechi_runtime.report.findings import load_text, prediction_error
from baechi_runtime.report.plan_files import bound_of, other_costs
from baechi_runtime.report.report import SINGLE, Comparison, Run, Script, Step, Training
from baechi_runtime.report.tables import as_range, as_size, as_time
from baechi_runtime.report.verdict import Verdict, compared, interval_text, step_verdict, unplaced_step, verdict

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
    names, ops = [d.name for d in run.devices], len(run.graph)
    shown = ", ".join(names[:_MOST_NAMES]) + (", \u2026" if len(names) > _MOST_NAMES else "")
    groups = "" if run.hybrid is None else f" in groups of {run.hybrid.group_size}"
    return f"{run.plan.method} on {len(names)} device{'s' * (len(names) != 1)}{groups} ({shown}), {ops} op{'s' * (ops != 1)}"


def _figures(run: RunFolder, report: Run) -> list[dict[str, str]]:
    step, bound = run.timeline.makespan_us, bound_of(run.plan, run.timeline)
    above = f"{step / bound - 1:.1%} above the lower bound of {as_time(bound)}" if bound else "no lower bound"
    figures = [figure("predicted step", as_time(step), above)]
    figures += _measured(run, report)
    unplaced = unplaced_step(report)
    if isinstance(report, Step) and (eager := report.measured_step_us.get("eager")) is not None:
        figures.append(figure(unplaced, as_time(eager.median), _spread(eager)))
    for label, gain, predicted in (
        ("against one device", report.over_single, report.predicted_speedup if isinstance(report, Step) else None),
        (f"against {unplaced}", report.over_unplaced, None),
    ):
        if gain is not None:
            expected = "" if predicted is None else f"; predicted {predicted:.2f}"
            interval = interval_text(gain, report.error, None if report.measured is None else len(report.measured.us))
            figures.append(figure(label, f"{gain.median:.2f} times as fast", f"{interval}{expected}"))
    moved = f"{len(run.timeline.transfers)} transfers a step"
    return [*figures, figure("moved", as_size(run.timeline.bytes_moved), moved)]


def _measured(run: RunFolder, report: Run) -> Iterator[dict[str, str]]:
    """The placed step as it was timed, beside the prediction. Steps of a script are rounds of its loop, with all that goes on between its
    calls, and the prediction is of the call: of that one is recorded."""
    steps, predicted_us, is_script = report.measured, run.timeline.makespan_us, isinstance(report, Step) and bool(report.unplaced)
    if steps is not None and steps.median:
        beside = "with all else that the script's loop does" if is_script else prediction_error(predicted_us, steps.median)
        yield figure("measured step", as_time(steps.median), f"{_spread(steps)}; {beside}")
    if is_script and run.measured is not None and run.measured.wall_us:
        call_us = run.measured.wall_us
        yield figure("recorded call", as_time(call_us), f"the one in the timeline; {prediction_error(predicted_us, call_us)}")


def figure(label: str, value: str, detail: str) -> dict[str, str]:
    """A number at the top of the page."""
    return {"label": label, "value": value, "detail": detail}


def _spread(steps: Samples) -> str:
    return "1 step" if len(steps.us) == 1 else f"{as_range(steps.us)}, {len(steps.us)} steps"


def _verdict(run: RunFolder, report: Run) -> Verdict:
    if isinstance(report, Comparison) and report.recommendation:
        return _recommended(report)
    found = step_verdict(report, splits=run.splits)
    if found is not None:
        return found
    step_us, whole = run.timeline.makespan_us, _on_one_device(run)
    held, rooms = whole.peak_memory_bytes[0], [device.memory_bytes for device in run.devices]
    if all(room is not None and room < held for room in rooms):
        return verdict("plain", "One device does not hold it", f"The step is predicted; on one device it would hold {as_size(held)}.")
    large = f"{whole.makespan_us / step_us:.2f} times as fast as one device, predicted" if step_us else ""
    measured = "Steps of this plan were measured; how they compare with one device was not."
    predicted = "This step is predicted; how it compares with one device was not measured."
    return verdict("plain", large, predicted if report.measured is None else measured)


def _recommended(report: Comparison) -> Verdict:
    """The recommendation of a comparison, with its gain: of what has no plan, so that the run is of another method, the gain over one
    device."""
    if report.doubts:
        return verdict("doubt", "Inconclusive", report.recommendation)
    if report.recommended in (None, SINGLE):
        return verdict("plain", "" if report.recommended is None else "Don't split", report.recommendation)
    gain, other = compared(report)
    if report.planned not in (None, report.recommended):
        gain, other = next((method.ratio for method in report.methods if method.name == report.recommended), None), "one device"
    large = "" if gain is None else f"{gain.median:.2f} times as fast as {other}, with {report.recommended}"
    return verdict("good", large, report.recommendation)


def _on_one_device(run: RunFolder) -> Timeline:
    """The whole step on the fastest device, which no other one at work slows down, as a Run of the library has it."""
    graph, profile, speed = run.whole, run.profile, max(device.speed for device in run.devices)
    if profile is None or profile.contention is None:
        return one_device_timeline(graph, speed)
    # The graph says if one thread gives all devices their work; where each has its own, or is a core, an op takes no less than its thread.
    host: Host = "one" if any(op.issue_us for op in graph.ops) else "none" if profile.pass_us else "each"
    return one_device_timeline(attach_costs(graph, profile, host=host), speed)


def _facts(run: RunFolder, report: Run) -> list[tuple[str, str]]:
    plan, load, made_by = run.plan, report.load_of_others, report.made_by
    facts = [("plan", f"{plan.method}, {plan.status}, found in {plan.placement_seconds:.3g} s, seed {plan.seed}")]
    if report.executor:
        facts.append(("executor", report.executor))
    if isinstance(report, Step | Training) and report.parity is not None:
        facts.append(("parity", f"{'passed' if report.parity.passed else 'failed'}; {report.parity}"))
    if isinstance(load, float):
        facts.append(("CPU load", load_text(load)))
    noted = (*other_costs(plan, run.timeline), *report.notes, *(run.measured.notes if run.measured is not None else ()))
    facts += [("note", note) for note in noted]
    further = report.further if isinstance(report, Script) else ()
    facts += [("also placed", f"{name}: baechi report {shlex.quote(str(run.path / folder))}") for name, folder in further]
    return [*facts, ("versions", made_by.programs or run.made_by.programs or "not recorded")]
