"""What placing a user's training step gained: predicted, and measured in the user's own loop."""

from dataclasses import asdict, dataclass
from typing import Any

from baechi_ext.ir.files import SCHEMA_VERSION
from runtime.samples import Samples
from runtime.script_report import INTERRUPTED, TimedCalls, measured_json, samples_of
from runtime.tables import as_size, as_time
from runtime.tensorflow.placed_function import PlacedFunction


@dataclass(frozen=True)
class FunctionReport(TimedCalls):
    """A placed training step; `refusal` says why its calls run unplaced, where they do."""

    step: str
    method: str
    devices: tuple[str, ...]
    num_ops: tuple[int, ...]
    """On each device."""
    predicted_us: float | None
    predicted_single_us: float | None
    placed: Samples | None
    """The last steps that were neither verified nor recorded."""
    unplaced: Samples | None
    """The verified steps as they are, with the program's own threads; None where there was only the one that it was traced in."""
    peak_memory_bytes: tuple[float, ...]
    """Predicted, of each device."""
    bytes_moved: float
    placed_steps: int
    unplaced_steps: int
    shapes: int
    verified_steps: int
    max_rel_diff: float
    rounding: tuple[str, ...]
    """What rounding alone decides, and so may differ."""
    refusal: str
    notes: tuple[str, ...]

    @classmethod
    def of(cls, placed: PlacedFunction) -> "FunctionReport":
        shapes, placement = list(placed.shapes.values()), placed.placement or placed.interrupted
        times = [us for shape in shapes[:1] for us in shape.step.times_us]
        unplaced = [us for shape in shapes[:1] for us in shape.verification.unplaced_us[1:]]
        timeline = None if placement is None else placement.result.timeline
        return cls(
            step=placed.name,
            method=placed.settings.method,
            devices=() if timeline is None else tuple(d.name for d in timeline.cluster.devices),
            num_ops=() if timeline is None else tuple(map(len, timeline.device_order())),
            predicted_us=None if timeline is None else timeline.makespan_us,
            predicted_single_us=None if placement is None else placement.single.makespan_us,
            placed=samples_of(times),
            unplaced=samples_of(unplaced),
            peak_memory_bytes=() if timeline is None else tuple(timeline.peak_memory_bytes),
            bytes_moved=0 if timeline is None else timeline.bytes_moved,
            placed_steps=sum(s.count for s in shapes),
            unplaced_steps=placed.unplaced,
            shapes=len(shapes),
            verified_steps=sum(s.verification.steps for s in shapes),
            max_rel_diff=max((s.verification.max_rel_diff for s in shapes), default=0.0),
            rounding=tuple(sorted(set().union(*(s.verification.rounding for s in shapes)))),
            refusal=placed.refusal or (INTERRUPTED if placed.interrupted else ""),
            notes=() if placement is None else (*placement.result.notes, *placement.notes),
        )

    def to_json(self) -> dict[str, Any]:
        said = {name: value for name, value in asdict(self).items() if name not in ("placed", "unplaced")}
        return {"schema_version": SCHEMA_VERSION, **said, "measured_step_us": measured_json(self.unplaced, self.placed)}

    def line(self) -> str:
        """One line: what was placed and what it gained, or why not."""
        if self.refusal and not self.placed_steps:
            return f"{self.step}: not placed; {self.refusal}{self._predicted()}"
        if not self.placed_steps:
            return f"{self.step}: not placed; it was not called"
        if self.refusal:
            return f"{self.step}: placed for {self.placed_steps} steps, then run unplaced; {self.refusal}"
        ops = " + ".join(map(str, self.num_ops))
        verified = f"{self.verified_steps} verified (largest relative difference {self.max_rel_diff:.2g}"
        verified += f"; rounding decides {len(self.rounding)} variables)" if self.rounding else ")"
        left_out = f"; {self.unplaced_steps} steps of other shapes ran unplaced" if self.unplaced_steps else ""
        gain = self._predicted()
        if self.measured_us is not None:
            gain += f"; measured {as_time(self.measured_us)} placed"
            if self.unplaced_us is not None:
                gain += f", {as_time(self.unplaced_us)} unplaced ({self.unplaced_us / self.measured_us:.2f} times)"
        placed = f"{self.method}, {ops} ops on {', '.join(self.devices)}; {self.placed_steps} steps placed"
        return f"{self.step}: {placed}, {verified}{left_out}{gain}"

    def _predicted(self) -> str:
        if self.predicted_us is None:
            return ""
        return f"; predicted {as_time(self.predicted_single_us)} on one device, {as_time(self.predicted_us)} placed"

    def __str__(self) -> str:
        lines = [self.line()]
        for device, ops, peak in zip(self.devices, self.num_ops, self.peak_memory_bytes, strict=True):
            lines.append(f"  {device}: {ops} ops, {as_size(peak)} at most (predicted)")
        return "\n".join([*lines, *(f"  note: {n}" for n in self.notes)])
