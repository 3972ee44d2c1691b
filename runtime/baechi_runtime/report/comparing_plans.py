"""Two simulated steps side by side: `baechi diff` of two plans, and `baechi simulate` of a plan with something changed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from msgspec import UNSET

from baechi_ext.cost import scale_links, vary_costs
from baechi_ext.explain import PlanDiff
from baechi_ext.explain.diff import partners
from baechi_ext.hybrid.plan import load_plan
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.hints import Pin, with_pins
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.ir.plan import memory_violations, placement_violations
from baechi_ext.simulate import Timeline, lower_bound_us
from baechi_runtime.report import printed
from baechi_runtime.report.explaining import MOST_DEVICES, change_of, noted, short
from baechi_runtime.report.plan_files import as_planned, on_devices, other_costs, timeline_of
from baechi_runtime.report.tables import aligned, as_size, as_time, print_timeline, share_of, show, table_of

if TYPE_CHECKING:
    from rich.table import Table

MOST_MODULES, MOST_CHANGES = 12, 8


def print_diff(diff: PlanDiff, notes: Sequence[str] = ()) -> None:
    """Prints on stdout what two plans differ in, the step first, and `notes` on it."""
    show(_headline(diff), *_reasons(diff), *noted(notes))
    if diff.is_empty:
        return
    show("", _sides(diff.before, diff.after, ("A", "B")))
    if diff.moved:
        show("", "what moved", _modules(diff))
    show(*diff.cluster_changes[:MOST_CHANGES])
    if (more := len(diff.cluster_changes) - MOST_CHANGES) > 0:
        show(f"and {more} more differences of the clusters")


def _headline(diff: PlanDiff) -> str:
    """Which plan is faster, and how much moved."""
    if diff.is_empty:
        return "The plans are the same: every op is on the same device, and each device runs its ops in the same order."
    before_us, after_us, ops = diff.before.makespan_us, diff.after.makespan_us, len(diff.graph)
    steps = f"B takes {as_time(after_us)}, A {as_time(before_us)} ({change_of(after_us, before_us)})"
    share = share_of(diff.moved_us, diff.graph.total_compute_us())
    moved = f"{len(diff.moved)} of {ops} ops moved ({share} of the compute, {as_size(diff.moved_bytes)} of parameters)"
    said = [moved if diff.moved else "no op moved"]
    if diff.reordered:
        others = " of the others" if diff.moved else ""
        its = "its" if len(diff.reordered) == 1 else "their"
        said.append(f"{len(diff.reordered)}{others} changed {its} place in {its} device's order")
    return f"{steps}: {', '.join(said)}."


def _reasons(diff: PlanDiff) -> Iterator[str]:
    """Says where the difference comes from, as far as that can be told."""
    if diff.renamed is not None:
        names = [device.name for device in diff.before.cluster.devices]
        swaps = ", ".join(f"{names[d]} as {names[renamed]}" for d, renamed in enumerate(diff.renamed) if d != renamed)
        yield f"The devices are alike: with B's {swaps}, only {diff.moved_renamed} of the ops would have moved."
    if diff.crossed is not None and diff.moved and diff.reordered:
        step_us = diff.before.makespan_us
        placement, priority = (change_of(us, step_us) for us in (diff.crossed.placement_after_us, diff.crossed.priority_after_us))
        yield f"B's placement with A's priorities: {placement}; A's placement with B's priorities: {priority}."
    if diff.recosted:
        count = len(diff.recosted)
        yield f"{count} op{'s have' if count > 1 else ' has'} other costs: the devices of a group split them in another way."
    if diff.priorities[0] != diff.priorities[1]:
        yield f"Only {'A' if diff.priorities[0] else 'B'} has priorities."


def _sides(before: Timeline, after: Timeline, names: tuple[str, str]) -> "Table":
    """Step, transfers, and each device's share and peak, of both; one that is called otherwise now, by both its names."""
    steps = (before, after)
    old = [device.name for device in before.cluster.devices]
    partner = partners(before.cluster, after.cluster)
    called = {device.name: old[partner[d]] for d, device in enumerate(after.cluster.devices) if d in partner}
    shown = {name: name if name == new else f"{name}, now {new}" for new, name in called.items()}
    cells = [{shown.get(name, name): does for name, does in _cells(before)}]
    cells.append({shown.get(called.get(name, name), name): does for name, does in _cells(after)})
    devices = list(cells[0] | cells[1])
    rows = [
        ["step", *(as_time(t.makespan_us) for t in steps)],
        ["transfers", *(f"{len(t.transfers)} ({as_size(t.bytes_moved)})" for t in steps)],
        *([name, *(of.get(name, "-") for of in cells)] for name in devices[:MOST_DEVICES]),
    ]
    more = [[f"{len(devices) - MOST_DEVICES} more devices"]] if len(devices) > MOST_DEVICES else []
    return table_of(("", *names), rows + more)


def _cells(timeline: Timeline) -> Iterator[tuple[str, str]]:
    """Each device's name, and what it does and holds."""
    for d, (device, order) in enumerate(zip(timeline.cluster.devices, timeline.device_order(), strict=True)):
        of = "" if device.memory_bytes is None else f" of {as_size(device.memory_bytes)}"
        busy, ops = share_of(timeline.busy_us[d], timeline.makespan_us), f"{len(order)} op{'s' * (len(order) != 1)}"
        yield device.name, f"{ops}, {busy} busy, {as_size(timeline.peak_memory_bytes[d])}{of}"


def _modules(diff: PlanDiff) -> "Table":
    first = "module" if any(op.module is not None for op in diff.graph.ops) else "kind of op"
    rows = [
        [short(m.name or "(the model)"), m.source, m.target, str(m.ops), str(m.of_ops), as_time(m.compute_us), as_size(m.persistent_bytes)]
        for m in diff.modules[:MOST_MODULES]
    ]
    if rest := diff.modules[MOST_MODULES:]:
        sums = as_time(sum(m.compute_us for m in rest)), as_size(sum(m.persistent_bytes for m in rest))
        rows.append([f"{len(rest)} more", "", "", str(sum(m.ops for m in rest)), "", *sums])
    return table_of((first, "from", "to", "ops", "of", "compute", "parameters"), rows)


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A request to simulate: a plan's file, another cluster where one is given, and what is to be different.

    `cluster_from`: the cluster to simulate on, of the plan's or the given one.
    """

    plan: str
    cluster: Cluster | None
    cluster_from: Callable[[Cluster], Cluster]
    comm_cost_factor: float = 1.0
    cost_factor: float = 1.0
    seed: int = 0
    pins: tuple[Pin, ...] = ()


@dataclass(frozen=True)
class Simulated:
    """A plan's step; `before`: the step of the plan as it is in its file, where that is not the same."""

    timeline: Timeline
    lower_bound_us: float
    violations: list[str]
    before: Timeline | None
    notes: tuple[str, ...] = ()

    def report(self) -> printed.Simulated:
        """The JSON that `baechi simulate --json` prints."""
        return printed.Simulated(
            **self.timeline.to_json(),
            lower_bound_us=self.lower_bound_us,
            violations=self.violations,
            notes=list(self.notes),
            before=UNSET if self.before is None else printed.Simulation(**self.before.to_json()),
        )

    def print(self) -> None:
        """Prints the step on stdout."""
        facts = {"violations": "; ".join(self.violations) or "none"} | ({"note": "; ".join(self.notes)} if self.notes else {})
        if self.before is None:
            print_timeline(self.timeline, self.lower_bound_us, facts)
        else:
            self._print_beside(self.before, {"lower bound": f"{as_time(self.lower_bound_us)} (of what if)"} | facts)

    def _print_beside(self, before: Timeline, facts: Mapping[str, str]) -> None:
        step_us, after_us = before.makespan_us, self.timeline.makespan_us
        if self.violations:
            more = f", and {len(self.violations) - 1} more (violations, below)" if len(self.violations) > 1 else ""
            show(f"The plan could not be run so: {self.violations[0]}{more}.")
        show(f"The step would take {as_time(after_us)} instead of {as_time(step_us)}: {change_of(after_us, step_us)}.", "")
        show(_sides(before, self.timeline, ("as planned", "what if")), "", *aligned(facts))


def simulated(graph: OpGraph, asked: WhatIf) -> Simulated:
    """The step of a plan of `graph`. Raises FileError, PlanError, MismatchError, OptionError."""
    plan = load_plan(asked.plan, graph, asked.cluster)
    before = on_devices(plan) if asked.cluster is None else as_planned(asked.plan, graph)
    after = on_devices(plan.on(scale_links(asked.cluster_from(plan.cluster), asked.comm_cost_factor)))
    if asked.pins:
        pinned = with_pins(after.graph, asked.pins, [device.name for device in after.cluster.devices])
        after = replace(after, graph=pinned, placement=pinned.pinned(after.placement))
    if asked.cost_factor != 1:
        costed, cluster = vary_costs(after.graph, after.cluster, asked.cost_factor, asked.seed)
        after = replace(after, graph=costed, cluster=cluster)
    is_same = asked.cost_factor == 1 and before is not None and (before.placement, before.cluster) == (after.placement, after.cluster)
    timeline = timeline_of(after)
    found = placement_violations(after.graph, after.cluster, after.placement)
    found += memory_violations(after.cluster, timeline.peak_memory_bytes)
    bound = lower_bound_us(after.graph, after.cluster)
    planned = timeline if is_same or before is None else timeline_of(before)
    return Simulated(timeline, bound, found, None if before is None or is_same else planned, other_costs(before, planned))
