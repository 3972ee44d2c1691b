"""`baechi trace`: a run as a Chrome trace, which Perfetto, chrome://tracing and HTA (torch's Holistic Trace Analysis) read.

A process is a device, once as predicted and once as measured; its rows are what it computes and what it copies in and out, each on as many
rows as copies are on their way at once, so that no slices of a row overlap. An arrow follows each tensor from the op that makes it
over its copies to the op that first reads it. The format: Trace Event Format (Google), "JSON Object Format"; times are microseconds, here
with three digits, nanoseconds, to which all ends are rounded before durations are taken.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baechi_ext.ir.files import make_folder, require_writable, write_bytes
from baechi_ext.simulate import Transfer
from baechi_runtime.files.run_folder import RunFolder
from baechi_runtime.report.run_steps import MEASURED, RunStep, steps_of

TRACE = "trace.json"
_COMPUTE, _COPY = "kernel", "gpu_memcpy"
"""Categories as torch's profiler calls them, whatever the device is; HTA goes by them."""
_ROWS_OF_A_PROCESS = 10_000


@dataclass
class _Slice:
    """A slice, in nanoseconds, and in it the ends and turns of arrows: (phase, the arrow's number, when)."""

    name: str
    category: str
    start: int
    end: int
    rank: tuple[int, int]
    """Its place among all that starts at one instant: causes come first."""
    args: dict[str, Any]
    row: int = 0
    arrows: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def last(self) -> int:
        """The last nanosecond that is inside."""
        return max(self.start, self.end - 1)


_Timed = tuple[int, tuple[int, int], int, dict[str, Any]]
"""An event with its sort keys: when it is, its slice's rank, and its place in there."""


def trace(run: RunFolder, device: int | None = None) -> dict[str, Any]:
    """The trace of a run, its measured step beside the predicted one where it has one; with `device` of that device alone, as HTA wants
    the devices of a run: each a file of its own, with its rank. HTA looks at the measured step, or, where none is, at the predicted one."""
    steps = steps_of(run)
    events: list[dict[str, Any]] = []
    timed: list[_Timed] = []
    for number, step in enumerate(steps):
        drawn = _Drawing(run, step, steps, streams=step is steps[-1])
        for d, name in enumerate(device.name for device in run.plan.cluster.devices):
            if device in (None, d):
                pid = 1 + d * len(steps) + number
                events += drawn.names_of(d, pid, f"{name} {step.kind}")
                timed += drawn.events_of(d, pid, arrows=device is None)
    timed.sort(key=lambda item: item[:3])
    return {
        "schemaVersion": 1,
        "distributedInfo": {"rank": device or 0, "world_size": 1 if device is None else len(run.plan.cluster)},
        "displayTimeUnit": "ns",
        "otherData": {"command": run.made_by.command_line, "versions": dict(run.made_by.versions), "method": run.plan.method},
        "traceEvents": [*events, *(event for *_, event in timed)],
    }


def write_trace(folder: str, out: str | None, ranks: str | None) -> Path:
    """Writes the trace to `out`, by default trace.json in the folder, and into `ranks`, where given, one for each device; returns the
    former's path. Raises what reading the folder raises."""
    path = Path(folder) / TRACE if out is None else Path(out)
    run = RunFolder.load(folder)
    require_writable(path)
    if ranks is not None:
        make_folder(Path(ranks))
        for device in range(len(run.plan.cluster)):
            _write(Path(ranks) / f"rank_{device}.json", trace(run, device))
    _write(path, trace(run))
    return path


def _write(path: Path, value: dict[str, Any]) -> None:
    content = json.dumps(value, allow_nan=False).encode()  # with a space behind each colon: HTA looks for the rank so, before it parses
    write_bytes(path, gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


class _Drawing:
    """One step's slices, by device."""

    def __init__(self, run: RunFolder, step: RunStep, steps: Sequence[RunStep], *, streams: bool) -> None:
        self._graph, self._device = run.graph, run.plan.placement
        self._names = [device.name for device in run.plan.cluster.devices]
        self._spans = {s.kind: s.span for s in steps}
        self._copies_ns = {s.kind: {(c.tensor, c.target): _ns(c.end_us) - _ns(c.start_us) for c in s.copies} for s in steps}
        self._step = step
        self._streams = streams
        place = {v: i for i, v in enumerate(step.span)}
        ops = {v: self._op(v, (2 * place[v], 0)) for v in step.span}
        leaving, coming = [], []
        for arrow, copy in enumerate(step.copies):
            producer, reader = run.graph.tensors[copy.tensor].producer, self._first_reader(copy)
            rank = 2 * place.get(producer, -1) + 1
            leaving.append(self._copy(copy, "copy-out", (rank, 2 * arrow)))
            coming.append(self._copy(copy, "copy-in", (rank, 2 * arrow + 1)))
            ends = [None if v is None else ops.get(v) for v in (producer, reader)]
            _draw(arrow, [s for s in (ends[0], leaving[-1], coming[-1], ends[1]) if s is not None])
        count = range(len(self._names))
        self._ops = [[s for v, s in ops.items() if self._device[v] == d] for d in count]
        self._in = [_in_rows([s for c, s in zip(step.copies, coming, strict=True) if c.target == d], 1) for d in count]
        first = [2 + max((s.row for s in slices), default=0) for slices in self._in]
        self._out = [_in_rows([s for c, s in zip(step.copies, leaving, strict=True) if c.source == d], first[d]) for d in count]

    def names_of(self, device: int, pid: int, name: str) -> Iterator[dict[str, Any]]:
        """Events that name the process and its rows, and give the order in which they stand."""
        rows = {0: "compute"}
        for title, slices in (("copy-in", self._in[device]), ("copy-out", self._out[device])):
            used = sorted({s.row for s in slices})
            rows |= {row: title if i == 0 else f"{title} {i + 1}" for i, row in enumerate(used)}
        yield _about("process_name", pid, 0, name=name)
        yield _about("process_sort_index", pid, 0, sort_index=pid)
        for row, title in rows.items():
            yield _about("thread_name", pid, _tid(pid, row), name=title)
            yield _about("thread_sort_index", pid, _tid(pid, row), sort_index=row)

    def events_of(self, device: int, pid: int, *, arrows: bool) -> Iterator[_Timed]:
        """Slices, arrows, where these are wanted, and what the device holds."""
        for s in (*self._ops[device], *self._in[device], *self._out[device]):
            where = {"pid": pid, "tid": _tid(pid, s.row)}
            args = s.args | ({"stream": 1 + s.row} if self._streams else {})
            slice_ = {"ph": "X", "name": s.name, "cat": s.category, "ts": _us(s.start), "dur": _us(s.end - s.start), **where, "args": args}
            yield s.start, s.rank, 0, slice_
            for phase, arrow, at in s.arrows if arrows else ():
                number = 2 * arrow + (self._step.kind == MEASURED)
                event = {"ph": phase, "name": "transfer", "cat": "transfer", "id": number, "ts": _us(at), **where}
                yield at, s.rank, 1 + arrow, event | ({"bp": "e"} if phase == "f" else {})
        for at_us, held in self._step.memory[device] if self._step.memory else ():
            at = _ns(at_us)
            yield at, (-1, 0), 0, {"ph": "C", "name": "memory", "pid": pid, "tid": 0, "ts": _us(at), "args": {"bytes": held}}

    def _op(self, v: int, rank: tuple[int, int]) -> _Slice:
        op, (start_us, end_us) = self._graph.ops[v], self._step.span[v]
        args: dict[str, Any] = {"op": op.op, "phase": op.phase, "module": op.module}
        for kind, span in self._spans.items():
            if v in span:
                start, end = map(_ns, span[v])
                args |= {f"{kind}_start_us": _us(start), f"{kind}_us": _us(end - start)}
        args |= {size: getattr(op, size) for size in ("output_bytes", "persistent_bytes", "temporary_bytes")}
        known = {key: value for key, value in args.items() if value is not None}
        return _Slice(op.id, _COMPUTE, _ns(start_us), _ns(end_us), rank, known)

    def _first_reader(self, copy: Transfer) -> int | None:
        """The op that reads a copy first, where one was seen to."""
        span = self._step.span
        there = (v for v in self._graph.tensors[copy.tensor].readers if v in span and self._device[v] == copy.target)
        return min(there, key=lambda v: tuple(map(_ns, span[v])), default=None)

    def _copy(self, copy: Transfer, direction: str, rank: tuple[int, int]) -> _Slice:
        graph = self._graph
        tensor, key = graph.tensors[copy.tensor], (copy.tensor, copy.target)
        source, target = self._names[copy.source], self._names[copy.target]
        args: dict[str, Any] = {"op": graph.ops[tensor.producer].id, "tensor": tensor.name, "bytes": tensor.bytes, "direction": direction}
        args |= {f"{kind}_us": _us(copies[key]) for kind, copies in self._copies_ns.items() if key in copies}
        # HTA takes what begins so for a copy.
        return _Slice(f"Memcpy {source} -> {target}", _COPY, _ns(copy.start_us), _ns(copy.end_us), rank, args)


def _draw(arrow: int, path: Sequence[_Slice]) -> None:
    """An arrow from slice to slice: it leaves the first one as late as may be, and never goes back in time; where clocks of several
    machines say that it would, there is none."""
    first, second, *_ = path
    at = [min(first.last, max(first.start, second.start))]
    for s in path[1:]:
        at.append(max(at[-1], s.start))
    if all(s.start <= t <= s.last for s, t in zip(path, at, strict=True)):
        for s, t, phase in zip(path, at, "s" + "t" * (len(path) - 2) + "f", strict=True):
            s.arrows.append((phase, arrow, t))


def _in_rows(slices: Iterable[_Slice], first: int) -> list[_Slice]:
    """The slices, each on the first row from `first` on that is free when it starts."""
    ends: list[int] = []
    placed = sorted(slices, key=lambda s: (s.start, s.end))
    for s in placed:
        free = next((i for i, end in enumerate(ends) if end <= s.start), len(ends))
        ends[free : free + 1] = [s.end]
        s.row = first + free
    return placed


def _about(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    """An event that tells something of a process or a row of it."""
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _tid(pid: int, row: int) -> int:
    """A row's number in the whole trace: some readers take threads of one number for one, whatever their process."""
    return pid * _ROWS_OF_A_PROCESS + row


def _ns(us: float) -> int:
    return round(us * 1000)


def _us(ns: int) -> float:
    return ns / 1000
