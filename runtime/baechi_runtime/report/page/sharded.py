"""The data of a sharded run's page, as one JSON value: strategies, what each layer costs and how it is split, messages and memory."""

from typing import Any

from baechi_ext.shard.explain import COMPUTE, EXECUTOR, UPDATE, ShardExplanation
from baechi_ext.shard.plan import LayerSplit, ShardPlan
from baechi_runtime.report.page.headline import figure, inconclusive, interval_text, verdict_on
from baechi_runtime.report.palette import device_colour
from baechi_runtime.report.report import load_text, prediction_error
from baechi_runtime.report.sharded_summary import ShardedRun, Strategy
from baechi_runtime.report.tables import as_size, as_time, share_of


def sharded_data(run: ShardedRun) -> dict[str, Any]:
    """The data of a sharded run; all times are microseconds."""
    kinds = _kinds(run)
    return {
        "headline": sharded_headline(run),
        "kinds": [{"name": kind, "colour": device_colour(i)} for i, kind in enumerate(kinds)],
        "strategies": [_strategy(s, kinds) for s in run.strategies],
        "plans": [_plan(name, plan, kinds) for name, plan in run.plans.items()],
    }


def sharded_headline(run: ShardedRun) -> dict[str, Any]:
    """Title, a figure for each strategy, verdict and facts, all of them text."""
    devices = run.devices
    whose = ", ".join(s.name for s in run.split) or "a plan that was not run"
    return {
        "title": run.title,
        "method": "sharded",
        "lead": f"each layer split over {devices} devices: {whose}",
        "figures": _figures(run),
        "verdict": _verdict(run),
        "facts": _facts(run),
        "command": run.summary.made_by.command_line,
    }


def _figures(run: ShardedRun) -> list[dict[str, str]]:
    found = []
    for s in run.strategies:
        if s.measured is None:
            continue
        median, detail = s.measured.median, "not predicted" if s.predicted_us is None else f"predicted {as_time(s.predicted_us)}"
        if s.predicted_us:
            detail += f"; {prediction_error(s.predicted_us, median)}"
        if s.gain is not None and not s.is_whole:
            detail += f"; {s.gain} times as fast as not split"
        found.append(figure("not split, each device does all" if s.is_whole else s.name, as_time(median), detail))
    if not found and run.plan is not None:
        parts = ", ".join(f"{part} {as_time(us)}" for part, us in ShardExplanation(run.plan).shown_us.items())
        found.append(figure("predicted step", as_time(run.plan.predicted_step_us), parts))
        found.append(figure("a device holds", as_size(run.plan.held_bytes), f"{run.plan.status}, not run yet"))
    return found


def _verdict(run: ShardedRun) -> dict[str, str]:
    bound = "" if run.plan is None else f" {_bound(run.plan)}"
    measured = [(s.measured.median, s) for s in run.split if s.measured is not None]
    if not measured:
        return {"tone": "plain", "text": f"This step is predicted, and was not measured.{bound}"}
    if run.summary.doubts:
        more = ", or with more --num_steps" if any(s.gain for s in run.split) else ""  # a training has none, and knows no gain
        return inconclusive(run.summary.doubts, f"Run it again on a quiet machine{more}.{bound}")
    best = min(measured, key=lambda pair: pair[0])[1]
    if best.gain is None:
        return {"tone": "plain", "text": f"{best.name} has the shortest step; how it compares with the step not split is not known.{bound}"}
    times = f"{best.name} is {best.gain.median:.2f} times as fast as the step not split ({interval_text(best.gain)})"
    return verdict_on(best.gain, times, bound)


def _bound(plan: ShardPlan) -> str:
    """Says what the predicted step of the plan consists of; empty where there is nothing to say."""
    summary = ShardExplanation(plan)
    if not summary.shown_us:
        return ""
    parts = ", ".join(f"{share_of(us, plan.predicted_step_us)} {part}" for part, us in summary.shown_us.items())
    return f"The predicted step of the plan is {parts}: it is bound by {summary.bound_by}."


def _facts(run: ShardedRun) -> list[tuple[str, str]]:
    plan, summary, facts = run.plan, run.summary, []
    if plan is not None:
        facts.append(("plan", f"{plan.status} by {plan.cost_model} costs, batch {plan.batch}, {len(plan.shard)} layers"))
    facts += run.facts
    facts += [("parity", f"{s.name}: {s.parity}") for s in run.strategies if s.parity]
    if summary.load_of_others is not None:
        facts.append(("others' load", load_text(summary.load_of_others)))
    facts += [("note", f"{s.name}: {s.note}") for s in run.split if s.note]
    return [*facts, ("versions", summary.made_by.programs or "not recorded")]


def _kinds(run: ShardedRun) -> list[str]:
    """All kinds of cost that are shown: compute and update first, then messages."""
    costs = [layer.costs_us for plan in run.plans.values() for layer in plan.shard.values()] + [s.parts_us for s in run.strategies]
    found = list(dict.fromkeys(kind for kinds in costs for kind in kinds))
    first = [kind for kind in (COMPUTE, EXECUTOR, UPDATE) if kind in found]
    return [*first, *(kind for kind in found if kind not in first)]


def _strategy(s: Strategy, kinds: list[str]) -> dict[str, Any]:
    return {
        **s.to_json(),
        **({"gain": None} if s.is_whole else {}),
        "parts_us": [round(s.parts_us.get(kind, 0.0), 3) for kind in kinds],
        "messages": [[m.kind, m.predicted, m.counted] for m in s.messages],
        "held": [dict(held) for held in s.held],
        "planned_bytes": None if s.planned_bytes is None else round(s.planned_bytes),
    }


def _plan(name: str, plan: ShardPlan, kinds: list[str]) -> dict[str, Any]:
    return {
        "name": name,
        "step_us": plan.predicted_step_us,
        "layers": [_layer(layer_name, layer, kinds) for layer_name, layer in plan.shard.items()],
    }


def _layer(name: str, layer: LayerSplit, kinds: list[str]) -> dict[str, Any]:
    return {
        "name": name,
        "op": layer.op,
        "sizes": [[axis, size, layer.splits.get(axis, 1)] for axis, size in layer.sizes.items()],
        "costs_us": [round(layer.costs_us.get(kind, 0.0), 3) for kind in kinds],
        "held_bytes": round(layer.held_bytes),
        "others": [[list(o.splits.items()), round(o.change_us, 3)] for o in layer.others],
    }
