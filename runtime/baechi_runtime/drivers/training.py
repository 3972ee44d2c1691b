"""`baechi train` of a built-in model: capture, profile, place, check, then measure steps, or train on: many steps, their losses,
checkpoints on the way, and going on from the last one."""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from baechi_ext.errors import BaechiError, CaptureError, CheckpointError, ExecutionError, OptionError
from baechi_ext.hybrid.plan import HybridPlan
from baechi_ext.ir import Cluster
from baechi_ext.ir.files import require_writable, write_json
from baechi_ext.ir.made_by import MadeBy, signed
from baechi_ext.place.common import PlanResult
from baechi_runtime.drivers.backend import Backend, Captured, PlacingBackend, Trained, TrainingBackend
from baechi_runtime.drivers.costing import KeptCosts
from baechi_runtime.drivers.pipeline import SEARCHES
from baechi_runtime.drivers.placement import Placement, log_device_placement, on_one_device, place_in_parts, rehearsed
from baechi_runtime.drivers.ranking import Engines, ranked
from baechi_runtime.drivers.train_request import RunOptions, TrainRequest
from baechi_runtime.files.checkpoint_folder import Checkpoint, CheckpointFolder
from baechi_runtime.files.run_folder import MEASURED, REPORT, begin_run, best_until_then, said_where_plans_are
from baechi_runtime.host.interrupts import finished_first
from baechi_runtime.measure.parity_result import Parity, require_parity
from baechi_runtime.measure.samples import Measurement
from baechi_runtime.measure.timing import WARMUP
from baechi_runtime.models.registry import effective_options
from baechi_runtime.report.findings import Findings
from baechi_runtime.report.progress import progress, rounds
from baechi_runtime.report.report import COMPILED, ParityCheck
from baechi_runtime.report.step_report import Progressed, RunReport, StepReport
from baechi_runtime.report.tables import as_time

if TYPE_CHECKING:
    from baechi_ext.hybrid.sharding import Sharding

_TO_CHECKPOINT_SECONDS = 2.5
"""Time for an interrupted step, and the checkpoint after it, to end. Longer ones are dropped."""
_OPTIONS = "options"
"""The field of a checkpoint's `training` for the model's options, not all of which its graph tells: the rate of dropout is in none."""
T = TypeVar("T")
S = TypeVar("S")
C = TypeVar("C", bound=Captured)
L = TypeVar("L")


SplitsOf = Callable[[Any], "Sharding"]
"""The ways to split the layers of a captured step, for plans on groups of devices."""


EnginesOf = Callable[[Any], Engines[Any, Any]]
"""The framework's own engines for the devices of a backend."""


class OnDevices(Protocol):
    """`on_devices` of a framework's backend module."""

    def __call__(self, request: TrainRequest, drive: Callable[[Any], T]) -> T | None:
        """The value of `drive` for the request's devices; None in a process that does not drive."""


def train(request: TrainRequest, on_devices: OnDevices, drive: Callable[[Any], Findings]) -> Findings | None:
    """The findings of `drive` for the request's devices, written to report.json where files are kept; None where another process reports.
    Raises what the two raise, and before anything is built CheckpointError where a checkpoint to go on from is damaged."""
    if request.costgen:
        require_writable(request.costs_file)
    if request.run is not None and request.run.resume and request.run.checkpoint is not None:
        CheckpointFolder(request.run.checkpoint).verify()
    found = on_devices(request, drive)
    if found is not None and request.out is not None and not request.costgen:
        write_json(Path(request.out) / REPORT, signed(found.to_json(), request.made_by))
    return found


def placed(
    backend: TrainingBackend[C, L],
    sharding_of: SplitsOf | None = None,
    engines_of: EnginesOf | None = None,
    planned: Placement | None = None,
) -> Findings:
    """The report of a measured, placed step, or with `run` of a training; with `costgen` the costs, written to `cost_path`. `sharding_of`
    is for `--placement_method=hybrid`; where there is `engines_of`, an engine may run the step; `planned`: a plan of the step with its
    whole batch that is made already.

    Raises what the stages raise: CaptureError, ProfileError, MismatchError, InfeasibleError, ParityError, ExecutionError,
    MissingBackendError where there are too few devices; with `run` what train_on raises.
    """
    request, captured = backend.request, backend.capture()
    if request.costgen:
        captured.profile.save(request.costs_file, request.made_by)
        return KeptCosts(captured.profile, request.costs_file)
    found = (planned.result.plan.cluster, None) if planned is not None else backend.cluster()
    sharding = None
    if sharding_of is not None:
        with progress(f"finding out how the layers of {request.model} split"):
            sharding = sharding_of(captured)
    whole, rehearse = captured, partial(rehearsed, backend)
    captured, placement = (whole, planned) if planned is not None else place_in_parts(backend, whole, found, sharding, rehearse)
    if request.out is not None:
        placement.save(Path(request.out), request.made_by)
    if placement.result.interrupted:
        raise KeyboardInterrupt(best_until_then(request.out))
    with said_where_plans_are(request.out):
        return _run(backend, whole, captured, placement, found[0], engines_of)


def _run(
    backend: TrainingBackend[C, L], whole: C, captured: C, placement: Placement, cluster: Cluster, engines_of: EnginesOf | None
) -> Findings:
    """Runs the plan, or the engine that is ahead of it."""
    request = backend.request
    if engines_of is not None:
        engines = engines_of(backend)
        engine, placement = ranked(whole, placement, cluster, engines, partial(rehearsed, backend, captured))
        if engine is not None:
            if request.compile:
                placement = placement.noting(f"{COMPILED} is not measured beside an engine; baechi compare --compile measures both")
            if request.out is not None:
                begin_run(Path(request.out))  # no plan is run
            return engines.run(whole, engine, placement)
    if request.log_device_placement:
        log_device_placement(placement)
    _require_single_devices(placement.result)
    if request.run is None:
        return _measured(backend, whole, captured, placement)
    return _trained(backend, captured, placement, request.run)


def _require_single_devices(result: PlanResult) -> None:
    """Raises OptionError where ops share groups of several devices: such a plan is predicted, simulated and kept, but not run."""
    plan = result.plan
    if isinstance(plan, HybridPlan):
        groups = f"{len(plan.groups)} group{'s' * (len(plan.groups) > 1)} of {plan.group_size} devices"
        raise OptionError(
            f"the best plan has {groups} and a predicted step of {as_time(result.predicted_step_us)} ({'; '.join(result.notes)}); "
            "a step on groups is planned only (--out keeps the plan): run --placement_method=auto, or --sharding=pase"
        )


def measured(backend: Backend[S, Any, L], captured: S, variants: Mapping[str, L], of: str) -> Measurement:
    """Real steps of loaded variants and of the unplaced step, in turn; `of` says to a person which these are."""
    steps = backend.request.num_steps
    with progress(f"measuring {steps} steps of {of}") as show:
        return backend.measure(captured, variants, steps, rounds(show, WARMUP + steps))


def _measured(backend: TrainingBackend[C, L], whole: C, captured: C, placement: Placement) -> StepReport:
    """Parity, memory and interleaved timing of a plan; `whole` is the step with its whole batch, `captured` the one that is placed."""
    request, timeline = backend.request, placement.result.timeline
    parity = _parity(backend, captured, placement)
    with progress("accounting memory"):
        peak = backend.peak_bytes(captured, timeline)
    placed = backend.load(captured, timeline)  # first: it may be loaded still
    variants = {"single": backend.load(whole, placement.single, alone=True), "placed": placed}
    notes = []
    if request.compile:
        try:
            with progress("compiling the unplaced step"):
                variants[COMPILED], _, note = backend.compiled(whole)
        except ExecutionError as e:
            note = f"{COMPILED} is not measured: {e}"
        notes.append(note)
    measurement = measured(backend, captured, variants, "each variant")
    notes += [*_notes(request, captured, placement, parity), *recorded(backend, captured, placed)]
    if placement.probe is not None:
        notes.append(f"probed link: {placement.probe}")
    return StepReport(
        **_about(backend, placement, parity),
        measurement=measurement,
        peak_bytes=peak,
        peaks_measured_by=backend.peaks_measured_by,
        probe=placement.probe,
        notes=(*notes, *dict.fromkeys(note for loaded in (placed, variants["single"]) for note in backend.notes(loaded))),
        unplaced=backend.unplaced,
    )


def _trained(backend: TrainingBackend[C, L], captured: C, placement: Placement, run: RunOptions) -> RunReport:
    """Parity, and then the training that is asked for."""
    request = backend.request
    parity = _parity(backend, captured, placement)
    training = {
        "model": request.model,
        "graph_fingerprint": captured.graph.fingerprint,
        "optimizer": request.optimizer,
        "learning_rate": request.learning_rate,
        "seed": request.model_options.seed,
        "devices": backend.arithmetic(),
        _OPTIONS: effective_options(request.model, request.model_options, request.framework),
    }
    if captured.microbatches is not None:
        training["microbatches"] = list(captured.microbatches)
    loaded = backend.load(captured, placement.result.timeline)
    with progress(f"training {request.model} until step {run.steps}") as show:
        progressed = train_on(backend.trained(loaded), run, training, show)
    notes = [*_notes(request, captured, placement, parity), *recorded(backend, captured, loaded), *backend.notes(loaded)]
    return RunReport(**_about(backend, placement, parity), progressed=progressed, checkpoint=run.checkpoint, notes=tuple(notes))


def _about(backend: TrainingBackend[C, L], placement: Placement, parity: Parity) -> dict[str, Any]:
    """The fields that both reports have."""
    step = {"result": placement.result, "single": placement.single, "parity": ParityCheck.of(parity)}
    return {"model": backend.request.model, "executor": backend.kind, **step}


def _parity(backend: TrainingBackend[C, L], captured: C, placement: Placement) -> Parity:
    with progress("checking parity with the unplaced step"):
        parity = backend.check(captured, placement.result.timeline)
    if parity is None:
        raise CaptureError(f"{backend.request.model} draws random numbers that no second run draws again, so nothing can be compared")
    if not backend.request.relaxed_random:
        require_parity(parity)
    return parity


def recorded(backend: PlacingBackend[C, L], captured: C, loaded: L) -> tuple[str, ...]:
    """Writes measured.json, where files are kept: a step beside the timed ones, or behind the trained ones. Returns notes on it."""
    request = backend.request
    if request.out is None:
        return ()
    try:
        with progress("recording a step op by op"):
            step = backend.record(captured, loaded)
    except CaptureError as e:
        return (f"no {MEASURED}: {e}",)
    step.save(Path(request.out) / MEASURED, request.made_by)
    return step.notes


def _notes(request: TrainRequest, captured: Captured, placement: Placement, parity: Parity) -> list[str]:
    result = placement.result
    notes = [*result.notes, *on_one_device(result.plan.cluster), *captured.notes]
    if request.plan.method in SEARCHES and len(result.timeline.cluster) > 1 and not result.splits:
        notes.append(result.why_whole)
    if request.relaxed_random and captured.seeded_ops:
        same = "all the same" if parity.passed else "so parity does not hold"
        notes.append(f"--relaxed_random: {captured.seeded_ops} seeded ops draw numbers in no fixed order, {same}")
    if request.comm_cost_factor != 1:
        notes.append(f"--comm_cost_factor: planned and predicted with {request.comm_cost_factor:g} times the links' costs")
    if request.plan.cost_factor != 1:
        factor = request.plan.cost_factor
        notes.append(f"--cost_factor: planned with costs off by up to {factor:g} times, on purpose, and predicted with the right ones")
    return notes


def train_on(placed: Trained, options: RunOptions, training: Mapping[str, Any], show: Callable[[str], None]) -> Progressed:
    """Trains until step `options.steps`: from the beginning, or with `resume` from the last checkpoint, if there is one.

    `training` says what is trained, and a checkpoint of anything else is refused; where it is empty no checkpoint can be kept. `show` takes
    news. Ctrl-C keeps a checkpoint of the step that it falls into, unless that takes long. Raises CheckpointError, FileError, OptionError
    where the checkpoint is of a later step, ExecutionError where a step fails or a loss is no number.
    """
    saver = _Saver(placed, options, training)
    found = saver.begin()
    losses = list(found.losses) if found else []
    step_us: list[float] = []
    try:
        with finished_first(_TO_CHECKPOINT_SECONDS) if options.checkpoint else nullcontext(bool) as interrupted:
            if found is None:
                placed.begin()
                saver.save(losses)
            while len(losses) < options.steps and not interrupted():
                loss, wall_us = placed.run()
                if not math.isfinite(loss):
                    raise ExecutionError(f"the loss of step {len(losses) + 1} is {loss}; choose a smaller --learning_rate")
                losses.append(loss)
                step_us.append(wall_us)
                show(f"step {len(losses)} of {options.steps}, loss {loss:.6g}")
                if len(losses) % options.checkpoint_every == 0 or len(losses) == options.steps or interrupted():
                    saver.save(losses)
            if interrupted():
                raise KeyboardInterrupt
    except BaechiError as e:
        if saver.folder is not None and saver.saved is None:  # it can't be used; no step was trained
            raise
        raise type(e)(f"{e}; {saver.advice(len(losses) + 1)}") from e
    except KeyboardInterrupt as e:
        raise KeyboardInterrupt(f"interrupted; {saver.advice(len(losses) + 1)}") from e
    return Progressed(tuple(losses), found.step if found else None, tuple(step_us), saver.saved)


def _flat(training: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of what is trained, with the model's options among them."""
    options = training.get(_OPTIONS)
    return {**{what: training[what] for what in training if what != _OPTIONS}, **options} if isinstance(options, Mapping) else training


class _Saver:
    """Writes and finds the checkpoints of one run; without a folder it does nothing."""

    def __init__(self, placed: Trained, options: RunOptions, training: Mapping[str, Any]) -> None:
        self.placed = placed
        self.options = options
        self.training = dict(training)
        self.folder = None if options.checkpoint is None else CheckpointFolder(options.checkpoint)
        self.saved: int | None = None

    def begin(self) -> Checkpoint | None:
        """The checkpoint to go on from, taken up; None where the run begins at the beginning."""
        if self.folder is None:
            return None
        self.folder.make()
        found = self.folder.last()
        if found is None:
            return None
        if not self.options.resume:
            raise OptionError(
                f"--checkpoint={self.folder.folder} holds checkpoints, the last of step {found.step}; add --resume to go on from it, "
                "or choose another folder"
            )
        self._require_same(found)
        self.placed.restore(found.folder, found.shards)
        self.placed.random_state = found.random_state
        self.saved = found.step
        return found

    def _require_same(self, found: Checkpoint) -> None:
        begun, here = _flat(found.training), _flat(self.training)
        if _OPTIONS not in found.training:  # of an earlier version
            here = {what: here[what] for what in self.training if what != _OPTIONS}
        for what in dict.fromkeys([*here, *begun]):
            given, own = begun.get(what), here.get(what)
            if given != own:
                raise CheckpointError(
                    f"{found.folder} is of another training: its {what} is {given!r}, here it is {own!r}; give the flags that it was "
                    "begun with, or another --checkpoint"
                )
        if found.step > self.options.steps:
            raise OptionError(f"{found.folder} is of step {found.step}, beyond --train_steps={self.options.steps}; ask for more steps")

    def save(self, losses: list[float]) -> None:
        if self.folder is None or self.saved == len(losses):
            return
        unfinished = self.folder.begin(len(losses))
        try:
            shards = self.placed.save(unfinished)
            state = self.placed.random_state
            about = {"step": len(losses), "training": self.training, "random_state": state, "losses": losses}
            about |= MadeBy(self.options.command).to_json()
            self.folder.complete(unfinished, about, shards)
        except BaseException:
            self.folder.drop(unfinished)
            raise
        self.saved = len(losses)

    def advice(self, step: int) -> str:
        """Advice on how to go on after an end in `step`."""
        if self.saved is None:
            return f"this was step {step}, and there is no checkpoint" + " (--checkpoint=DIR keeps some)" * bool(self.training)
        return f"this was step {step}: --resume goes on from the checkpoint of step {self.saved}"
