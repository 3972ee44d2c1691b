"""What is kept of a script's placed module: its files, and what its calls took."""

import statistics

from baechi_ext.ir.measured import MeasuredStep
from runtime.calls.blocks.placed_blocks import PlacedBlocks
from runtime.calls.blocks.placement import BlockPlan
from runtime.calls.call_report import CallReport
from runtime.calls.placed_calls import PlacedCall, PlacedCalls
from runtime.calls.placing import Placement
from runtime.calls.recording import RUNS, WARM_UP
from runtime.calls.workers import Workers
from runtime.run_folder import MEASURED
from runtime.samples import Noise
from runtime.script_folder import KeptStep
from runtime.script_report import INTERRUPTED, ScriptStep, samples_of
from runtime.step_recorder import clock_of
from runtime.training import kind_of_executor

UNPLACED = "eager, one thread"
"""What verified calls as they are are called."""
NO_BLOCKS = f"no {MEASURED}: blocks run the module's own code, whose ops are not recorded"


def kept_step(calls: PlacedCalls, script: str, noise: Noise) -> KeptStep | None:
    """Of the module's first placed shape, or of its blocks; of what an interrupted search had found of either; None where there is no plan.
    `script` is the script's name."""
    model = f"{type(calls.module).__name__} of {script}"
    if calls.calls:
        return _of_call(calls, calls.calls[0], model, noise)
    if calls.interrupted is not None:
        return _of_search(calls, calls.interrupted, model, noise)
    blocks = calls.other_way
    plan = None if blocks is None else blocks.plan or blocks.interrupted
    return None if blocks is None or plan is None else _of_blocks(blocks, plan, model, noise)


def _of_call(calls: PlacedCalls, first: PlacedCall, model: str, noise: Noise) -> KeptStep:
    placement, report = first.placement, CallReport.of(calls)
    executor = kind_of_executor(calls.settings.request)
    measured = _measured(calls, first, executor)
    step = ScriptStep(
        model=model,
        executor=executor,
        result=placement.result,
        single=placement.single,
        unplaced=report.unplaced,
        unplaced_name=UNPLACED,
        placed=report.placed,
        busy_us=_busy_us(calls, first),
        peak_bytes=() if measured is None or measured.memory is None else tuple(max(h.bytes for h in held) for held in measured.memory),
        parity={**first.verification.to_json(), "passed": not calls.refusal} if first.verification.steps else None,
        probe=placement.probe,
        noise=noise,
        notes=(*report.notes, *_notes(calls, first, measured)),
    )
    return KeptStep(placement.graph, placement.profile, placement.result.plan, measured, step.to_json())


def _of_search(calls: PlacedCalls, found: Placement, model: str, noise: Noise) -> KeptStep:
    """Of a search that was interrupted: no call ran placed."""
    step = ScriptStep(
        model=model,
        executor=kind_of_executor(calls.settings.request),
        result=found.result,
        single=found.single,
        unplaced=None,
        unplaced_name=UNPLACED,
        placed=None,
        busy_us=(),
        peak_bytes=(),
        parity=None,
        probe=found.probe,
        noise=noise,
        notes=(*found.result.notes, f"no {MEASURED}: {INTERRUPTED}"),
    )
    return KeptStep(found.graph, found.profile, found.result.plan, None, step.to_json(), interrupted=True)


def _busy_us(calls: PlacedCalls, first: PlacedCall) -> tuple[float, ...]:
    """A worker process knows its own times alone."""
    if isinstance(calls.settings.executor, Workers):
        return ()
    return tuple(statistics.median(column) for column in zip(*(times.busy_us for times in first.loaded.times), strict=True))


def _measured(calls: PlacedCalls, first: PlacedCall, executor: str) -> MeasuredStep | None:
    recorder = first.loaded.recorder
    if recorder is None:
        return None
    return recorder.measured(first.placement.graph, executor, clock_of(calls.settings.executor.devices[0]).name)


def _notes(calls: PlacedCalls, first: PlacedCall, measured: MeasuredStep | None) -> list[str]:
    """What else is to be said of a module's calls."""
    notes = []
    if first.loaded.recorder is not None and measured is None:
        notes.append(
            f"no {MEASURED}: {first.count} calls of the first shape ran placed, and of those behind {calls.settings.verify_steps} verified "
            f"ones and {WARM_UP} more, up to {RUNS} are recorded, if they have a backward pass"
        )
    if len(calls.calls) > 1:
        notes.append(f"{len(calls.calls)} shapes of its arguments are placed; this is the first one")
    if calls.refusal:
        notes.append(f"it runs unplaced now: {calls.refusal}")
    return notes


def _of_blocks(blocks: PlacedBlocks, placed: BlockPlan, model: str, noise: Noise) -> KeptStep:
    step = ScriptStep(
        model=model,
        executor="blocks on threads",
        result=placed.result,
        single=placed.single,
        unplaced=None,
        unplaced_name=UNPLACED,
        placed=samples_of([forward + backward for forward, backward in zip(*blocks.times, strict=False)]),
        busy_us=(),
        peak_bytes=(),
        parity=None,
        probe=None,
        noise=noise,
        notes=(*placed.result.notes, blocks.line(), NO_BLOCKS),
    )
    return KeptStep(placed.result.timeline.graph, None, placed.result.plan, None, step.to_json(), placed.result.interrupted)
