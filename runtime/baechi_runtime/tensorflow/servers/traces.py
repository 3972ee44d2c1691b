"""The trace (RunMetadata) of a placed step: its nodes, and the memory that devices held.

Logical devices share one allocator, so theirs is accounted by the trace, with the rules of plans, and tensors as large as profiled.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from baechi_ext.simulate import Timeline
from baechi_ext.simulate.timeline import Transfer
from baechi_runtime.tensorflow.servers.session import PlacedSession

CLOCK = "run_metadata"
"""The name of its clock in files."""


def node_stats(metadata: Any, devices: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """(Device, statistics of a node or a transfer), of the devices of these names."""
    for entry in metadata.step_stats.dev_stats:
        if entry.device in devices:
            device = devices.index(entry.device)
            yield from ((device, stats) for stats in entry.node_stats)


def kernel_of(stats: Any) -> str:
    """The kernel that a node ran, by its label "name = Kernel(inputs)", before which the memory that was taken may stand in brackets;
    empty for a transfer, whose label names no node."""
    found: str = stats.timeline_label
    return found.partition(" = ")[2].partition("(")[0] if f"{stats.node_name} = " in found else ""


def held_ns(metadata: Any, devices: Sequence[str]) -> list[list[tuple[tuple[int, int], tuple[int, int]]]]:
    """For each device and node (nanosecond, bytes that the device's allocator holds) while the node runs, and after it; 0 after all nodes
    where allocators do not count. While a node ran there was what was held at its end, and what it had given back by then."""
    found: list[list[tuple[tuple[int, int], tuple[int, int]]]] = [[] for _ in devices]
    for device, stats in node_stats(metadata, devices):
        start, end = (stats.all_start_nanos + ns for ns in (stats.op_start_rel_nanos, stats.op_end_rel_nanos))
        for memory in stats.memory:
            held = memory.allocator_bytes_in_use
            found[device].append(((start, held + max(0, memory.peak_bytes - memory.live_bytes)), (end, held)))
    return found


def peak_bytes(session: PlacedSession) -> tuple[int, ...]:
    """Peak bytes of each device's allocator in one real step: variables, inputs, live tensors, received copies, and temporaries; with all
    that is loaded there besides. Empty where devices share an allocator."""
    if session.devices.shared_memory:
        return ()
    session.run()
    held = held_ns(session.traced()[1], session.placed.devices)
    return tuple(max((size for (_, size), _ in device), default=0) for device in held)


def accounted_peak_bytes(session: PlacedSession, timeline: Timeline) -> tuple[int, ...]:
    """Peak bytes of each device of the loaded plan, in the order in which one real step went."""
    session.run()
    return tuple(map(int, traced_timeline(session.traced()[1], session.placed.op_of, timeline).peak_memory_bytes))


def traced_timeline(metadata: Any, op_of: Mapping[str, str], timeline: Timeline) -> Timeline:
    """The plan's timeline as it really went. Transfers take no time: tensors change hands by reference."""
    graph, spans = timeline.graph, _spans_us(metadata, op_of)
    first = min((start for start, _ in spans.values()), default=0.0)
    starts, ends = [0.0] * len(graph), [0.0] * len(graph)
    for v in graph.order:
        fed = max((ends[u] for u in graph.predecessors[v]), default=0.0)
        start, end = spans.get(graph.ops[v].id, (first + fed, first + fed))  # some that take no time are in no trace
        starts[v] = max(fed, start - first)
        ends[v] = max(starts[v], end - first)
    made = {t.tensor: ends[graph.tensors[t.tensor].producer] for t in timeline.transfers}
    return replace(
        timeline,
        start_us=tuple(starts),
        end_us=tuple(ends),
        makespan_us=max(ends, default=0.0),
        started=tuple(sorted(timeline.started, key=starts.__getitem__)),
        transfers=tuple(Transfer(t.tensor, t.source, t.target, *[made[t.tensor]] * 3) for t in timeline.transfers),
    )


def _spans_us(metadata: Any, op_of: Mapping[str, str]) -> dict[str, tuple[float, float]]:
    """Op -> when the node of its name began and ended; the constants beside it come when they like."""
    return {
        stats.node_name: (
            (stats.all_start_nanos + stats.op_start_rel_nanos) / 1000,
            (stats.all_start_nanos + stats.all_end_rel_nanos) / 1000,
        )
        for entry in metadata.step_stats.dev_stats
        for stats in entry.node_stats
        if op_of.get(stats.node_name) == stats.node_name
    }
