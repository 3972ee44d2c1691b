"""Two simulated steps side by side: what `baechi diff` says of two plans, and `baechi simulate` of a what-if."""

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from baechi_ext.explain import PlanDiff
from baechi_ext.simulate import Timeline
from baechi_runtime.report.explaining import MOST_DEVICES, change_of, noted, short
from baechi_runtime.report.tables import as_size, as_time, console, say, share_of, table_of

MOST_MODULES, MOST_CHANGES = 12, 8


def print_diff(diff: PlanDiff, notes: Sequence[str] = ()) -> None:
    """Prints on stdout what two plans differ in, the step first, and `notes` on it."""
    out = console()
    say(out, headline(diff), *_reasons(diff), *noted(notes))
    if diff.is_empty:
        return
    say(out, "")
    out.print(sides(diff.before, diff.after, ("A", "B")))
    if diff.moved:
        say(out, "", "what moved")
        out.print(_modules(diff))
    say(out, *diff.cluster_changes[:MOST_CHANGES])
    if len(diff.cluster_changes) > MOST_CHANGES:
        say(out, f"and {len(diff.cluster_changes) - MOST_CHANGES} more differences of the clusters")


def print_what_if(before: Timeline, after: Timeline, facts: dict[str, str], violations: Sequence[str]) -> None:
    """Prints on stdout a plan's step as it is and as it would be, which rules that breaks, and `facts` of it."""
    out, step = console(), before.makespan_us
    if violations:
        more = f", and {len(violations) - 1} more (violations, below)" if len(violations) > 1 else ""
        say(out, f"The plan could not be run so: {violations[0]}{more}.")
    say(out, f"The step would take {as_time(after.makespan_us)} instead of {as_time(step)}: {change_of(after.makespan_us, step)}.", "")
    out.print(sides(before, after, ("as planned", "what if")))
    width = max(map(len, facts))
    say(out, "", *(f"{name:<{width}}  {value}" for name, value in facts.items()))


def headline(diff: PlanDiff) -> str:
    """Which plan is faster, and how much moved."""
    if diff.is_empty:
        return "The plans are the same: every op is on the same device, and each device runs its ops in the same order."
    before_us, after_us, ops = diff.before.makespan_us, diff.after.makespan_us, len(diff.graph)
    change = change_of(after_us, before_us)
    steps = f"B takes {as_time(after_us)}, A {as_time(before_us)} ({change})"
    share = share_of(diff.moved_us, diff.graph.total_compute_us())
    moved = f"{len(diff.moved)} of {ops} ops moved ({share} of the compute, {as_size(diff.moved_bytes)} of parameters)"
    said = [moved if diff.moved else "no op moved"]
    if diff.reordered:
        others = " of the others" if diff.moved else ""
        said.append(f"{len(diff.reordered)}{others} changed their place in their device's order")
    return f"{steps}: {', '.join(said)}."


def _reasons(diff: PlanDiff) -> Iterator[str]:
    """Says where the difference comes from, as far as that can be told."""
    if diff.renamed is not None:
        names = [device.name for device in diff.before.cluster.devices]
        swaps = ", ".join(f"{names[d]} as {names[renamed]}" for d, renamed in enumerate(diff.renamed) if d != renamed)
        yield f"The devices are alike: with B's {swaps}, only {diff.moved_renamed} ops move."
    if diff.crossed is not None and diff.moved and diff.reordered:
        step_us = diff.before.makespan_us
        placement, priority = (change_of(us, step_us) for us in (diff.crossed.placement_after_us, diff.crossed.priority_after_us))
        yield f"B's placement with A's priorities: {placement}; A's placement with B's priorities: {priority}."
    if diff.recosted:
        yield f"{len(diff.recosted)} ops have other costs: the devices of a group split them in another way."
    if diff.priorities[0] != diff.priorities[1]:
        yield f"Only {'A' if diff.priorities[0] else 'B'} has priorities."


def sides(before: Timeline, after: Timeline, names: tuple[str, str]) -> Table:
    """Step, transfers, and each device's share and peak, of both; devices by their names."""
    table = table_of("", *names)
    steps = (before, after)
    table.add_row("step", *(as_time(t.makespan_us) for t in steps))
    table.add_row("transfers", *(f"{len(t.transfers)} ({as_size(t.bytes_moved)})" for t in steps))
    devices = list(dict.fromkeys(device.name for t in steps for device in t.cluster.devices))
    position = [{device.name: d for d, device in enumerate(t.cluster.devices)} for t in steps]
    orders = [t.device_order() for t in steps]
    for name in devices[:MOST_DEVICES]:
        cells = [_cell(t, orders[i], position[i].get(name)) for i, t in enumerate(steps)]
        table.add_row(Text(name), *cells)
    if len(devices) > MOST_DEVICES:
        table.add_row(f"{len(devices) - MOST_DEVICES} more devices", "", "")
    return table


def _cell(timeline: Timeline, order: Sequence[Sequence[int]], device: int | None) -> str:
    if device is None:
        return "-"
    limit = timeline.cluster.devices[device].memory_bytes
    of = "" if limit is None else f" of {as_size(limit)}"
    busy = share_of(timeline.busy_us[device], timeline.makespan_us)
    ops = len(order[device])
    return f"{ops} op{'s' * (ops != 1)}, {busy} busy, {as_size(timeline.peak_memory_bytes[device])}{of}"


def _modules(diff: PlanDiff) -> Table:
    named = any(op.module is not None for op in diff.graph.ops)
    table = table_of("module" if named else "kind of op", "from", "to", "ops", "of", "compute", "parameters")
    for m in diff.modules[:MOST_MODULES]:
        ends = Text(m.source), Text(m.target)
        table.add_row(short(m.name or "(the model)"), *ends, str(m.ops), str(m.of_ops), as_time(m.compute_us), as_size(m.persistent_bytes))
    rest = diff.modules[MOST_MODULES:]
    if rest:
        sums = as_time(sum(m.compute_us for m in rest)), as_size(sum(m.persistent_bytes for m in rest))
        table.add_row(f"{len(rest)} more", "", "", str(sum(m.ops for m in rest)), "", *sums)
    return table
