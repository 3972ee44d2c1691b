"""The report of a training step's calls, and the record that is kept of a script's step."""

from collections.abc import Iterator

from baechi_runtime.drivers.placement import Placement, on_one_device
from baechi_runtime.files.run_folder import MEASURED, KeptStep
from baechi_runtime.measure.parity_result import in_json
from baechi_runtime.measure.samples import Noise, samples_by_name
from baechi_runtime.measure.turns import PER_BLOCK, Turns
from baechi_runtime.report.call_report import INTERRUPTED, CallReport
from baechi_runtime.report.report import ParityCheck, Verified
from baechi_runtime.tensorflow.backend import kind_of_executor
from baechi_runtime.tensorflow.calls.placed_function import PlacedFunction
from baechi_runtime.tensorflow.calls.placing import opened, shared_devices
from baechi_runtime.tensorflow.measure import oversubscribed
from baechi_runtime.tensorflow.servers.step_recorder import WARM_UP, record_step

UNPLACED = "tf.function as it is"
"""The name, in reports, of steps that run as they are."""


def report_of(placed: PlacedFunction) -> CallReport:
    """The report of the function's first placed shape; the counts are of all shapes."""
    steps, placement = list(placed.steps.values()), placed.placement or placed.interrupted
    verifications, turns = [step.verification for step in steps], steps[0].turns if steps else Turns()
    return CallReport(
        kind="step",
        name=placed.name,
        method=placed.settings.request.plan.method,
        result=None if placement is None else placement.result,
        single=None if placement is None else placement.single,
        samples=samples_by_name(eager=turns.plain_us, placed=turns.placed_us),
        per_block=PER_BLOCK,
        noise=Noise(placed.load.share(), oversubscribed(opened())),
        verified=Verified(
            sum(v.steps for v in verifications),
            sum(s.calls for s in steps),
            max((v.steps for v in verifications), default=0),
            in_json(max((v.max_rel_diff for v in verifications), default=0.0)),
            sorted(set().union(*(v.rounding for v in verifications))),
        ),
        placed_steps=sum(s.calls for s in steps),
        shapes=len(steps),
        unplaced_calls=dict(placed.unplaced),
        refusal=placed.refusal or (INTERRUPTED if placed.interrupted else ""),
        notes=tuple(_notes(placement)),
        fragments=len(steps[:1]),
    )


def _notes(placement: Placement | None) -> Iterator[str]:
    if placement is not None:
        yield from (*placement.result.notes, *on_one_device(placement.result.plan.cluster), *placement.notes)


def kept_step(function: PlacedFunction, script: str, report: CallReport) -> KeptStep | None:
    """The step to keep: its first placed shape, or what an interrupted search had found of it; None where there is no plan. `script` is the
    script's name, `report` that of the function."""
    placement = function.placement or function.interrupted
    if placement is None:
        return None
    first, executor = next(iter(function.steps.values()), None), kind_of_executor(function.settings.request)
    measured = None
    if first is not None and first.traces:
        measured = record_step(first.session, placement.result.timeline, executor, first.traces)
    why = INTERRUPTED if function.interrupted else f"no step ran after the {WARM_UP} that follow the verified ones"
    missing = [] if measured is not None else [f"no {MEASURED}: {why}"]
    refused = [f"it runs as it is now: {function.refusal}"] if function.refusal else []
    verified = None if first is None or not first.verification.steps else first.verification.to_json()
    parity = None if verified is None else ParityCheck(**verified, passed=not function.differs)
    step = report.step(
        measured,
        model=f"{function.name} of {script}",
        executor=executor,
        unplaced=UNPLACED,
        parity=parity,
        probe=placement.probe,
        notes=(*report.notes, *refused, *missing),
        peaks_measured_by="accounting" if shared_devices(function.settings.request)[1].shared_memory else "allocator",
    )
    interrupted = function.interrupted is not None
    return KeptStep(placement.graph, placement.profile, placement.result.plan, measured, step.to_json(), interrupted)
