"""The rows of a table of step times, whichever framework ran them."""

from collections.abc import Sequence
from typing import Any

from baechi_ext.place.common import PlanResult
from runtime.compare.contender import SINGLE, Contender
from runtime.samples import Measurement


def plans_of(contenders: Sequence[Contender]) -> dict[str, PlanResult]:
    """The plans by method, but that of one device, which is run by a program of its own."""
    return {c.method: c.result for c in contenders if c.method != SINGLE and c.result is not None and not c.refusal}


def rows(measurement: Measurement, plans: dict[str, PlanResult], single_us: float) -> list[dict[str, Any]]:
    """One row per variant."""
    table = []
    for name, samples in measurement.samples.items():
        plan = plans.get(name)
        predicted = single_us if name == "single" else plan.predicted_step_us if plan is not None else None
        table.append(
            {
                "variant": name,
                "predicted_us": predicted,
                "measured_us": samples.to_json(),
                "times_eager": measurement.ratio("eager", name).to_json(),
                "prediction_error": None if predicted is None else predicted / samples.median - 1,
                "transfers": 0 if plan is None else len(plan.timeline.transfers),
                "bytes_moved": 0 if plan is None else plan.timeline.bytes_moved,
                "lower_bound_us": None if plan is None else plan.lower_bound_us,
                "placement_seconds": None if plan is None else plan.placement_seconds,
                "busy_us": list(measurement.busy_us.get(name, ())),
            }
        )
    return table
