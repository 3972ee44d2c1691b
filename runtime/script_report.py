"""ScriptStep: what a placed step of a user's own script was predicted to take, and what its calls took; as JSON in the keys of StepReport.

The script's calls are not measured in turn with others. Those that are verified also run as they are, before the placed ones: they are what
the placed calls are compared with, by medians whose intervals hold together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baechi_ext.place.common import PlanResult
from baechi_ext.simulate import Timeline
from runtime.links import LinkProbe
from runtime.samples import NOISY_SPREAD, Noise, Ratio, Samples, enough_samples

_ERROR = 0.05
ENOUGH = enough_samples(_ERROR / 2)
"""With fewer samples of either kind an interval of the ratio tells nothing for sure."""
INTERRUPTED = "the search for its plan was interrupted"
"""Why a step is not placed of which there is a plan."""


@dataclass(frozen=True)
class ScriptStep:
    """A placed step of a script. Times are microseconds."""

    model: str
    executor: str
    result: PlanResult
    single: Timeline
    """The prediction for one device."""
    unplaced: Samples | None
    """Of the verified calls as they are, those that warm up left out."""
    unplaced_name: str
    """What that is called."""
    placed: Samples | None
    """Of the last placed calls that were neither verified nor recorded."""
    busy_us: tuple[float, ...]
    """Of each device in such a call, the medians; empty where that is not known."""
    peak_bytes: tuple[int, ...]
    """Of each device in a recorded call; empty where none was."""
    parity: Mapping[str, Any] | None
    """`passed`, `compared` (so many tensors) and `max_rel_diff`; None where no call was verified."""
    probe: LinkProbe | None
    noise: Noise
    notes: tuple[str, ...]
    peaks_measured_by: str = "accounting"

    @property
    def speedup(self) -> Ratio | None:
        """How many times faster than as it is; None where too few calls were timed for an interval."""
        if self.unplaced is None or self.placed is None or min(len(self.unplaced.us), len(self.placed.us)) < ENOUGH:
            return None
        return Ratio.unpaired(self.unplaced, self.placed, _ERROR)

    def doubts(self) -> list[str]:
        """Why nothing can be concluded from the times, one reason each; empty where something can."""
        found = self.noise.disturbances()
        unplaced, placed = (0 if samples is None else len(samples.us) for samples in (self.unplaced, self.placed))
        if unplaced < ENOUGH:
            found.append(f"fewer than {ENOUGH} unplaced calls were timed ({unplaced}; --verify_steps={ENOUGH + 1} makes it {ENOUGH})")
        if placed < ENOUGH:
            found.append(f"fewer than {ENOUGH} placed calls were timed ({placed})")
        if self.speedup is not None and self.speedup.spread > NOISY_SPREAD:
            found.append(f"the ratio's interval is {self.speedup.spread:.0%} wide (more than {NOISY_SPREAD:.0%})")
        return found

    def to_json(self) -> dict[str, Any]:
        """What stands in report.json (docs/files.md)."""
        result, timeline, speedup = self.result, self.result.timeline, self.speedup
        doubts = self.doubts()
        return {
            "model": self.model,
            "method": result.plan.method,
            "executor": self.executor,
            "num_devices": len(result.plan.cluster),
            "status": result.status,
            "parity": None if self.parity is None else dict(self.parity),
            "predicted_step_us": {"single": self.single.makespan_us, "placed": timeline.makespan_us},
            "measured_step_us": measured_json(self.unplaced, self.placed),
            "unplaced": self.unplaced_name,
            "speedup_over_eager": _json_of(speedup),
            "predicted_speedup": self.single.makespan_us / timeline.makespan_us if timeline.makespan_us else 1.0,
            "busy_us": {"predicted": list(timeline.busy_us), "measured": list(self.busy_us)},
            "peak_memory_bytes": {
                "predicted": list(timeline.peak_memory_bytes),
                "measured": list(self.peak_bytes),
                "measured_by": self.peaks_measured_by if self.peak_bytes else "none",
            },
            "lower_bound_us": result.lower_bound_us,
            "placement_seconds": result.placement_seconds,
            "transfers": len(timeline.transfers),
            "bytes_moved": timeline.bytes_moved,
            "link_probe": None if self.probe is None else self.probe.to_json(),
            "load_of_others": self.noise.load_of_others,
            "conclusive": not doubts,
            "doubts": doubts,
            "notes": list(self.notes),
        }


class TimedCalls:
    """What the report of a module's, or of a function's, placed calls knows of their times."""

    placed: Samples | None
    """The last calls that were neither verified nor recorded; None before the first one."""
    unplaced: Samples | None
    """Verified calls as they are; None without any that counts."""

    @property
    def measured_us(self) -> float | None:
        """The median of the placed calls."""
        return None if self.placed is None else self.placed.median

    @property
    def unplaced_us(self) -> float | None:
        """The median of the unplaced ones."""
        return None if self.unplaced is None else self.unplaced.median


def measured_json(unplaced: Samples | None, placed: Samples | None) -> dict[str, Any]:
    """`measured_step_us` of a placed step; null where nothing was timed."""
    return {"eager": _json_of(unplaced), "placed": _json_of(placed)}


def _json_of(value: Samples | Ratio | None) -> dict[str, Any] | None:
    return None if value is None else value.to_json()


def warm(us: Sequence[float]) -> Sequence[float]:
    """Without the first time, if there are others: that call found nothing in any cache."""
    return us[1:] or us


def samples_of(us: Sequence[float]) -> Samples | None:
    """None where there are none."""
    return Samples(tuple(us)) if us else None
