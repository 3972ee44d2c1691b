"""The report of a training step's calls, from the function that places them."""

from baechi_runtime.measure.samples import samples_by_name
from baechi_runtime.report.call_report import INTERRUPTED, CallReport, Verified
from baechi_runtime.tensorflow.calls.placed_function import PlacedFunction


def report_of(placed: PlacedFunction) -> CallReport:
    """The report of the function's first placed shape; the counts are of all shapes."""
    shapes, placement = list(placed.shapes.values()), placed.placement or placed.interrupted
    verifications = [shape.verification for shape in shapes]
    times = [us for shape in shapes[:1] for us in shape.step.times_us]
    unplaced = [us for verification in verifications[:1] for us in verification.unplaced_us[1:]]  # in the first one it is traced
    return CallReport(
        kind="step",
        name=placed.name,
        method=placed.settings.method,
        result=None if placement is None else placement.result,
        single=None if placement is None else placement.single,
        samples=samples_by_name(eager=unplaced, placed=times),
        verified=Verified(
            sum(v.steps for v in verifications),
            sum(s.count for s in shapes),
            max((v.steps for v in verifications), default=0),
            max((v.max_rel_diff for v in verifications), default=0.0),
            tuple(sorted(set().union(*(v.rounding for v in verifications)))),
        ),
        placed_steps=sum(s.count for s in shapes),
        shapes=len(shapes),
        unplaced_calls=dict(placed.unplaced),
        refusal=placed.refusal or (INTERRUPTED if placed.interrupted else ""),
        notes=() if placement is None else (*placement.result.notes, *placement.notes),
        fragments=len(shapes[:1]),
    )
