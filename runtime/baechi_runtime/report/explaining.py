"""Explanations of a plan, or of the places of ops in it, the most important first: what `baechi explain` prints and a Run says."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

from baechi_ext.explain import OpChoices, PlanExplanation, explain_plan, op_choices
from baechi_ext.explain.op_choices import BEST, EQUAL, NO_OTHER, PINNED
from baechi_ext.explain.path import COMPUTE, DEVICE_BUSY, HANDLING, HOST, LINK_BUSY, TRANSFER
from baechi_ext.explain.sensitivity import ALL_FASTER, CostlyTransfer
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.plan import Plan
from baechi_runtime.report.findings import Findings
from baechi_runtime.report.printed import Choices, Explanation
from baechi_runtime.report.tables import aligned, as_limit, as_size, as_time, share_of, show, table_of, text_of

if TYPE_CHECKING:
    from rich.table import Table

    from baechi_runtime.report.report import Report

MOST_PARTS, MOST_LONGEST, MOST_GAPS, MOST_MODULES = 6, 5, 5, 4
FULL = 0.9
"""Devices that compute for so much of the step are not waiting for each other."""
MOST_DEVICES = 16
"""Rows of a table by device."""
TIGHT = 0.9
"""A device whose peak is so much of its limit is short of memory."""
_NARROW = 48
"""Letters of a name in a table."""
_HELPS = 0.01
_MATTERS = 5e-4
"""Changes of the step by less are said to be none: they would show as 0.0%."""
_HOLDERS = {"copy": "received copies", "tensor": "its own tensors", "working": "what an op works with", "persistent": "parameters"}
_PATH_KINDS = {
    COMPUTE: "compute on",
    HANDLING: "sending and receiving on",
    TRANSFER: "transfer",
    HOST: "waiting for the host on",
    DEVICE_BUSY: "busy",
    LINK_BUSY: "link busy",
}


@dataclass(frozen=True, repr=False)
class Explained(Findings):
    """An explanation: as text where it is printed or shown, as values in `findings`."""

    findings: PlanExplanation | OpChoices
    """The explanation of a plan, or the choices for the ops that were asked for."""
    notes: tuple[str, ...]
    _parts: "tuple[str | Table, ...]"

    def report(self) -> "Report":
        kind = Explanation if isinstance(self.findings, PlanExplanation) else Choices
        return kind(**self.findings.to_json(), notes=list(self.notes))

    def lines(self) -> Iterator[str]:
        yield from text_of(*self._parts).splitlines()

    def print(self) -> None:
        """Prints it on stdout."""
        show(*self._parts)


def explained(plan: Plan, name: str | None, notes: Sequence[str] = ()) -> Explained:
    """The explanation of a plan's step: what bounds it, where its time goes, and, last, what would change it; or of ops by their name (see
    `op_choices`): why they are where they are, what they are, and the step with them on each device.

    Raises OptionError where nothing is called so.
    """
    if name is not None:
        choices, cluster = op_choices(plan, name), plan.cluster
        said = _verdict(choices, name, cluster), *noted(notes), "", *aligned(_facts(choices)), ""
        return Explained(choices, tuple(notes), (*said, _choices(choices, cluster)))
    found = explain_plan(plan)
    tables = (part for title, table in _tables(found) for part in ("", title, table))
    sentences = _headline(found), *_balance(found), _waits(found), *_memory_news(found)
    return Explained(found, tuple(notes), (*sentences, *noted(notes), *tables, "", _what_would_change(found)))


def noted(notes: Sequence[str]) -> Iterator[str]:
    """Notes, as they stand below what they are on."""
    return (f"Note: {note}." for note in notes)


def short(name: str) -> str:
    """A name that fits into a table."""
    return name if len(name) <= _NARROW else f"{name[: _NARROW // 2 - 1]}...{name[-_NARROW // 2 + 2 :]}"


def change_of(us: float, step_us: float) -> str:
    """The change from the step's time, in per cent of it, as text."""
    change = us / step_us - 1 if step_us else 0.0
    return "no change" if abs(change) < _MATTERS else f"{change:+.1%}"


def _largest(values: Sequence[float]) -> list[int]:
    """The positions of the largest values, as many as tables have rows by device, in order."""
    return sorted(sorted(range(len(values)), key=lambda d: -values[d])[:MOST_DEVICES])


# A plan


def _headline(explained: PlanExplanation) -> str:
    step_us, shares = explained.timeline.makespan_us, defaultdict[str, float](float)
    if not step_us:
        return "The step takes no time."
    for part in explained.critical_parts:
        name = explained.timeline.cluster.devices[part.device].name
        what = {COMPUTE: f"compute on {name}", HOST: "waiting for the host"}.get(part.kind, "transfers")
        shares[what] += part.us / step_us
    largest = sorted(shares.items(), key=itemgetter(1), reverse=True)[:MOST_PARTS]
    first, *others = [f"{share_of(share, 1.0)} {what}" for what, share in largest if share >= _MATTERS]
    rest = f"; the rest of it is {', '.join(others)}" if others else ""
    return f"The step is {first}, along its critical path of {as_time(step_us)}{rest}."


def _balance(explained: PlanExplanation) -> Iterator[str]:
    """A sentence where several devices have hardly anything to wait for, and transfers take hardly anything from them."""
    timeline, step_us = explained.timeline, explained.timeline.makespan_us
    compute_us = [0.0] * len(timeline.cluster)
    for op, d in zip(timeline.graph.ops, timeline.placement, strict=True):
        compute_us[d] += op.compute_us / timeline.cluster.devices[d].speed
    if len(compute_us) > 1 and step_us and min(compute_us) >= FULL * step_us:
        share = math.floor(100 * min(compute_us) / step_us)
        yield f"Every device computes for at least {share}% of it: only more or faster devices would shorten it much."


def _waits(explained: PlanExplanation) -> str:
    """A sentence on how long data waits on the data path: what more devices, or another order, could save."""
    step_us = explained.timeline.makespan_us
    device, link, host = (
        sum(part.us / step_us for part in explained.data_parts if part.kind == kind) for kind in (DEVICE_BUSY, LINK_BUSY, HOST)
    )
    for_host = f", {host:.0%} for the host" if host else ""
    return (
        f"Along what the last op depends on, {1 - device - link - host:.0%} is compute and transfers, {device:.0%} waiting for devices "
        f"that are busy with something else, {link:.0%} for busy links{for_host}."
    )


def _memory_news(explained: PlanExplanation) -> Iterator[str]:
    """A sentence for each device that is short of memory."""
    for memory in explained.memory:
        if memory.share is not None and memory.limit_bytes is not None and memory.share >= TIGHT:
            name = explained.timeline.cluster.devices[memory.device].name
            kind, size = max(memory.by_kind.items(), key=itemgetter(1))
            yield (
                f"{name} is short of memory: its peak is {memory.share:.0%} of {as_size(memory.limit_bytes)} "
                f"at {as_time(memory.at_us)}, {as_size(size)} of it {_HOLDERS[kind]}."
            )


def _what_would_change(explained: PlanExplanation) -> str:
    """The what-ifs that shorten the step most; that all devices are faster goes without saying, unless nothing else does."""
    step_us = explained.timeline.makespan_us
    alone = [w for w in explained.what_ifs if w.change != ALL_FASTER]
    helps = any(w.gain_us >= _HELPS * step_us for w in alone)
    gains = sorted(alone if helps else explained.what_ifs, key=lambda w: -w.gain_us)
    said = [f"{w.change} {change_of(w.step_us, step_us)}" for w in gains if step_us and w.gain_us / step_us >= _MATTERS]
    return f"What would change it: {'; '.join(said[:3])}." if said else "None of the changes tried here would shorten it."


def _tables(explained: PlanExplanation) -> Iterator[tuple[str, "Table"]]:
    """Titles and tables: the path's parts, transfers, idle time, memory, what-ifs; those alone that have something to say."""
    step_us, costs = explained.timeline.makespan_us, explained.transfers
    yield "critical path", table_of(("part", "time", "of the step"), _parts(explained))
    costly = [x for x in costs.by_gain if (x.gain_us or 0.0) >= _MATTERS * step_us]
    if costly:
        some = "" if costs.tried == costs.count else f"{costs.tried} tried of "
        yield f"costliest of {some}{costs.count} transfers, by the step without them", _transfers(explained, costly)
    if costs.count:
        tried = ", of which" if costs.tried == costs.count else f"; of {costs.tried} that were tried"
        title = "longest transfers" if costly else f"longest of {costs.count} transfers{tried} none holds the step up by itself"
        yield title, _transfers(explained, costs.by_duration[:MOST_LONGEST])
    count = len(explained.timeline.cluster)
    yield "devices" if count <= MOST_DEVICES else f"the {MOST_DEVICES} busiest of {count} devices", _devices(explained)
    if any(gap.op is not None for idle in explained.idle for gap in idle.gaps):
        names = ("device waits", "from", "for", "to run", "input made by", "on", "input not made", "link busy", "transfer")
        yield "longest gaps", table_of(names, _gaps(explained))
    if explained.what_ifs:
        rows = ((w.change, as_time(w.step_us), change_of(w.step_us, step_us)) for w in explained.what_ifs)
        yield "the same plan with", table_of(("", "step", "change"), rows)


def _parts(explained: PlanExplanation) -> Iterator[tuple[str, str, str]]:
    devices, step_us = explained.timeline.cluster.devices, explained.timeline.makespan_us
    for part in explained.critical_parts[:MOST_PARTS]:
        target = "" if part.target is None else f" -> {devices[part.target].name}"
        phase = f", {part.phase}" if part.phase else ""
        yield f"{_PATH_KINDS[part.kind]} {devices[part.device].name}{target}{phase}", as_time(part.us), share_of(part.us, step_us)
    if further := explained.critical_parts[MOST_PARTS:]:
        rest = sum(part.us for part in further)
        yield f"{len(further)} further part{'s' * (len(further) > 1)}", as_time(rest), share_of(rest, step_us)


def _transfers(explained: PlanExplanation, transfers: Sequence[CostlyTransfer]) -> "Table":
    graph, devices, step_us = explained.timeline.graph, explained.timeline.cluster.devices, explained.timeline.makespan_us

    def row(x: CostlyTransfer) -> tuple[str, ...]:
        tensor = graph.tensors[x.transfer.tensor]
        ends = (devices[d].name for d in (x.transfer.source, x.transfer.target))
        without = "not tried" if x.gain_us is None else change_of(step_us - x.gain_us, step_us)
        name = tensor.name or graph.ops[tensor.producer].id
        return short(name), *ends, as_size(tensor.bytes), as_time(x.us), as_time(x.queue_us), without

    return table_of(("tensor", "from", "to", "size", "takes", "waits for link", "step without it"), map(row, transfers))


def _devices(explained: PlanExplanation) -> "Table":
    timeline, step_us = explained.timeline, explained.timeline.makespan_us
    names = ("device", "busy", "idle: input not made", "link busy", "transfer", "nothing left", "peak memory", "limit", "mostly")

    def row(d: int) -> tuple[str, ...]:
        busy, memory = timeline.busy_us[d], explained.memory[d]
        shares = (share_of(us, step_us) for us in (busy, *explained.idle[d].waits_us.values()))
        kind = _HOLDERS[max(memory.by_kind, key=lambda name: memory.by_kind[name])] if memory.peak_bytes else "-"
        return timeline.cluster.devices[d].name, *shares, as_size(memory.peak_bytes), as_limit(memory.limit_bytes), kind

    return table_of(names, map(row, _largest(timeline.busy_us)))


def _gaps(explained: PlanExplanation) -> Iterator[tuple[str, ...]]:
    timeline = explained.timeline
    ops, devices = timeline.graph.ops, timeline.cluster.devices
    gaps = (gap for idle in explained.idle for gap in idle.gaps if gap.op is not None)
    for gap in sorted(gaps, key=lambda gap: -gap.us)[:MOST_GAPS]:
        if gap.op is not None and gap.producer is not None:
            names = short(ops[gap.op].id), short(ops[gap.producer].id), devices[timeline.placement[gap.producer]].name
            times = map(as_time, (gap.producer_us, gap.queue_us, gap.transfer_us))
            yield devices[gap.device].name, as_time(gap.start_us), as_time(gap.us), *names, *times


# An op, or several


def _verdict(choices: OpChoices, name: str, cluster: Cluster) -> str:
    """Why the ops are where they are."""
    count, others, reason = len(choices.asked), len(choices.moved) - len(choices.asked), _reason(choices, cluster)
    if choices.device is not None:
        where = f"on {cluster.devices[choices.device].name}"
        if count == 1:
            return f"{name} is {where}: {reason}."
    else:
        spread = [(ops, device.name) for ops, device in zip(choices.here, cluster.devices, strict=True) if ops]
        where = ", ".join(f"{ops} on {device}" for ops, device in spread[:MOST_DEVICES])
        where += f", {sum(ops for ops, _ in spread[MOST_DEVICES:])} elsewhere" if spread[MOST_DEVICES:] else ""
    shared = f" and {others} that share their groups" if others else ""
    return f"The {count} op{'s' * (count > 1)} of {name}{shared} are {where}: {reason}."


def _reason(choices: OpChoices, cluster: Cluster) -> str:
    best, step_us = choices.best, choices.step_us
    if choices.verdict == PINNED:
        return f"pinned to {cluster.devices[choices.pin or 0].name}"
    if choices.verdict == NO_OTHER:
        return "there is no other device"
    if best is None:
        return "all on any other device, the plan does not fit into memory"
    everything = "all " if len(choices.moved) > 1 else ""
    there = f"{everything}on {cluster.devices[best.device].name}, the best {'one' if choices.device is None else 'other device'},"
    if choices.verdict == EQUAL:
        return f"{there} the step would take as long"
    missed = "" if choices.verdict == BEST else "; the search did not come upon that"
    return f"{there} the step would take {as_time(best.step_us)}, {change_of(best.step_us, step_us)}{missed}"


def _facts(choices: OpChoices) -> dict[str, str]:
    """Facts about the ops: what they are, what they take, and what moves with them."""
    ops = [choices.graph.ops[v] for v in choices.asked]
    kinds = Counter(op.op or "-" for op in ops).most_common(MOST_MODULES)
    found = {
        "what": ", ".join(f"{count} {kind}" if len(ops) > 1 else kind for kind, count in kinds),
        "phase": ", ".join(dict.fromkeys(op.phase for op in ops)),
        "runs for": f"{as_time(choices.runs_us)}, {as_time(choices.critical_us)} of it on the critical path",
        "holds for the step": as_size(sum(op.persistent_bytes for op in ops)),
    }
    if len(ops) == 1 and ops[0].module:
        found["module"] = ops[0].module
    if others := len(choices.moved) - len(ops):
        groups = list(dict.fromkeys(op.colocation for op in ops if op.colocation is not None))
        more = " and more" if len(groups) > MOST_MODULES else ""
        found["moves with"] = f"{others} more ops of colocation groups {', '.join(groups[:MOST_MODULES])}{more}"
    return found


def _choices(choices: OpChoices, cluster: Cluster) -> "Table":
    """The step with the ops on each device; of many devices, those that are best for it, and the one that they are on."""
    best = {*_largest([-choice.step_us for choice in choices.choices]), choices.device}
    rows = (
        (
            cluster.devices[d].name,
            as_time(choice.step_us),
            "(here)" if d == choices.device else change_of(choice.step_us, choices.step_us),
            "yes" if choice.fits else "no",
            as_size(choice.peak_memory_bytes[d]),
            as_limit(cluster.devices[d].memory_bytes),
            str(choice.transfers),
            as_size(choice.bytes_moved),
        )
        for d, choice in enumerate(choices.choices)
        if d in best
    )
    return table_of(("all on", "step", "change", "fits", "peak there", "limit", "its transfers", "moved"), rows)
