"""A placed TensorFlow step as it really ran, op by op: from the RunMetadata of traced steps, which come after the timed ones.

TensorFlow's clock is the time of day to the nanosecond, which servers of one machine share. Tracing makes short ops slower.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from baechi_ext.explain.memory import memory_courses
from baechi_ext.ir.measured import MeasuredStep, ResidentBytes
from baechi_ext.simulate import Timeline
from baechi_runtime.measure.recording import DeviceNotes, Recording, middle
from baechi_runtime.tensorflow.lowering.placed_graph import UNORDERED, PlacedGraph, kernel_of
from baechi_runtime.tensorflow.servers.accounting import held_bytes, traced_timeline
from baechi_runtime.tensorflow.servers.placed_step import PlacedStep
from baechi_runtime.tensorflow.servers.session import PlacedSession

CLOCK = "run_metadata"
RUNS = 5
"""Steps that are traced."""
WARM_UP = 1
"""So many steps of a script behind the verified ones are not traced."""
_SENT = re.compile(r"edge_\d+_(\S+) from (\S+) to (\S+)$")
"""The end of a RecvTensor's label."""
BY_REFERENCE = "tensors of logical devices change hands by reference; their transfers take no time and are left out"
SEVERAL_HOSTS = "the servers are on several machines; their times are as far apart as those machines' clocks"


def record_step(
    session: PlacedSession, timeline: Timeline, executor: str, *, shared_memory: bool, notes: Sequence[str] = ()
) -> MeasuredStep:
    """A traced step, of those of several that have the most transfers (servers lose records of some) the one of the median time.

    `timeline` is the plan that the session runs. The variables go on with it.
    """
    traces = [session.trace() for _ in range(1 + RUNS)][1:]
    return of_traces(traces, session.placed, timeline, executor, shared_memory=shared_memory, notes=notes)


def of_traces(
    traces: Sequence[Any],
    placed: PlacedGraph,
    timeline: Timeline,
    executor: str,
    *,
    shared_memory: bool,
    notes: Sequence[str] = (),
) -> MeasuredStep:
    """The same of steps that were traced before."""
    found = [_read(trace, placed, timeline, executor, shared_memory=shared_memory) for trace in traces]
    most = max(len(step.transfers) for step in found)
    step = middle([step for step in found if len(step.transfers) == most], lambda step: step.wall_us)
    moved = [BY_REFERENCE] if shared_memory and timeline.transfers else []
    return replace(step, notes=(*step.notes, *moved, *notes))


class TracedCalls:
    """Runs a script's steps of one shape, and keeps the traces of the first ones behind a warm-up. They compute what all others do; no step
    is added."""

    def __init__(self) -> None:
        self.traces: list[Any] = []
        self._begun = 0

    def run(self, step: PlacedStep, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """See PlacedStep.run."""
        self._begun += 1
        if not WARM_UP < self._begun <= WARM_UP + RUNS:
            return step.run(inputs)
        results, trace = step.traced(inputs)
        self.traces.append(trace)
        return results


def _read(metadata: Any, placed: PlacedGraph, timeline: Timeline, executor: str, *, shared_memory: bool) -> MeasuredStep:
    graph, placement = timeline.graph, timeline.placement
    spans = [_one_by_one(spans) for spans in _spans_ns(metadata, placed)]
    begin = min((span[0] for device in spans for span in device.values()), default=0)
    end = max((span[1] for device in spans for span in device.values()), default=0)
    index = graph.index
    ops = [[(index[op], *span) for op, span in device.items() if placement[index[op]] == d] for d, device in enumerate(spans)]
    made = {v: end for device in ops for v, _, end in device}
    sent: list[list[tuple[int, int, int, int]]] = [[] for _ in spans]
    for tensor, target, asked, there in _arrivals(metadata, placed, timeline):
        producer = graph.tensors[tensor].producer
        given = max(asked, made.get(producer, begin))  # a reader asks for it before it is there
        sent[placement[producer]].append((tensor, target, given, there))
    unseen = len(graph) - sum(map(len, ops))
    notes = [f"{unseen} ops are left out: the traces have no record of them; a loop or condition runs as its parts"] if unseen else []
    unknown = 0 if shared_memory else len(timeline.transfers) - sum(map(len, sent))
    if unknown:
        notes.append(f"{unknown} transfers are left out: the traces have no record of them, or not of which tensors they were")
    devices = [DeviceNotes(*found) for found in zip(ops, sent, strict=True)]
    recording = Recording(begin, (end - begin) / 1000, devices, None, CLOCK, tuple(notes))
    courses: Sequence[Sequence[tuple[float, float]]] | None
    if shared_memory:
        courses = memory_courses(traced_timeline(metadata, placed.op_of, timeline))
    else:
        held = _held(metadata, placed)
        courses = None if held is None else [[(recording.us(at), size) for at, size in device] for device in held]
    memory = None if courses is None else tuple(tuple(ResidentBytes(*held) for held in course) for course in courses)
    return replace(recording.measured(graph, executor), memory=memory)


def _stats_of(metadata: Any, placed: PlacedGraph) -> Iterator[tuple[int, Any]]:
    """(Device, a node's statistics)."""
    devices = {name: i for i, name in enumerate(placed.devices)}
    for entry in metadata.step_stats.dev_stats:
        if entry.device in devices:
            yield from ((devices[entry.device], stats) for stats in entry.node_stats)


def _spans_ns(metadata: Any, placed: PlacedGraph) -> list[dict[str, tuple[int, int]]]:
    """For each device, op -> from when its first node computed until its last one had; nodes that come when they like take no time."""
    found: list[dict[str, tuple[int, int]]] = [{} for _ in placed.devices]
    for device, stats in _stats_of(metadata, placed):
        op = placed.op_of.get(stats.node_name)
        if op is None or f"{stats.node_name} = " not in stats.timeline_label:
            continue
        start, end = (stats.all_start_nanos + ns for ns in (stats.op_start_rel_nanos, stats.op_end_rel_nanos))
        if kernel_of(stats.timeline_label) in UNORDERED:
            if stats.node_name == op:
                found[device].setdefault(op, (start, start))
            continue
        known = found[device].get(op, (start, end))
        found[device][op] = min(start, known[0]), max(end, known[1])
    return found


def _one_by_one(spans: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """The same, each op cut to what comes after the one before it: the next node may begin while the last one's thread still says that
    it is done."""
    found = {}
    last = 0
    for op, (start, end) in sorted(spans.items(), key=lambda item: item[1]):
        found[op] = max(start, last), max(end, last)
        last = found[op][1]
    return found


def _arrivals(metadata: Any, placed: PlacedGraph, timeline: Timeline) -> Iterable[tuple[int, int, int, int]]:
    """(Tensor, target, when it was asked for, when it was there), of the tensors that can be told: the trace names nodes, not their
    outputs."""
    graph = timeline.graph
    devices = {name: i for i, name in enumerate(placed.devices)}
    sent: dict[tuple[str, int], list[int]] = {}
    for transfer in timeline.transfers:
        sent.setdefault((graph.ops[graph.tensors[transfer.tensor].producer].id, transfer.target), []).append(transfer.tensor)
    spans: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for _, stats in _stats_of(metadata, placed):
        label = _SENT.search(stats.timeline_label)
        if label is not None and label[3] in devices:
            asked = 1000 * stats.all_start_micros
            key = placed.op_of.get(label[1], ""), devices[label[3]]
            spans.setdefault(key, []).append((asked, asked + 1000 * stats.all_end_rel_micros))
    for key, tensors in sent.items():
        if len(tensors) == len(spans.get(key, ())) == 1:
            yield tensors[0], key[1], *spans[key][0]


def _held(metadata: Any, placed: PlacedGraph) -> list[list[tuple[int, int]]] | None:
    """For each device what its allocator holds while an op runs and after it, in the order of time; None where allocators do not count."""
    found: list[list[tuple[int, int]]] = [[] for _ in placed.devices]
    counts = False
    for device, stats in _stats_of(metadata, placed):
        start, end = (stats.all_start_nanos + ns for ns in (stats.op_start_rel_nanos, stats.op_end_rel_nanos))
        for memory in stats.memory:
            counts = counts or memory.allocator_bytes_in_use > 0
            found[device] += [(start, held_bytes(memory)), (end, memory.allocator_bytes_in_use)]
    return [sorted(device, key=lambda item: item[0]) for device in found] if counts else None
