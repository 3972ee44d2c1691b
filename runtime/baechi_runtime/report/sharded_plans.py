"""`baechi explain` and `baechi diff` of shard plans: where the step goes, why a layer is split as it is, and what two plans differ in."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

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
from baechi_ext.shard.plan import ShardPlan
from baechi_runtime.report.explaining import change_of, short
from baechi_runtime.report.printed import LayerExplained, ShardDifference, ShardExplained
from baechi_runtime.report.report import Report
from baechi_runtime.report.tables import aligned, as_size, as_time, share_of, show, table_of

if TYPE_CHECKING:
    from rich.table import Table

MOST_LAYERS, MOST_TALKATIVE, MOST_CHANGES = 12, 8, 16

Printable = tuple[Callable[[], Report], Callable[[], None]]
"""Two functions: one reports it to a program, the other prints it for a person."""


def explain_sharded(plan: ShardPlan, layer: str | None) -> Printable:
    """Explains a plan, or a layer of it. Raises what `explain_shard_plan` and `explain_layer` raise."""
    if layer is None:
        explained = explain_shard_plan(plan)
        return lambda: ShardExplained(**explained.to_json()), partial(_print_plan, explained)
    why = explain_layer(plan, layer)
    return lambda: LayerExplained(**why.to_json()), partial(_print_layer, why)


def diff_sharded(before: tuple[str, ShardPlan | None], after: tuple[str, ShardPlan | None]) -> Printable:
    """Compares two plans, each given with its path. Raises MismatchError where one is not a shard plan, or they are of two networks."""
    (_, first), (_, second) = before, after
    if first is None or second is None:
        other = before[0] if first is None else after[0]
        raise MismatchError(f"{other} is not a shard plan, and the other one is; compare two of a kind")
    diff = diff_shard_plans(first, second)
    return lambda: ShardDifference(**diff.to_json()), partial(_print_diff, diff)


def _split_text(splits: Mapping[str, int]) -> str:
    """Says into how many parts which loops are split, for people."""
    return " x ".join(f"{axis} {parts}" for axis, parts in splits.items()) or "not at all"


def _signed(us: float) -> str:
    return f"-{as_time(-us)}" if us < 0 else as_time(us)


# A plan


def _print_plan(explained: ShardExplanation) -> None:
    """Prints on stdout what bounds a sharded step, its kinds of cost, the costliest layers, and those that send most."""
    step_us = explained.plan.predicted_step_us
    kinds = ((kind, _signed(us), share_of(us, step_us)) for kind, us in explained.kinds_us.items())
    show(*_headline(explained), "", table_of(("what", "time", "of the step"), kinds))
    show("", f"costliest of {len(explained.plan.shard)} layers", _layers(explained))
    if explained.talkative:
        sent = table_of(("layer", "what is sent", "time", "of the step"), _messages(explained))
        show("", "what messages cost", sent)
    show("", "baechi explain PLAN LAYER says why a layer is split as it is.")


def _headline(explained: ShardExplanation) -> Iterator[str]:
    """Sentences on what the step consists of, whether a better plan is excluded, and what layers take that could be split and are not."""
    plan, step_us = explained.plan, explained.plan.predicted_step_us
    shares = ", ".join(f"{share_of(us, step_us)} {part}" for part, us in explained.shown_us.items())
    yield f"The step on {plan.devices} devices is predicted to take {as_time(step_us)}: {shares}. It is bound by {explained.bound_by}."
    gap = f"; no strategy costs less than {plan.lower_bound_flop / plan.cost_flop:.1%} of it" if plan.cost_flop else ""
    proof = "no other strategy is cheaper by the search's costs" if plan.status == "optimal" else f"not proven to be the cheapest{gap}"
    yield f"Plan of {plan.graph}: {plan.status}, {proof}. A device holds {as_size(plan.held_bytes)}."
    if explained.unsplit:
        us = sum(plan.shard[name].total_us for name in explained.unsplit)
        could = f"{len(explained.unsplit)} of {len(plan.shard)} layers could be split and are not"
        yield f"{could}; they take {share_of(us, step_us)} of the step."


def _layers(explained: ShardExplanation) -> "Table":
    plan, shown, step_us = explained.plan, list(explained.shown_us), explained.plan.predicted_step_us

    def row(name: str) -> tuple[str, ...]:
        layer, best = plan.shard[name], LayerExplanation(plan, name).best
        parts = parts_us(layer.costs_us)
        other = "-" if best is None else f"{change_of(step_us + best.change_us, step_us)} {_split_text(best.splits)}"
        times = as_time(layer.total_us), share_of(layer.total_us, step_us), *(as_time(max(parts[part], 0.0)) for part in shown)
        return short(name), layer.op, _split_text(layer.splits), *times, other

    names = ("layer", "what", "split", "time", "of the step", *shown, "best other split")
    return table_of(names, map(row, explained.costliest[:MOST_LAYERS]))


def _messages(explained: ShardExplanation) -> Iterator[tuple[str, ...]]:
    for name in explained.talkative[:MOST_TALKATIVE]:
        costs = {kind: us for kind, us in explained.plan.shard[name].costs_us.items() if part_of(kind) == MESSAGES}
        us, what = sum(costs.values()), ", ".join(sorted(costs.keys() - {HIDDEN}, key=lambda kind: -costs[kind]))
        yield short(name), what, as_time(us), share_of(us, explained.plan.predicted_step_us)


# A layer


def _print_layer(explained: LayerExplanation) -> None:
    """Prints on stdout why a layer is split as it is, its loops, what it costs, and the step with its other splits."""
    layer = explained.layer
    facts = {
        "what": layer.op,
        "loops": ", ".join(f"{axis} {size}" for axis, size in layer.sizes.items()),
        "adds to the step": f"{as_time(layer.total_us)}, {share_of(layer.total_us, explained.plan.predicted_step_us)} of it",
        "of that": ", ".join(f"{kind} {_signed(us)}" for kind, us in layer.costs_us.items()) or "-",
        "holds": as_size(layer.held_bytes),
    }
    show(_verdict(explained), "", *aligned(facts))
    if layer.others:
        others = table_of(("split", "step", "change", "holds"), _others(explained))
        show("", "the step with the layer split otherwise, and all others as they are, but for calls that are split alike", others)


def _verdict(explained: LayerExplanation) -> str:
    best, step_us, layer = explained.best, explained.plan.predicted_step_us, explained.layer
    here = f"{explained.name} is {f'split by {_split_text(layer.splits)}' if layer.splits else 'not split'}"
    if best is None:
        return f"{here}: there is no other way to split it."
    way, step = _split_text(best.splits), change_of(step_us + best.change_us, step_us)
    if explained.is_cheapest:
        return f"{here}: split {way}, the best other way, the step would take {as_time(step_us + best.change_us)}, {step}."
    reasons = "a memory limit, calls of one layer that are split alike, a strategy of people, or a search by other costs"
    kept = f"What can keep a plan from that: {reasons}."
    return f"{here}, and split {way} the step would take {as_time(step_us + best.change_us)}, {step}. {kept}"


def _others(explained: LayerExplanation) -> Iterator[tuple[str, ...]]:
    step_us, layer = explained.plan.predicted_step_us, explained.layer
    yield _split_text(layer.splits), as_time(step_us), "(as it is)", as_size(layer.held_bytes)
    for other in layer.others:
        held = as_size(max(layer.held_bytes + other.held_change_bytes, 0.0))
        us = step_us + other.change_us
        yield _split_text(other.splits), as_time(us), change_of(us, step_us), held


# Two plans


def _print_diff(diff: ShardDiff) -> None:
    """Prints on stdout which of two shard plans is cheaper, and which layers they split differently."""
    before, after = diff.before, diff.after
    steps = f"B is predicted to take {as_time(after.predicted_step_us)}, A {as_time(before.predicted_step_us)}"
    change = change_of(after.predicted_step_us, before.predicted_step_us)
    layers = f"{len(diff.changed)} of {len(before.shard)} layers are split differently" if diff.changed else "every layer is split alike"
    show(f"{steps} ({change}): {layers}.", "", table_of(("", "A", "B"), _sides(diff)))
    if diff.changed:
        names = ("layer", "what", "A", "B", "costs in A", "in B", "change")
        show("", "layers that are split differently", table_of(names, _changes(diff)))


def _sides(diff: ShardDiff) -> Iterator[tuple[str, ...]]:
    plans = diff.before, diff.after
    yield "step", *(as_time(plan.predicted_step_us) for plan in plans)
    shown = [ShardExplanation(plan).shown_us for plan in plans]
    for part in PARTS:
        if any(part in sums for sums in shown):
            yield part, *(as_time(sums.get(part, 0.0)) for sums in shown)
    yield "a device holds", *(as_size(plan.held_bytes) for plan in plans)
    yield "devices", *(str(plan.devices) for plan in plans)
    yield "found by", *(f"{plan.status}, {plan.cost_model} costs" for plan in plans)


def _changes(diff: ShardDiff) -> Iterator[tuple[str, ...]]:
    for name in diff.changed[:MOST_CHANGES]:
        a, b, change_us = diff.before.shard[name], diff.after.shard[name], diff.change_us(name)
        costs = as_time(a.total_us), as_time(b.total_us), ("-" if change_us < 0 else "+") + as_time(abs(change_us))
        yield short(name), a.op, _split_text(a.splits), _split_text(b.splits), *costs
    if len(diff.changed) > MOST_CHANGES:
        yield (f"{len(diff.changed) - MOST_CHANGES} more",)
