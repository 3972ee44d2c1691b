"""The report of a session that places a module's calls, and the record that is kept of a script's module."""

import statistics
from collections import deque

from baechi_ext.capture.parts import NORMALISED
from baechi_ext.ir.measured import MeasuredStep
from baechi_runtime.drivers.placement import on_one_device
from baechi_runtime.files.run_folder import MEASURED, KeptStep
from baechi_runtime.measure.parity_result import in_json
from baechi_runtime.measure.recording import RUNS
from baechi_runtime.measure.samples import Noise, samples_by_name
from baechi_runtime.measure.timing import StepTimes
from baechi_runtime.measure.turns import PER_BLOCK
from baechi_runtime.report.call_report import INTERRUPTED, CallReport
from baechi_runtime.report.report import ParityCheck, Verified
from baechi_runtime.torch.backend import kind_of_executor
from baechi_runtime.torch.calls.fragments import PlacedGroup
from baechi_runtime.torch.calls.recording import WARM_UP
from baechi_runtime.torch.calls.session import Session
from baechi_runtime.torch.calls.workers import Workers
from baechi_runtime.torch.measure import oversubscribed

UNPLACED = "the script unplaced"
"""The name of steps in which the module's call runs unplaced."""


def report_of(session: Session) -> CallReport:
    """The report of the session's first placed group, or of what its interrupted search had found; the counts are of all groups."""
    placed = [f for f in session.fragments if f.count]
    first = session.groups[0] if session.groups else None
    placement = session.interrupted if first is None else first.placement
    notes = [] if placement is None else [*placement.result.notes, *on_one_device(placement.result.plan.cluster), *placement.notes]
    if first is not None:
        notes += [first.note, first.captured.why_whole and f"the batch stays whole: {first.captured.why_whole}"]
        notes += [was.note for f in first.members if (was := f.noted()) is not None]
        notes += [NORMALISED] * any(part.normalised for part in first.captured.fragments)
    return CallReport(
        kind="module",
        name=session.name,
        method=session.settings.request.plan.method if placement is None else placement.result.plan.method,
        result=None if placement is None else placement.result,
        single=None if placement is None else placement.single,
        samples={} if first is None else samples_by_name(eager=first.turns.plain_us, placed=first.turns.placed_us),
        per_block=PER_BLOCK,
        on_one_core=_has_workers(session),
        noise=Noise(None if session.load is None else session.load.share(), oversubscribed(session.settings.executor.devices)),
        verified=Verified(
            sum(f.verification.steps for f in placed),
            sum(f.count for f in placed),
            max((f.verification.last for f in placed), default=0),
            in_json(max((f.verification.max_rel_diff for f in placed), default=0.0)),
            tolerance=max((f.verification.allowed for f in placed), default=0.0),
        ),
        placed_steps=session.placed_calls or max((g.calls for g in session.groups), default=0),
        shapes=len(session.groups),
        unplaced_calls=dict(session.unplaced),
        refusal=session.refusal or (INTERRUPTED if session.interrupted else ""),
        notes=tuple(dict.fromkeys(filter(None, notes))),
        fragments=0 if first is None else len(first.members),
        parts=() if first is None else first.captured.parts,
        setup_seconds=session.log.seconds + sum(g.setup_seconds for g in session.groups),
        graph_breaks=tuple(session.log.breaks),
        recompiles=tuple(session.log.recompiles),
    )


def kept_step(session: Session, script: str, report: CallReport) -> KeptStep | None:
    """The record of the module's first placed call, or of what its interrupted search had found; None if there is no plan. `script` is the
    script's name, `report` that of the session."""
    group = session.groups[0] if session.groups else None
    placement = session.interrupted if group is None else group.placement
    if placement is None:
        return None
    executor = kind_of_executor(session.settings.request)
    measured = None if group is None else _measured(group, executor)
    step = report.step(
        measured,
        model=f"{session.name} of {script}",
        executor=executor,
        parity=None if group is None else _parity(group),
        measurement=report.measurement(() if group is None else _busy_us(session, group)),
        peaks_measured_by="accounting",
        probe=placement.probe,
        unplaced=f"{UNPLACED}{', on one core' * report.on_one_core}",
        notes=(*report.notes, *([f"no {MEASURED}: {INTERRUPTED}"] if group is None else _notes(session, group, measured))),
    )
    return KeptStep(placement.graph, placement.profile, placement.result.plan, measured, step.to_json(), interrupted=group is None)


def _has_workers(session: Session) -> bool:
    return isinstance(session.settings.executor, Workers)


def _parity(group: PlacedGroup) -> ParityCheck | None:
    """The parity of the calls of the fragment that differs most; None where none was verified."""
    known = [f.verification for f in group.members if f.verification.steps or f.verification.differed]
    worst = max(known, key=lambda verification: (verification.differed, verification.max_rel_diff), default=None)
    return None if worst is None else ParityCheck(**worst.to_json(), passed=not worst.differed)


def _busy_us(session: Session, group: PlacedGroup) -> tuple[float, ...]:
    """Median busy times by device; empty with worker processes, as each knows its own times alone."""
    if _has_workers(session):
        return ()
    busy = [[statistics.median(column) for column in zip(*(t.busy_us for t in times), strict=True)] for times in _times(group)]
    return tuple(map(sum, zip(*busy, strict=True)))


def _times(group: PlacedGroup) -> list[deque[StepTimes]]:
    return [was.times for f in group.members if (was := f.noted()) is not None and was.times]


def _measured(group: PlacedGroup, executor: str) -> MeasuredStep | None:
    was = group.first.noted()
    recorder = None if was is None else was.recorder
    return None if recorder is None else recorder.measured(group.placement.graph, executor)


def _notes(session: Session, group: PlacedGroup, measured: MeasuredStep | None) -> list[str]:
    """Further notes on a module's calls."""
    notes = []
    if session.settings.record and measured is None:
        several = len(group.members) > 1
        why = "its call is of several fragments, with Python between them" if several else (
            f"{group.calls} calls of the first shape ran placed, and of those that are not verified, after {WARM_UP} to warm up, up to "
            f"{RUNS} are recorded, if they have a backward pass"
        )  # fmt: skip
        notes.append(f"no {MEASURED}: {why}")
    if len(session.groups) > 1:
        notes.append(f"{len(session.groups)} variants of its call are placed; this is the first one")
    if session.refusal:
        notes.append(f"it runs as it is now: {session.refusal}")
    return notes
