"""`baechi explain` and `baechi diff` of shard plans: where the step goes, why a layer is split as it is, and what two plans differ in."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from rich.table import Table
from rich.text import Text

from baechi_ext.errors import MismatchError
from baechi_ext.shard.analysis import HIDDEN
from baechi_ext.shard.explain import (
    MESSAGES,
    PARTS,
    LayerExplanation,
    ShardDiff,
    ShardExplanation,
    diff_shard_plans,
    explain_layer,
    explain_shard_plan,
    part_of,
    parts_us,
)
from baechi_ext.shard.plan import LayerSplit, ShardPlan
from baechi_runtime.report.explaining import change_of, short
from baechi_runtime.report.tables import as_size, as_time, console, say, share_of, table_of

MOST_LAYERS, MOST_TALKATIVE, MOST_CHANGES = 12, 8, 16

Printable = tuple[Callable[[], dict[str, Any]], Callable[[], None]]
"""Two functions: one says it to a program, the other prints it for a person."""


def explain_sharded(plan: ShardPlan, layer: str | None) -> Printable:
    """Explains a plan, or a layer of it. Raises what `explain_shard_plan` and `explain_layer` raise."""
    if layer is None:
        explained = explain_shard_plan(plan)
        return explained.to_json, partial(print_shard_explanation, explained)
    why = explain_layer(plan, layer)
    return why.to_json, partial(print_layer, why)


def diff_sharded(before: tuple[str, ShardPlan | None], after: tuple[str, ShardPlan | None]) -> Printable:
    """Compares two plans, each given with its path. Raises MismatchError where one is not a shard plan, or they are of two networks."""
    (_, first), (_, second) = before, after
    if first is None or second is None:
        other = before[0] if first is None else after[0]
        raise MismatchError(f"{other} is not a shard plan, and the other one is; compare two of a kind")
    diff = diff_shard_plans(first, second)
    return diff.to_json, partial(print_shard_diff, diff)


def print_shard_explanation(explained: ShardExplanation) -> None:
    """Prints on stdout what bounds a sharded step, its kinds of cost, the costliest layers, and those that send most."""
    out, plan = console(), explained.plan
    say(out, *headline(explained), "")
    out.print(_kinds(explained))
    rows = explained.costliest[:MOST_LAYERS]
    say(out, "", f"costliest of {len(plan.shard)} layers")
    out.print(_layers(explained, rows))
    if explained.talkative:
        say(out, "", "what messages cost")
        out.print(_messages(explained))
    say(out, "", "baechi explain PLAN LAYER says why a layer is split as it is.")


def headline(explained: ShardExplanation) -> Iterator[str]:
    """Sentences on what the step consists of, whether a better plan is excluded, and what layers take that could be split and are not."""
    plan, step_us = explained.plan, explained.plan.predicted_step_us
    shares = ", ".join(f"{share_of(us, step_us)} {part}" for part, us in explained.shown_us.items())
    yield f"The step on {plan.devices} devices is predicted to take {as_time(step_us)}: {shares}. It is bound by {explained.bound_by}."
    gap = f"; no strategy costs less than {plan.lower_bound_flop / plan.cost_flop:.1%} of it" if plan.cost_flop else ""
    proof = "no other strategy is cheaper by the search's costs" if plan.status == "optimal" else f"not proven to be the cheapest{gap}"
    yield f"Plan of {plan.graph}: {plan.status}, {proof}. A device holds {as_size(plan.held_bytes)}."
    if explained.unsplit:
        count = len(explained.unsplit)
        us = sum(plan.shard[name].total_us for name in explained.unsplit)
        yield f"{count} of {len(plan.shard)} layers could be split and are not; they take {share_of(us, step_us)} of the step."


def print_layer(explained: LayerExplanation) -> None:
    """Prints on stdout why a layer is split as it is, its loops, what it costs, and the step with its other splits."""
    out, layer = console(), explained.layer
    say(out, layer_verdict(explained), "")
    facts = {
        "what": layer.op,
        "loops": ", ".join(f"{axis} {size}" for axis, size in layer.sizes.items()),
        "adds to the step": f"{as_time(layer.total_us)}, {share_of(layer.total_us, explained.plan.predicted_step_us)} of it",
        "of that": ", ".join(f"{kind} {_signed(us)}" for kind, us in layer.costs_us.items()) or "-",
        "holds": as_size(layer.held_bytes),
    }
    width = max(map(len, facts))
    say(out, *(f"{name:<{width}}  {value}" for name, value in facts.items()))
    if layer.others:
        say(out, "", "the step with the layer split otherwise, and all others as they are")
        out.print(_others(explained))


def layer_verdict(explained: LayerExplanation) -> str:
    """Why the layer is split as it is."""
    best, step_us, name = explained.best, explained.plan.predicted_step_us, explained.name
    here = f"{name} is {_into(explained.layer)}"
    if best is None:
        return f"{here}: there is no other way to split it."
    way, step = split_text(best.splits), change_of(step_us + best.change_us, step_us)
    if explained.is_cheapest:
        return f"{here}: split {way}, the best other way, the step would take {as_time(step_us + best.change_us)}, {step}."
    reasons = "a memory limit, calls of one layer that are split alike, a strategy of people, or a search by other costs"
    kept = f"What can keep a plan from that: {reasons}."
    return f"{here}, and split {way} the step would take {as_time(step_us + best.change_us)}, {step}. {kept}"


def print_shard_diff(diff: ShardDiff) -> None:
    """Prints on stdout which of two shard plans is cheaper, and which layers they split differently."""
    out, before, after = console(), diff.before, diff.after
    steps = f"B is predicted to take {as_time(after.predicted_step_us)}, A {as_time(before.predicted_step_us)}"
    change = change_of(after.predicted_step_us, before.predicted_step_us)
    layers = f"{len(diff.changed)} of {len(before.shard)} layers are split differently" if diff.changed else "every layer is split alike"
    say(out, f"{steps} ({change}): {layers}.", "")
    out.print(_sides(diff))
    if diff.changed:
        say(out, "", "layers that are split differently")
        out.print(_changes(diff))


def split_text(splits: Mapping[str, int]) -> str:
    """Says into how many parts which loops are split, for people."""
    return " x ".join(f"{axis} {parts}" for axis, parts in splits.items()) or "not at all"


def _into(layer: LayerSplit) -> str:
    return f"split by {split_text(layer.splits)}" if layer.splits else "not split"


def _signed(us: float) -> str:
    return f"-{as_time(-us)}" if us < 0 else as_time(us)


def _kinds(explained: ShardExplanation) -> Table:
    table = table_of("what", "time", "of the step")
    for kind, us in explained.kinds_us.items():
        table.add_row(Text(kind), _signed(us), share_of(us, explained.plan.predicted_step_us))
    return table


def _layers(explained: ShardExplanation, names: list[str]) -> Table:
    plan = explained.plan
    shown = list(explained.shown_us)
    table = table_of("layer", "what", "split", "time", "of the step", *shown, "best other split")
    for name in names:
        layer, best = plan.shard[name], LayerExplanation(plan, name).best
        parts = parts_us(layer.costs_us)
        step_us = plan.predicted_step_us
        other = "-" if best is None else f"{change_of(step_us + best.change_us, step_us)} {split_text(best.splits)}"
        times = [as_time(layer.total_us), share_of(layer.total_us, step_us), *(as_time(max(parts[part], 0.0)) for part in shown)]
        table.add_row(short(name), Text(layer.op), Text(split_text(layer.splits)), *times, Text(other))
    return table


def _messages(explained: ShardExplanation) -> Table:
    table = table_of("layer", "what is sent", "time", "of the step")
    for name in explained.talkative[:MOST_TALKATIVE]:
        costs = {kind: us for kind, us in explained.plan.shard[name].costs_us.items() if part_of(kind) == MESSAGES}
        us = sum(costs.values())
        what = ", ".join(sorted(costs.keys() - {HIDDEN}, key=lambda kind: -costs[kind]))
        table.add_row(short(name), Text(what), as_time(us), share_of(us, explained.plan.predicted_step_us))
    return table


def _others(explained: LayerExplanation) -> Table:
    step_us, layer = explained.plan.predicted_step_us, explained.layer
    table = table_of("split", "step", "change", "holds")
    table.add_row(Text(split_text(layer.splits)), as_time(step_us), "(as it is)", as_size(layer.held_bytes))
    for other in layer.others:
        step = step_us + other.change_us
        held = as_size(max(layer.held_bytes + other.held_change_bytes, 0.0))
        table.add_row(Text(split_text(other.splits)), as_time(step), change_of(step, step_us), held)
    return table


def _sides(diff: ShardDiff) -> Table:
    table = table_of("", "A", "B")
    plans = diff.before, diff.after
    table.add_row("step", *(as_time(plan.predicted_step_us) for plan in plans))
    shown = [ShardExplanation(plan).shown_us for plan in plans]
    for part in PARTS:
        if any(part in sums for sums in shown):
            table.add_row(part, *(as_time(sums.get(part, 0.0)) for sums in shown))
    table.add_row("a device holds", *(as_size(plan.held_bytes) for plan in plans))
    table.add_row("devices", *(str(plan.devices) for plan in plans))
    table.add_row("found by", *(Text(f"{plan.status}, {plan.cost_model} costs") for plan in plans))
    return table


def _changes(diff: ShardDiff) -> Table:
    table = table_of("layer", "what", "A", "B", "costs in A", "in B", "change")
    for name in diff.changed[:MOST_CHANGES]:
        a, b = diff.before.shard[name], diff.after.shard[name]
        costs = as_time(a.total_us), as_time(b.total_us), ("-" if diff.change_us(name) < 0 else "+") + as_time(abs(diff.change_us(name)))
        table.add_row(short(name), Text(a.op), Text(split_text(a.splits)), Text(split_text(b.splits)), *costs)
    if len(diff.changed) > MOST_CHANGES:
        table.add_row(f"{len(diff.changed) - MOST_CHANGES} more", *[""] * 6)
    return table
