"""Peaks of memory, kept up change by change: what arrays say must be the same, to the last bit."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.simulate import Timeline, simulate
from tests.simulate.strategies import cases


def peaks_one_by_one(timeline: Timeline) -> tuple[float, ...]:
    """The rules of docs/simulator.md, "Memory", for one tensor, transfer and op after the other."""
    graph, start, end = timeline.graph, timeline.start_us, timeline.end_us
    changes: list[list[tuple[float, int, float]]] = [[] for _ in timeline.busy_us]
    base = [0.0] * len(changes)

    def live(device: int, since: float, until: float, size: float) -> None:
        if size and until > since:
            changes[device] += [(since, 1, size), (until, 0, -size)]

    for x in timeline.transfers:
        tensor = graph.tensors[x.tensor]
        live(x.target, x.start_us, max(end[w] for w in tensor.readers if timeline.placement[w] == x.target), tensor.bytes)
    for v, op in enumerate(graph.ops):
        device, beyond = timeline.placement[v], op.output_bytes
        base[device] += op.persistent_bytes
        for t in graph.outputs[v]:
            tensor = graph.tensors[t]
            beyond -= tensor.bytes
            here = [end[w] for w in tensor.readers if timeline.placement[w] == device]
            until = max([end[v], *here, *(x.end_us for x in timeline.transfers if x.tensor == t)])
            live(device, start[v], until, 0 if op.resident else tensor.bytes)
        live(device, start[v], end[v], op.temporary_bytes + max(0, beyond))
    peaks = []
    for now, of_device in zip(base, changes, strict=True):
        top = now
        for _, _, size in sorted(of_device):
            now += size
            top = max(top, now)
        peaks.append(top)
    return tuple(peaks)


@given(case=cases(), fractions=st.booleans(), data=st.data())
def test_peaks_are_those_of_one_change_after_another(case: tuple[OpGraph, Cluster], fractions: bool, data: st.DataObject) -> None:
    graph, cluster = case
    if fractions:
        ops = [replace(op, persistent_bytes=op.persistent_bytes / 3, output_bytes=op.output_bytes / 7) for op in graph.ops]
        graph = graph.replace_ops(ops)
    placement = data.draw(st.lists(st.integers(0, len(cluster) - 1), min_size=len(graph), max_size=len(graph)))
    timeline = simulate(graph, cluster, placement)
    assert timeline.peak_memory_bytes == peaks_one_by_one(timeline)
    assert fractions or all(isinstance(peak, int) for peak in timeline.peak_memory_bytes)
