"""What placing a module's calls gained: predicted, and measured in the caller's own loop."""

from dataclasses import dataclass
from typing import Any

from baechi_ext.ir.files import SCHEMA_VERSION
from runtime.calls.placed_calls import PlacedCalls
from runtime.samples import Samples
from runtime.script_report import INTERRUPTED, TimedCalls, measured_json, samples_of, warm
from runtime.tables import as_size, as_time


@dataclass(frozen=True)
class CallReport(TimedCalls):
    """A module's first placed call; `refusal` says why calls run unplaced, where they do."""

    module: str
    method: str
    devices: tuple[str, ...]
    num_ops: tuple[int, ...]
    """On each device."""
    predicted_us: float | None
    predicted_single_us: float | None
    """Of the same programs on one device."""
    placed: Samples | None
    """The last calls that were neither verified nor recorded, forward and backward phase together; None before the first one."""
    unplaced: Samples | None
    """Verified steps as they are, forward and backward on one thread, the first left out where there are more; None without any."""
    peak_memory_bytes: tuple[float, ...]
    """Predicted, of each device."""
    transfers: int
    bytes_moved: float
    verified_steps: int
    max_rel_diff: float
    placed_steps: int
    shapes: int
    unplaced_steps: int
    refusal: str
    blocks: str
    """What is placed in blocks, and why not op by op; empty where that is not so."""
    why_whole: str
    """What is said of a plan that leaves all on one of several devices; empty of any other."""
    notes: tuple[str, ...]

    @classmethod
    def of(cls, calls: PlacedCalls) -> "CallReport":
        name = type(calls.module).__name__
        counted = {
            "module": name,
            "verified_steps": sum(c.verification.steps for c in calls.calls),
            "max_rel_diff": max((c.verification.max_rel_diff for c in calls.calls), default=0.0),
            "placed_steps": sum(c.count for c in calls.calls),
            "shapes": len(calls.calls),
            "unplaced_steps": calls.unplaced,
            "refusal": calls.refusal or (INTERRUPTED if calls.interrupted else ""),
            "blocks": "" if calls.other_way is None else calls.other_way.line(),
        }
        if not calls.calls:
            method = calls.settings.request.plan.method
            return cls(method=method, devices=(), num_ops=(), predicted_us=None, predicted_single_us=None, placed=None,
                       unplaced=None, peak_memory_bytes=(), transfers=0, bytes_moved=0, why_whole="", notes=(), **counted)  # fmt: skip
        first = calls.calls[0]
        result, timeline = first.placement.result, first.placement.result.timeline
        return cls(
            method=result.plan.method,
            devices=tuple(d.name for d in timeline.cluster.devices),
            num_ops=tuple(len(order) for order in timeline.device_order()),
            predicted_us=timeline.makespan_us,
            predicted_single_us=first.placement.single.makespan_us,
            placed=samples_of([times.wall_us for times in first.loaded.times]),
            unplaced=samples_of(warm([sum(phases) for phases in first.verification.unplaced_us])),
            peak_memory_bytes=tuple(timeline.peak_memory_bytes),
            transfers=len(timeline.transfers),
            bytes_moved=timeline.bytes_moved,
            why_whole="" if result.splits or len(timeline.cluster) == 1 else result.why_whole,
            notes=tuple(n for n in (*result.notes, first.placement.note) if n),
            **counted,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "module": self.module,
            "method": self.method,
            "devices": list(self.devices),
            "num_ops": list(self.num_ops),
            "predicted_step_us": {"single": self.predicted_single_us, "placed": self.predicted_us},
            "measured_step_us": measured_json(self.unplaced, self.placed),
            "peak_memory_bytes": {"predicted": list(self.peak_memory_bytes)},
            "transfers": self.transfers,
            "bytes_moved": self.bytes_moved,
            "verification": {"steps": self.verified_steps, "max_rel_diff": self.max_rel_diff},
            "placed_steps": self.placed_steps,
            "unplaced_steps": self.unplaced_steps,
            "shapes": self.shapes,
            "refusal": self.refusal,
            "blocks": self.blocks,
            "notes": list(self.notes),
        }

    def line(self) -> str:
        """One line: what was placed and what it gained, or why not."""
        if self.blocks and not self.refusal:
            return self.blocks
        if not self.devices:
            return f"{self.module}: not placed; {self.refusal or 'no training call of it ran to its end'}"
        if self.refusal:
            return f"{self.module}: placed, then run unplaced; {self.refusal}"
        gain = f"predicted {as_time(self.predicted_single_us)} on one device, {as_time(self.predicted_us)} placed"
        if self.measured_us is not None:
            gain += f"; measured {as_time(self.measured_us)} placed"
            if self.unplaced_us is not None:
                gain += f", {as_time(self.unplaced_us)} unplaced on one thread ({self.unplaced_us / self.measured_us:.2f} times)"
        verified = f"{self.verified_steps} verified (largest relative difference {self.max_rel_diff:.2g})"
        if self.why_whole:
            gain += f"; {self.why_whole}"
        left_out = f"; {self.unplaced_steps} steps of other shapes ran unplaced" if self.unplaced_steps else ""
        ops = " + ".join(map(str, self.num_ops))
        placed = f"{self.method}, {ops} ops on {', '.join(self.devices)}; {self.placed_steps} steps placed"
        return f"{self.module}: {placed}, {verified}{left_out}; {gain}"

    def __str__(self) -> str:
        lines = [self.line()]
        for device, ops, peak in zip(self.devices, self.num_ops, self.peak_memory_bytes, strict=True):
            lines.append(f"  {device}: {ops} ops, {as_size(peak)} at most (predicted)")
        if self.devices:
            lines.append(f"  moved: {self.transfers} tensors, {as_size(self.bytes_moved)} a step")
        return "\n".join([*lines, *(f"  note: {n}" for n in self.notes)])
