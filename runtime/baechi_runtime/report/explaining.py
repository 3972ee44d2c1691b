"""`baechi explain`: what is said of a plan, or of an op's place in it, the most important first."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from operator import itemgetter

from rich.table import Table
from rich.text import Text

from baechi_ext.explain import OpChoices, PlanExplanation
from baechi_ext.explain.op_choices import BEST, EQUAL, NO_OTHER, PINNED, Choice
from baechi_ext.explain.path import COMPUTE, DEVICE_BUSY, HANDLING, LINK_BUSY, TRANSFER, Part
from baechi_ext.explain.sensitivity import ALL_FASTER, CostlyTransfer, WhatIf
from baechi_ext.ir.cluster import Cluster
from baechi_runtime.report.tables import as_size, as_time, console, say, share_of, table_of

MOST_PARTS, MOST_LONGEST, MOST_GAPS, MOST_MODULES = 6, 5, 5, 4
FULL = 0.9
"""Devices that are busy for so much of the step are not waiting for each other."""
MOST_DEVICES = 16
"""Rows of a table by device."""
TIGHT = 0.9
"""A device whose peak is so much of its limit is short of memory."""
_NARROW = 48
"""Letters of a name in a table."""
_HELPS = 0.01
_MATTERS = 5e-4
"""Changes of the step by less are said to be none: they would show as 0.0%."""


def print_explanation(explained: PlanExplanation, notes: Sequence[str] = ()) -> None:
    """Prints on stdout what bounds a plan's step, where its time goes, and, last, what would change it."""
    out = console()
    say(out, headline(explained), *balance(explained), waits(explained), *memory_news(explained), *noted(notes))
    for title, table in tables_of(explained):
        say(out, "", title)
        out.print(table)
    say(out, "", what_would_change(explained))


def print_choices(choices: OpChoices, name: str, cluster: Cluster, notes: Sequence[str] = ()) -> None:
    """Prints on stdout why ops are where they are, what they are, and the step with them on each device."""
    out, said = console(), facts(choices)
    say(out, verdict(choices, name, cluster), *noted(notes), "")
    width = max(map(len, said))
    say(out, *(f"{key:<{width}}  {value}" for key, value in said.items()), "")
    out.print(choice_table(choices, cluster))


def noted(notes: Sequence[str]) -> Iterator[str]:
    """Notes, as they stand below what they are on."""
    return (f"Note: {note}." for note in notes)


def headline(explained: PlanExplanation) -> str:
    """A sentence on what the critical path consists of, by device."""
    step_us, shares = explained.timeline.makespan_us, defaultdict[str, float](float)
    if not step_us:
        return "The step takes no time."
    for part in explained.critical_parts:
        name = explained.timeline.cluster.devices[part.device].name
        shares[f"compute on {name}" if part.kind == COMPUTE else "transfers"] += part.us / step_us
    said = [(what, share) for what, share in sorted(shares.items(), key=itemgetter(1), reverse=True) if share >= _MATTERS]
    first, *others = [f"{share_of(share, 1.0)} {what}" for what, share in said[:MOST_PARTS]]
    rest = f"; the rest of it is {', '.join(others)}" if others else ""
    return f"The step is {first}, along its critical path of {as_time(step_us)}{rest}."


def balance(explained: PlanExplanation) -> Iterator[str]:
    """A sentence where several devices have hardly anything to wait for."""
    busy_us, step_us = explained.timeline.busy_us, explained.timeline.makespan_us
    if len(busy_us) > 1 and step_us and min(busy_us) >= FULL * step_us:
        share = math.floor(100 * min(busy_us) / step_us)
        yield f"Every device is busy for at least {share}% of it: only more or faster devices would shorten it much."


def waits(explained: PlanExplanation) -> str:
    """A sentence on how long data waits on the data path: what more devices, or another order, could save."""
    step_us, sums = explained.timeline.makespan_us, defaultdict[str, float](float)
    for part in explained.data_parts:
        sums[part.kind] += part.us / step_us
    alone = 1 - sums[DEVICE_BUSY] - sums[LINK_BUSY]
    return (
        f"Along what the last op depends on, {alone:.0%} is compute and transfers, {sums[DEVICE_BUSY]:.0%} waiting for devices that are "
        f"busy with something else, {sums[LINK_BUSY]:.0%} for busy links."
    )


def memory_news(explained: PlanExplanation) -> Iterator[str]:
    """A sentence for each device that is short of memory."""
    for memory in explained.memory:
        if memory.share is not None and memory.limit_bytes is not None and memory.share >= TIGHT:
            name = explained.timeline.cluster.devices[memory.device].name
            kind, size = max(memory.by_kind.items(), key=lambda pair: pair[1])
            held = f"{as_size(size)} of it {_KINDS[kind]}"
            yield (
                f"{name} is short of memory: its peak is {memory.share:.0%} of {as_size(memory.limit_bytes)} "
                f"at {as_time(memory.at_us)}, {held}."
            )


def what_would_change(explained: PlanExplanation) -> str:
    """The what-ifs that shorten the step most; that all devices are faster goes without saying, unless nothing else does."""
    step_us = explained.timeline.makespan_us
    alone = [w for w in explained.what_ifs if w.change != ALL_FASTER]
    helps = any(w.gain_us >= _HELPS * step_us for w in alone)
    gains = sorted(alone if helps else explained.what_ifs, key=lambda w: -w.gain_us)
    said = [f"{w.change} {change_of(w.step_us, step_us)}" for w in gains if step_us and w.gain_us / step_us >= _MATTERS]
    return f"What would change it: {'; '.join(said[:3])}." if said else "None of the changes tried here would shorten it."


def tables_of(explained: PlanExplanation) -> Iterator[tuple[str, Table]]:
    """Titles and tables: the path's parts, transfers, idle time, memory, what-ifs; those alone that have something to say."""
    yield "critical path", _parts(explained)
    costs, step_us = explained.transfers, explained.timeline.makespan_us
    costly = [x for x in costs.by_gain if (x.gain_us or 0.0) >= _MATTERS * step_us]
    if costly:
        some = "" if costs.tried == costs.count else f"{costs.tried} tried of "
        yield f"costliest of {some}{costs.count} transfers, by the step without them", _transfers(explained, costly)
    if costs.count:
        title = "longest transfers" if costly else f"longest of {costs.count} transfers, of which none holds the step up by itself"
        yield title, _transfers(explained, costs.by_duration[:MOST_LONGEST])
    count = len(explained.timeline.cluster)
    yield "devices" if count <= MOST_DEVICES else f"the {MOST_DEVICES} busiest of {count} devices", _devices(explained)
    if any(gap.op is not None for idle in explained.idle for gap in idle.gaps):
        yield "longest gaps", _gaps(explained)
    if explained.what_ifs:
        yield "the same plan with", _what_ifs(explained.what_ifs, explained.timeline.makespan_us)


def _parts(explained: PlanExplanation) -> Table:
    cluster, step_us = explained.timeline.cluster, explained.timeline.makespan_us
    table = table_of("part", "time", "of the step")
    for part in explained.critical_parts[:MOST_PARTS]:
        table.add_row(_part_name(part, cluster), as_time(part.us), share_of(part.us, step_us))
    rest = sum(part.us for part in explained.critical_parts[MOST_PARTS:])
    if rest:
        table.add_row(f"{len(explained.critical_parts) - MOST_PARTS} further parts", as_time(rest), share_of(rest, step_us))
    return table


def _part_name(part: Part, cluster: Cluster) -> Text:
    where = cluster.devices[part.device].name
    if part.target is not None:
        where += f" -> {cluster.devices[part.target].name}"
    return Text(f"{_PATH_KINDS[part.kind]} {where}{f', {part.phase}' if part.phase else ''}")


def _transfers(explained: PlanExplanation, transfers: Sequence[CostlyTransfer]) -> Table:
    graph, cluster = explained.timeline.graph, explained.timeline.cluster
    table = table_of("tensor", "from", "to", "size", "takes", "waits for link", "step without it")
    for x in transfers:
        tensor = graph.tensors[x.transfer.tensor]
        ends = [Text(cluster.devices[d].name) for d in (x.transfer.source, x.transfer.target)]
        step_us = explained.timeline.makespan_us
        without = "not tried" if x.gain_us is None else change_of(step_us - x.gain_us, step_us)
        name = tensor.name or graph.ops[tensor.producer].id
        table.add_row(short(name), *ends, as_size(tensor.bytes), as_time(x.us), as_time(x.queue_us), without)
    return table


def _devices(explained: PlanExplanation) -> Table:
    timeline, step_us = explained.timeline, explained.timeline.makespan_us
    table = table_of("device", "busy", "idle: input not made", "link busy", "transfer", "nothing left", "peak memory", "limit", "mostly")
    for d in chosen(timeline.busy_us):
        device, busy, idle, memory = timeline.cluster.devices[d], timeline.busy_us[d], explained.idle[d], explained.memory[d]
        limit = "-" if memory.limit_bytes is None else as_size(memory.limit_bytes)
        shares = [share_of(us, step_us) for us in (busy, *idle.waits_us.values())]
        kind = _KINDS[max(memory.by_kind, key=lambda name: memory.by_kind[name])] if memory.peak_bytes else "-"
        table.add_row(Text(device.name), *shares, as_size(memory.peak_bytes), limit, kind)
    return table


def _gaps(explained: PlanExplanation) -> Table:
    ops, devices = explained.timeline.graph.ops, explained.timeline.cluster.devices
    table = table_of("device waits", "from", "for", "to run", "input made by", "on", "of it: not made", "link busy", "transfer")
    gaps = [gap for idle in explained.idle for gap in idle.gaps if gap.op is not None]
    for gap in sorted(gaps, key=lambda gap: -gap.us)[:MOST_GAPS]:
        if gap.op is None or gap.producer is None:
            continue
        maker = devices[explained.timeline.placement[gap.producer]].name
        names = (short(ops[gap.op].id), short(ops[gap.producer].id), Text(maker))
        times = [as_time(us) for us in (gap.producer_us, gap.queue_us, gap.transfer_us)]
        table.add_row(Text(devices[gap.device].name), as_time(gap.start_us), as_time(gap.us), *names, *times)
    return table


def _what_ifs(what_ifs: Sequence[WhatIf], step_us: float) -> Table:
    table = table_of("", "step", "change")
    for what_if in what_ifs:
        table.add_row(Text(what_if.change), as_time(what_if.step_us), change_of(what_if.step_us, step_us))
    return table


# An op, or several


def verdict(choices: OpChoices, name: str, cluster: Cluster) -> str:
    """Why the ops are where they are."""
    spread = [(count, device.name) for count, device in zip(choices.here, cluster.devices, strict=True) if count]
    where = ", ".join(f"{count} on {name}" for count, name in spread[:MOST_DEVICES])
    where += f", {sum(count for count, _ in spread[MOST_DEVICES:])} elsewhere" if spread[MOST_DEVICES:] else ""
    if choices.device is not None:
        where = f"on {cluster.devices[choices.device].name}"
    others = len(choices.moved) - len(choices.asked)
    if len(choices.asked) == 1 and choices.device is not None:
        return f"{name} is {where}: {_reason(choices, cluster)}."
    ops = f"op{'s' * (len(choices.asked) > 1)} of {name}{f' and {others} that share their groups' if others else ''}"
    return f"The {len(choices.asked)} {ops} are {where}: {_reason(choices, cluster)}."


def _reason(choices: OpChoices, cluster: Cluster) -> str:
    best, step_us = choices.best, choices.step_us
    if choices.verdict == PINNED:
        return f"pinned to {cluster.devices[choices.pin or 0].name}"
    if choices.verdict == NO_OTHER:
        return "there is no other device"
    if best is None:
        return "all on any other device, the plan does not fit into memory"
    there = f"all on {cluster.devices[best.device].name}, {'the best one' if choices.device is None else 'the best other device'},"
    there = there if len(choices.moved) > 1 else there.removeprefix("all ")
    if choices.verdict == EQUAL:
        return f"{there} the step would take as long"
    missed = "" if choices.verdict == BEST else "; the search did not come upon that"
    return f"{there} the step would take {as_time(best.step_us)}, {change_of(best.step_us, step_us)}{missed}"


def facts(choices: OpChoices) -> dict[str, str]:
    """Facts about the ops: what they are, what they take, and what moves with them."""
    ops = [choices.graph.ops[v] for v in choices.asked]
    kinds = Counter(op.op or "-" for op in ops).most_common(MOST_MODULES)
    found = {
        "what": ", ".join(f"{count} {kind}" if len(ops) > 1 else kind for kind, count in kinds),
        "phase": ", ".join(dict.fromkeys(op.phase for op in ops)),
        "compute": f"{as_time(sum(op.compute_us for op in ops))}, {as_time(choices.critical_us)} of it on the critical path",
        "holds for the step": as_size(sum(op.persistent_bytes for op in ops)),
    }
    if len(ops) == 1 and ops[0].module:
        found["module"] = ops[0].module
    others = len(choices.moved) - len(ops)
    if others:
        groups = list(dict.fromkeys(op.colocation for op in ops if op.colocation is not None))
        more = " and more" if len(groups) > MOST_MODULES else ""
        found["moves with"] = f"{others} more ops of colocation groups {', '.join(groups[:MOST_MODULES])}{more}"
    return found


def choice_table(choices: OpChoices, cluster: Cluster) -> Table:
    """The step with the ops on each device; of many devices, those that are best for it, and the one that they are on."""
    table = table_of("all on", "step", "change", "fits", "peak there", "limit", "its transfers", "moved")
    best = chosen([-choice.step_us for choice in choices.choices])
    for d, choice in enumerate(choices.choices):
        if d in best or d == choices.device:
            table.add_row(*_choice_row(choice, choices, cluster))
    return table


def _choice_row(choice: Choice, choices: OpChoices, cluster: Cluster) -> list[Text | str]:
    device, here = cluster.devices[choice.device], choice.device == choices.device
    return [
        Text(device.name),
        as_time(choice.step_us),
        "(here)" if here else change_of(choice.step_us, choices.step_us),
        "yes" if choice.fits else "no",
        as_size(choice.peak_memory_bytes[choice.device]),
        "-" if device.memory_bytes is None else as_size(device.memory_bytes),
        str(choice.transfers),
        as_size(choice.bytes_moved),
    ]


def chosen(values: Sequence[float]) -> list[int]:
    """The positions of the largest values, as many as tables have rows by device, in order."""
    return sorted(sorted(range(len(values)), key=lambda d: -values[d])[:MOST_DEVICES])


def short(name: str) -> Text:
    """A name that fits into a table."""
    return Text(name if len(name) <= _NARROW else f"{name[: _NARROW // 2 - 1]}...{name[-_NARROW // 2 + 2 :]}")


def change_of(us: float, step_us: float) -> str:
    """The change from the step's time, in per cent of it, as text."""
    change = us / step_us - 1 if step_us else 0.0
    return "no change" if abs(change) < _MATTERS else f"{change:+.1%}"


_KINDS = {"copy": "received copies", "tensor": "its own tensors", "working": "what an op works with", "persistent": "parameters"}
_PATH_KINDS = {
    COMPUTE: "compute on",
    HANDLING: "sending and receiving on",
    TRANSFER: "transfer",
    DEVICE_BUSY: "busy",
    LINK_BUSY: "link busy",
}
