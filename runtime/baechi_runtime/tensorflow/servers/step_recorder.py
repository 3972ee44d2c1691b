"""A placed TensorFlow step as it really ran, op by op: from the RunMetadata of traced steps, which come after the timed ones.

TensorFlow's clock is the time of day to the nanosecond, which servers of one machine share. Tracing makes short ops slower.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from baechi_ext.explain.memory import memory_courses
from baechi_ext.ir.measured import MeasuredStep, ResidentBytes
from baechi_ext.simulate import Timeline
from baechi_runtime.measure.recording import DeviceNotes, Recording, middle
from baechi_runtime.tensorflow.lowering.placed_graph import UNORDERED, PlacedGraph
from baechi_runtime.tensorflow.servers.session import PlacedSession
from baechi_runtime.tensorflow.servers.traces import CLOCK, held_ns, kernel_of, node_stats, traced_timeline

RUNS = 5
"""Steps that are traced."""
WARM_UP = 1
"""So many steps of a script behind the verified ones are not traced."""
_SENT = re.compile(r"edge_\d+_(\S+) from (\S+) to (\S+)$")
"""The end of a RecvTensor's label."""
BY_REFERENCE = "tensors of logical devices change hands by reference; their transfers take no time and are left out"
SEVERAL_HOSTS = "the servers are on several machines; their times are as far apart as those machines' clocks"


def record_step(session: PlacedSession, timeline: Timeline, executor: str, traces: Sequence[Any] = ()) -> MeasuredStep:
    """The traced step of the median time, of those with the most records of transfers and then of ops: a trace may lack some.

    `timeline` is the plan that the session runs. Without `traces` of its steps some are run now; the variables go on with them.
    """
    traces = traces or [session.traced()[1] for _ in range(1 + RUNS)][1:]
    found = [_read(trace, session, timeline, executor) for trace in traces]
    seen = [(len(step.transfers), len(step.ops)) for step in found]
    step = middle([step for step, records in zip(found, seen, strict=True) if records == max(seen)], lambda step: step.wall_us)
    moved = [BY_REFERENCE] if session.devices.shared_memory and timeline.transfers else []
    apart = [SEVERAL_HOSTS] if session.devices.several_hosts else []
    return replace(step, notes=(*step.notes, *moved, *apart))


def _read(metadata: Any, session: PlacedSession, timeline: Timeline, executor: str) -> MeasuredStep:
    placed, shared_memory = session.placed, session.devices.shared_memory
    graph, placement, index = timeline.graph, timeline.placement, timeline.graph.index
    spans = [_one_by_one(spans) for spans in _spans_ns(metadata, placed)]
    begin = min((span[0] for device in spans for span in device.values()), default=0)
    end = max((span[1] for device in spans for span in device.values()), default=0)
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
        held = held_ns(metadata, placed.devices)
        counted = any(size for device in held for _, (_, size) in device)
        each = [sorted((at for node in device for at in node), key=lambda item: item[0]) for device in held]
        courses = [[(recording.us(at), size) for at, size in device] for device in each] if counted else None
    memory = None if courses is None else tuple(tuple(ResidentBytes(*held) for held in course) for course in courses)
    return replace(recording.measured(graph, executor), memory=memory)


def _spans_ns(metadata: Any, placed: PlacedGraph) -> list[dict[str, tuple[int, int]]]:
    """For each device, op -> from when its first node computed until its last one had; nodes that come when they like take no time."""
    found: list[dict[str, tuple[int, int]]] = [{} for _ in placed.devices]
    for device, stats in node_stats(metadata, placed.devices):
        op, kernel = placed.op_of.get(stats.node_name), kernel_of(stats)
        if op is None or not kernel:
            continue
        start, end = (stats.all_start_nanos + ns for ns in (stats.op_start_rel_nanos, stats.op_end_rel_nanos))
        if kernel in UNORDERED:
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
    sent: dict[tuple[str, int], list[int]] = {}
    for transfer in timeline.transfers:
        sent.setdefault((graph.ops[graph.tensors[transfer.tensor].producer].id, transfer.target), []).append(transfer.tensor)
    spans: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for _, stats in node_stats(metadata, placed.devices):
        label = _SENT.search(stats.timeline_label)
        if label is not None and label[3] in placed.devices:
            asked = 1000 * stats.all_start_micros
            key = placed.op_of.get(label[1], ""), placed.devices.index(label[3])
            spans.setdefault(key, []).append((asked, asked + 1000 * stats.all_end_rel_micros))
    for key, tensors in sent.items():
        if len(tensors) == len(spans.get(key, ())) == 1:
            yield tensors[0], key[1], *spans[key][0]
