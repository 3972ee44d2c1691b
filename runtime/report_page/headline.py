"""What stands at the top of a run's page: the step's times side by side, the verdict, and how the run was made."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.run_folder import RunFolder
from runtime.tables import as_size, as_time


def headline(run: RunFolder, report: Mapping[str, Any]) -> dict[str, Any]:
    """Title, figures (label, value, detail), verdict (tone, sentence) and facts, all of them text.

    `report` is the run's own, or what a comparison says instead of one.
    """
    return {
        "title": report.get("model") or run.graph.name or run.path.resolve().name,
        "method": run.plan.method,
        "devices": [d.name for d in run.plan.cluster.devices],
        "ops": len(run.graph),
        "figures": _figures(run, report),
        "verdict": _verdict(run, report),
        "facts": _facts(run, report),
        "command": shlex.join(map(str, report.get("command", ()))),
    }


def _figures(run: RunFolder, report: Mapping[str, Any]) -> list[dict[str, str]]:
    step, bound = run.timeline.makespan_us, run.plan.lower_bound_us
    above = f"{step / bound - 1:.1%} above the lower bound of {as_time(bound)}" if bound else "no lower bound"
    figures = [_figure("predicted step", as_time(step), above)]
    samples = _samples(report)
    if samples.get("median"):
        taken = samples.get("samples") or [samples["median"]]
        spread = f"{as_time(min(taken))} to {as_time(max(taken))}, {len(taken)} steps"
        off = f"the prediction is {step / samples['median'] - 1:+.1%} off"
        figures.append(_figure("measured step", as_time(samples["median"]), f"{spread}; {off}"))
    for label, key in (("against one device", "speedup_interval"), ("against eager", "speedup_over_eager")):
        ratio = report.get(key)
        if ratio:
            detail = f"95% interval {ratio['low']:.2f} to {ratio['high']:.2f}"
            if key == "speedup_interval" and report.get("predicted_speedup"):
                detail += f"; predicted {report['predicted_speedup']:.2f}"
            figures.append(_figure(label, f"{ratio['median']:.2f} times as fast", detail))
    moved = f"{len(run.timeline.transfers)} transfers a step"
    return [*figures, _figure("moved", as_size(run.timeline.bytes_moved), moved)]


def _figure(label: str, value: str, detail: str) -> dict[str, str]:
    return {"label": label, "value": value, "detail": detail}


def _samples(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of the placed step; a training's report has no others beside it."""
    measured = report.get("measured_step_us") or {}
    return measured.get("placed") or measured


def _verdict(run: RunFolder, report: Mapping[str, Any]) -> dict[str, str]:
    ratio, doubts = report.get("speedup_interval"), report.get("doubts")
    if report.get("recommendation"):
        return {"tone": "doubt" if doubts else "good", "text": str(report["recommendation"])}
    if len(set(run.plan.placement)) < 2:
        return {"tone": "plain", "text": "The plan runs everything on one device."}
    if not ratio:
        return {"tone": "plain", "text": "This step is predicted; how it compares with one device was not measured."}
    if doubts:
        return {"tone": "doubt", "text": f"Inconclusive: {'; '.join(doubts)}. Run it again on a quiet machine, or with more --num_steps."}
    times = f"{ratio['median']:.2f} times as fast as one device (95% interval {ratio['low']:.2f} to {ratio['high']:.2f})"
    if ratio["low"] > 1:
        return {"tone": "good", "text": f"Splitting pays: {times}."}
    return {"tone": "bad", "text": f"Splitting does not pay here: {times}."}


def _facts(run: RunFolder, report: Mapping[str, Any]) -> list[tuple[str, str]]:
    plan, parity, load = run.plan, report.get("parity"), report.get("load_of_others")
    facts = [("plan", f"{plan.method}, {plan.status}, found in {plan.placement_seconds:.3g} s, seed {plan.seed}")]
    if report.get("executor"):
        facts.append(("executor", str(report["executor"])))
    if parity:
        same = "passed" if parity.get("passed") else "failed"
        facts.append(("parity", f"{same}; {parity.get('compared', 0)} tensors, largest difference {parity.get('max_abs_diff', 0):.3g}"))
    if load is not None:
        facts.append(("others' load", f"{load:.1%} of the cores while measuring"))
    versions = report.get("versions") or run.versions
    facts += [("note", note) for note in _notes(run, report)]
    return [*facts, ("versions", ", ".join(f"{name} {version}" for name, version in versions.items()) or "not recorded")]


def _notes(run: RunFolder, report: Mapping[str, Any]) -> Sequence[str]:
    return [*map(str, report.get("notes") or ()), *(run.measured.notes if run.measured is not None else ())]
