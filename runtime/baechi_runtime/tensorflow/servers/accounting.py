"""Memory that logical devices hold in a real step. They share one allocator, so it is accounted by the trace of a step, with the rules of
plans, and tensors as large as profiled."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baechi_ext.simulate import Timeline
from baechi_ext.simulate.timeline import Transfer
from baechi_runtime.tensorflow.servers.session import PlacedSession


def accounted_peak_bytes(session: PlacedSession, timeline: Timeline) -> tuple[int, ...]:
    """Peak bytes of each device of the loaded plan, in the order in which one real step went."""
    session.run()
    return tuple(map(int, traced_timeline(session.trace(), session.placed.op_of, timeline).peak_memory_bytes))


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


def held_bytes(memory: Any) -> int:
    """While an op ran: what was held at its end, and what it had given back by then."""
    return memory.allocator_bytes_in_use + max(0, memory.peak_bytes - memory.live_bytes)
