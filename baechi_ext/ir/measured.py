"""MeasuredStep: one placed step as it really ran, op by op and transfer by transfer, on one clock."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from baechi_ext.errors import MeasurementError, MismatchError
from baechi_ext.ir.checked import Bytes, Index, Number, checked
from baechi_ext.ir.files import SCHEMA_VERSION
from baechi_ext.ir.made_by import Saved, load_as
from baechi_ext.ir.op_graph import OpGraph

KIND = "baechi measured step"


@dataclass(frozen=True, slots=True)
class MeasuredOp:
    """The time at which an op ran. `id` is that of the graph."""

    id: str
    device: Index
    start_us: Number
    end_us: Number


@dataclass(frozen=True, slots=True)
class MeasuredTransfer:
    """The time that a tensor was on its way to another device: from when its sender gave it away until it was there.

    `op` is the id of the op that makes the tensor, which may have several.
    """

    op: str
    tensor: str
    source: Index
    target: Index
    start_us: Number
    end_us: Number


@dataclass(frozen=True, slots=True)
class ResidentBytes:
    """Bytes that a device holds from an instant on, until the next one."""

    at_us: Number
    bytes: Bytes


@dataclass(frozen=True)
class MeasuredStep(Saved):
    """One step; times are microseconds from its start. Ops of one device never overlap; what was not seen to run is left out."""

    graph_fingerprint: str
    executor: str
    clock: str
    """The source of the times, e.g. "monotonic" or "cuda_event"."""
    wall_us: Number
    ops: tuple[MeasuredOp, ...]
    transfers: tuple[MeasuredTransfer, ...] = ()
    memory: tuple[tuple[ResidentBytes, ...], ...] | None = None
    """For each device what it held, in the order of time; None where nobody looked."""
    notes: tuple[str, ...] = ()
    """Sentences on what is left out, and why."""

    def busy_us(self, devices: int) -> tuple[float, ...]:
        """Time for which each of the devices ran ops."""
        busy = [0.0] * devices
        for op in self.ops:
            busy[op.device] += op.end_us - op.start_us
        return tuple(busy)

    def to_json(self) -> dict[str, Any]:
        """The measured step's file (docs/files.md)."""
        memory = self.memory
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": KIND,
            "graph_fingerprint": self.graph_fingerprint,
            "executor": self.executor,
            "clock": self.clock,
            "wall_us": self.wall_us,
            "ops": [asdict(op) for op in self.ops],
            "transfers": [asdict(transfer) for transfer in self.transfers],
            "memory": None if memory is None else [[asdict(held) for held in device] for device in memory],
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], graph: OpGraph) -> "MeasuredStep":
        """The step in a parsed file.

        Raises MeasurementError where it breaks a rule, MismatchError where it is of another graph than `graph`.
        """
        if value.get("kind", KIND) != KIND:
            raise MeasurementError(f'the file is a {value["kind"]!r}, not a "{KIND}"')
        given = {name: field for name, field in value.items() if field is not None}
        step = checked({"graph_fingerprint": "", "executor": "", "clock": ""} | given, cls, "measured step", MeasurementError)
        _require_of(graph, step)
        _require_in_order(step)
        return step

    @classmethod
    def load(cls, path: str | Path, graph: OpGraph) -> "MeasuredStep":
        """Raises FileError, MeasurementError or MismatchError."""
        return load_as(path, "measured step", lambda value: cls.from_json(value, graph))


def _require_of(graph: OpGraph, step: MeasuredStep) -> None:
    again = "measure a step of this graph with baechi train --out"
    for what, id_ in (*(("op", op.id) for op in step.ops), *(("transfer of an output of", t.op) for t in step.transfers)):
        if id_ not in graph.index:
            raise MismatchError(f"the measured step is of another graph: it has the {what} {id_!r}, which the graph lacks; {again}")
    tensors = {(graph.ops[t.producer].id, t.name) for t in graph.tensors}
    unknown = next((t for t in step.transfers if (t.op, t.tensor) not in tensors), None)
    if unknown is not None:
        raise MismatchError(f"the measured step is of another graph: op {unknown.op!r} has no output {unknown.tensor!r}; {again}")
    if step.graph_fingerprint and step.graph_fingerprint != graph.fingerprint:
        raise MismatchError(
            f"the measured step is of another graph: its fingerprint is {step.graph_fingerprint[:12]}..., the graph's "
            f"{graph.fingerprint[:12]}...; {again}"
        )


def _require_in_order(step: MeasuredStep) -> None:
    """Raises MeasurementError where something ends before it starts, an op appears twice, or two ops overlap on a device."""
    ops = ((f"op {op.id!r}", op.start_us, op.end_us) for op in step.ops)
    for what, start_us, end_us in (*ops, *((f"the transfer of {t.op!r}", t.start_us, t.end_us) for t in step.transfers)):
        if end_us < start_us:
            raise MeasurementError(f"{what} ends at {end_us:g} us, before it starts at {start_us:g} us")
    alone = next((t for t in step.transfers if t.source == t.target), None)
    if alone is not None:
        raise MeasurementError(f"the transfer of {alone.op!r} goes from device {alone.source} to itself")
    again = next((a for a, b in pairwise(sorted(op.id for op in step.ops)) if a == b), None)
    if again is not None:
        raise MeasurementError(f"op {again!r} appears twice in the measured step; an op runs once")
    in_order = sorted(step.ops, key=lambda op: (op.device, op.start_us, op.end_us))
    for a, b in pairwise(in_order):
        if a.device == b.device and b.start_us < a.end_us:
            raise MeasurementError(
                f"ops {a.id!r} and {b.id!r} overlap on device {a.device}: one ends at {a.end_us:g} us, the other starts at "
                f"{b.start_us:g} us; a device runs one op at a time"
            )
    for i, held in enumerate(step.memory or ()):
        if any(b.at_us < a.at_us for a, b in pairwise(held)):
            raise MeasurementError(f"the memory of device {i} is not in the order of time")
