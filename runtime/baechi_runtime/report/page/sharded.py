"""The data of a sharded run's page, as one JSON value: strategies, what each layer costs and how it is split, messages and memory."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import asdict, astuple

from baechi_ext.shard.explain import COMPUTE, EXECUTOR, FORECAST_KINDS, UPDATE, ShardExplanation
from baechi_ext.shard.plan import LayerSplit, ShardPlan
from baechi_runtime.report.findings import prediction_error
from baechi_runtime.report.page.headline import figure
from baechi_runtime.report.palette import DEVICES, device_colour
from baechi_runtime.report.report import REPLICAS, Sent, Sharded, Strategy
from baechi_runtime.report.sharded_summary import ShardedRun, facts_of
from baechi_runtime.report.tables import as_size, as_time, share_of
from baechi_runtime.report.verdict import Verdict, sharded_verdict


def sharded_data(run: ShardedRun) -> dict[str, Any]:
    """The data of a sharded run; all times are microseconds."""
    kinds = _kinds(run)
    return {
        "headline": sharded_headline(run),
        "palette": list(DEVICES),
        "kinds": [{"name": kind, "colour": device_colour(i)} for i, kind in enumerate(kinds)],
        "strategies": [_strategy(run, s, kinds) for s in run.strategies],
        "plans": [_plan(name, plan, kinds) for name, plan in run.plans.items()],
    }


def sharded_headline(run: ShardedRun) -> dict[str, Any]:
    """Title, a figure for each strategy, verdict and facts, all of them text."""
    return {
        "title": run.title,
        "method": "sharded",
        "lead": "; ".join(_leads(run)),
        "figures": _figures(run),
        "verdict": _verdict(run),
        "facts": _facts(run),
        "command": "" if run.report is None else run.report.made_by.command_line,
    }


def _leads(run: ShardedRun) -> Iterator[str]:
    """Say what is split over how many devices, by which strategies."""
    names, devices = [s.name for s in run.split], f"split over {run.devices} devices"
    for what, some in (
        ("each layer", [name for name in names if name not in REPLICAS] if names else ["a plan that was not run"]),
        ("the batch", [name for name in names if name in REPLICAS]),
    ):
        if some:
            yield f"{what} {devices}: {', '.join(some)}"


def _figures(run: ShardedRun) -> list[dict[str, str]]:
    found = []
    for s in run.strategies:
        if s.measured_step_us is None:
            continue
        median, predicted_us, is_split = s.measured_step_us.median, s.predicted_step_us, s in run.split
        detail = "not predicted" if predicted_us is None else f"predicted {as_time(predicted_us)}"
        if predicted_us:
            detail += f"; {prediction_error(predicted_us, median)}"
        if s.ratio is not None and is_split:
            detail += f"; {s.ratio} times as fast as not split"
        found.append(figure(s.name if is_split else "not split, each device does all", as_time(median), detail))
    if not found and run.plan is not None:
        parts = ", ".join(f"{part} {as_time(us)}" for part, us in ShardExplanation(run.plan).shown_us.items())
        found.append(figure("predicted step", as_time(run.plan.predicted_step_us), parts))
        found.append(figure("a device holds", as_size(run.plan.held_bytes), f"{run.plan.status}, not run yet"))
    return found


def _verdict(run: ShardedRun) -> Verdict:
    bound = "" if run.plan is None else f" {_bound(run.plan)}"
    report = run.report or Sharded()
    return sharded_verdict(run.split, report.doubts or (), bound, report.error)


def _bound(plan: ShardPlan) -> str:
    """Says what the predicted step of the plan consists of; empty where there is nothing to say."""
    summary = ShardExplanation(plan)
    if not summary.shown_us:
        return ""
    parts = ", ".join(f"{share_of(us, plan.predicted_step_us)} {part}" for part, us in summary.shown_us.items())
    return f"The predicted step of the plan is {parts}: it is bound by {summary.bound_by}."


def _facts(run: ShardedRun) -> list[tuple[str, str]]:
    plan, facts = run.plan, []
    if plan is not None:
        facts.append(("plan", f"{plan.status} by {plan.cost_model} costs, batch {plan.batch}, {len(plan.shard)} layers"))
    facts += [] if run.report is None else facts_of(run.report)
    largest = ((s.name, s.parity.max_rel_diff) for s in run.strategies if s.parity is not None)
    facts += [("parity", f"{name}: largest difference {'inf' if far is None else f'{far:.1e}'} relative") for name, far in largest]
    facts += [("note", f"{s.name}: {s.note}") for s in run.split if s.note]
    return [*facts, ("versions", (run.report or Sharded()).made_by.programs or "not recorded")]


def _kinds(run: ShardedRun) -> list[str]:
    """All kinds of cost that are shown: compute and update first, then messages."""
    costs = [layer.costs_us for plan in run.plans.values() for layer in plan.shard.values()] + [_parts_us(s) for s in run.strategies]
    found = list(dict.fromkeys(kind for kinds in costs for kind in kinds))
    first = [kind for kind in (COMPUTE, EXECUTOR, UPDATE) if kind in found]
    return [*first, *(kind for kind in found if kind not in first)]


def _parts_us(s: Strategy) -> dict[str, float]:
    """Predicted microseconds by kind of cost; none where the report has no parts."""
    return {kind: getattr(s.predicted_parts_us, part) for part, kind in FORECAST_KINDS.items()} if s.predicted_parts_us else {}


def _strategy(run: ShardedRun, s: Strategy, kinds: list[str]) -> dict[str, Any]:
    parts_us, plan, counted = _parts_us(s), run.plans.get(s.name), s.sent.counted
    predicted, none = s.sent.predicted, Sent()
    kinds_sent = dict.fromkeys((*counted, *(predicted or ())))
    return {
        **s.shown(),
        **({} if s in run.split else {"gain": None}),
        "parts_us": [round(parts_us.get(kind, 0.0), 3) for kind in kinds] if parts_us else None,
        "messages": [
            [kind, None if predicted is None else astuple(predicted.get(kind, none)), astuple(counted.get(kind, none))]
            for kind in kinds_sent
        ],
        "held": list(map(asdict, s.held_bytes)),
        "planned_bytes": None if plan is None else round(plan.held_bytes),
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
