"""The plans of a script's call, loaded, checked and measured in turn beside the call as it is: on threads, or on worker processes that all
run the script."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from baechi_ext.cost import Profile, attach_costs, scale_links
from baechi_ext.errors import BaechiError, ParityError
from baechi_ext.ir import OpGraph
from baechi_ext.ir.measured import MeasuredStep
from baechi_ext.simulate import Timeline
from runtime.accounting import how_measured, measured_peak_bytes, require_room
from runtime.calls.compared_call import ComparedCall
from runtime.calls.parallelize import executor_of
from runtime.calls.phases import PhasedStep
from runtime.calls.placed_function import LoadedCall
from runtime.calls.placing import costs_of_call
from runtime.calls.recording import RUNS, WARM_UP, CallRecorder
from runtime.calls.recording_workers import recorder_on
from runtime.calls.workers import WorkerPhases, Workers, telling, told_placement
from runtime.compare.comparison import UNPLACED
from runtime.compare.contender import SINGLE, CompareRequest, Contender, planned
from runtime.executor import Executor
from runtime.links import LinkProbe
from runtime.measure import WARMUP, measure_in_turn
from runtime.processes.executor import ProcessExecutor
from runtime.program import one_device_timeline
from runtime.progress import progress, rounds
from runtime.run_folder import MEASURED
from runtime.samples import Measurement
from runtime.step_recorder import clock_of
from runtime.thread_executor import StepTimes, ThreadExecutor
from runtime.torch_devices import on_core_of
from runtime.training import devices_of, find_cluster, kind_of_executor

HANDED_OUT = (
    "with --workers=process a placed step hands outputs, gradients and buffers to every worker, which its prediction does not count; eager "
    "and single run in worker 0 alone and hand out nothing"
)
Run = Callable[[], Any]


@dataclass(frozen=True)
class Placed:
    """The call with its costs, and every method's plan of it."""

    graph: OpGraph
    """With the costs of devices beside others at work."""
    profile: Profile
    single: Timeline
    """The prediction for one device that works alone."""
    contenders: tuple[Contender, ...]
    probe: LinkProbe | None


@dataclass(frozen=True)
class Measured:
    """What came of it."""

    placed: Placed
    measurement: Measurement
    peaks_measured_by: str
    notes: tuple[str, ...] = ()
    recorded: MeasuredStep | None = None
    """A step of the method that is recommended, op by op, where it is to be kept."""


Recommended = Callable[[Measured], str | None]
"""The method to choose by what was measured."""


def on_threads(request: CompareRequest, compared: ComparedCall, recommended: Recommended) -> Measured:
    """All devices are threads of this process; eager runs in the caller's own, on the core of device 0."""
    train, call = request.train, compared.call
    executor = executor_of(devices_of(train), train.timeout_seconds)

    def load(contender: Contender, timeline: Timeline) -> None:
        contender.peak_bytes = measured_peak_bytes(executor, timeline, call.captured.binding, call.step)  # type: ignore[arg-type]
        require_room(executor.devices, timeline.cluster, contender.peak_bytes)
        loaded = _in_this_process(executor, timeline, compared)
        contender.parity = compared.parity(loaded, relaxed=train.relaxed_random)
        contender.loaded = partial(compared.placed, loaded)

    def eager() -> StepTimes:
        with on_core_of(executor.devices[0]):
            return _times(compared.plain)

    placed = _placed(request, compared, executor, load)
    steps = {UNPLACED: eager, **{c.method: partial(_times, c.loaded) for c in placed.contenders if c.loaded is not None}}
    measured = Measured(placed, _in_turn(request, executor, steps), how_measured(executor))
    chosen = _to_record(request, measured, recommended)
    return measured if chosen is None else _with_step(request, compared, executor, measured, chosen)


def on_workers(request: CompareRequest, compared: ComparedCall, workers: Workers, recommended: Recommended) -> Measured | None:
    """Every device is a worker, and all come here with the same call. Worker 0 decides and reports, for the others it is None.

    Raises ParityError where the workers came with different calls, ExecutionError where one fails.
    """
    compared.rewind()
    workers.agree_on(compared.call.captured, compared.call.step)
    if workers.group.rank:
        _take_part(request, compared, workers)
        return None
    try:
        with ProcessExecutor(workers.group, workers.devices) as executor:
            placed = _placed(request, compared, executor, lambda contender, timeline: None)
    except BaseException as e:
        workers.group.command({"error": str(e) if isinstance(e, BaechiError) else type(e).__name__})
        raise
    of_all = [c for c in placed.contenders if c.method != SINGLE and c.result is not None]
    workers.group.command({"plans": {c.method: telling(c.result) for c in of_all}})
    for contender in placed.contenders:
        if contender.result is not None:
            _check(request, compared, contender, workers, placed.single)
    steps = {UNPLACED: compared.plain, **{c.method: c.loaded for c in placed.contenders if c.loaded is not None}}
    workers.group.command({"steps": list(steps)})
    measurement = _in_turn(request, workers, {name: partial(_together, workers, name, run) for name, run in steps.items()})
    measured = Measured(placed, measurement, "none", (HANDED_OUT,))
    chosen = _to_record(request, measured, recommended)
    workers.group.command({"recorded": None if chosen is None else chosen.method})
    if chosen is None:
        return measured
    alone = chosen.method == SINGLE
    executor = executor_of(workers.devices[:1], workers.group.timeout_seconds) if alone else workers
    return _with_step(request, compared, executor, measured, chosen)


def _check(request: CompareRequest, compared: ComparedCall, contender: Contender, workers: Workers, single: Timeline) -> None:
    """Worker 0: loads a plan and checks what all workers make of it. A single device's program is this process's alone."""
    alone = contender.method == SINGLE
    try:
        if alone:
            loaded = _in_this_process(executor_of(workers.devices[:1], workers.group.timeout_seconds), single, compared)
        else:
            loaded = _on_all(workers, contender.result.timeline, compared)  # type: ignore[union-attr]
        contender.parity = compared.parity(loaded, relaxed=request.train.relaxed_random)
        contender.loaded = partial(compared.placed, loaded)
    except BaechiError as e:
        if not alone and not isinstance(e, ParityError):  # the others do not go on, either
            raise
        contender.refusal = str(e)


def _take_part(request: CompareRequest, compared: ComparedCall, workers: Workers) -> None:
    """Workers other than 0: what `on_workers` and `_check` need of them."""
    captured = compared.call.captured
    workers.follow(captured, compared.call.step)
    runs: dict[str, Run] = {}
    plans = workers.told()["plans"]
    timelines = {method: told_placement(captured, plan).result.timeline for method, plan in plans.items()}
    for method, timeline in timelines.items():
        loaded = _on_all(workers, timeline, compared)
        runs[method] = partial(compared.placed, loaded)
        compared.rewind()
        runs[method]()
    names = workers.told()["steps"]
    steps = {name: partial(_together, workers, name, runs.get(name, lambda: None)) for name in names}
    measure_in_turn(workers, steps, num_steps=request.train.num_steps)
    chosen = workers.told()["recorded"]
    if chosen in timelines:
        _record(workers, timelines[chosen], compared)


def _together(workers: Workers, name: str, run: Run) -> StepTimes:
    """A step that begins on all workers at once."""
    workers.agree("whose turn it is", (name,))
    return _times(run)


def _placed(
    request: CompareRequest, compared: ComparedCall, executor: Executor, load: Callable[[Contender, Timeline], None]
) -> Placed:
    """`load` is called with each contender and what runs it: of `single` the one-device program."""
    train, captured = request.train, compared.call.captured
    profile = costs_of_call(train, executor, captured, compared.call.step)
    graph = attach_costs(captured.graph, profile, contended=len(executor.devices) > 1)
    single = one_device_timeline(attach_costs(captured.graph, profile))
    cluster, probe = find_cluster(train, executor)

    def loading(contender: Contender) -> None:
        load(contender, single if contender.method == SINGLE or contender.result is None else contender.result.timeline)

    contenders = tuple(planned(graph, scale_links(cluster, train.comm_cost_factor), request.plans, single, loading))
    return Placed(graph, profile, single, contenders, probe)


def _in_this_process(executor: ThreadExecutor, timeline: Timeline, compared: ComparedCall) -> LoadedCall:
    call = compared.call
    return _loaded(compared, PhasedStep(executor, timeline, call.captured, replace(call.step, inputs=())))


def _on_all(workers: Workers, timeline: Timeline, compared: ComparedCall) -> LoadedCall:
    call = compared.call
    return _loaded(compared, workers.load(timeline, call.captured, replace(call.step, inputs=())))


def _loaded(compared: ComparedCall, phases: PhasedStep | WorkerPhases) -> LoadedCall:
    return LoadedCall(compared.call.captured, phases, compared.call.step.live, compared.call.home)


def _to_record(request: CompareRequest, measured: Measured, recommended: Recommended) -> Contender | None:
    """The contender of which a step is kept, where files are."""
    chosen = None if request.train.out is None else recommended(measured)
    return next((c for c in measured.placed.contenders if c.method == chosen), None)


def _with_step(
    request: CompareRequest, compared: ComparedCall, executor: ThreadExecutor | Workers, measured: Measured, chosen: Contender
) -> Measured:
    """The same with a step of the contender."""
    timeline = measured.placed.single if chosen.method == SINGLE else chosen.result.timeline  # type: ignore[union-attr]
    with progress("recording a step op by op"):
        recorder = _record(executor, timeline, compared)
        clock = clock_of(executor.devices[0]).name
        recorded = recorder.measured(timeline.graph, kind_of_executor(request.train), clock)
    notes = [f"no {MEASURED}: a worker did not say what it noted"] if recorded is None else recorded.notes
    return replace(measured, recorded=recorded, notes=(*measured.notes, *notes))


def _record(executor: ThreadExecutor | Workers, timeline: Timeline, compared: ComparedCall) -> CallRecorder:
    """Runs the call until its recorder has all it records."""
    call = compared.call
    step = replace(call.step, inputs=())
    phases = (
        executor.load(timeline, call.captured, step)
        if isinstance(executor, Workers)
        else PhasedStep(executor, timeline, call.captured, step)
    )
    recorder = recorder_on(executor, phases, timeline, call.captured, step)
    loaded = replace(_loaded(compared, phases), recorder=recorder)
    for _ in range(WARM_UP + RUNS + 1):
        compared.rewind()
        compared.placed(loaded)
    return recorder


def _in_turn(request: CompareRequest, executor: Executor | Workers, steps: dict[str, Callable[[], StepTimes]]) -> Measurement:
    num_steps = request.train.num_steps
    with progress(f"measuring {num_steps} steps of each of {len(steps)} variants") as show:
        return measure_in_turn(executor, steps, num_steps=num_steps, on_step=rounds(show, WARMUP + num_steps))


def _times(run: Run) -> StepTimes:
    begin = time.perf_counter_ns()
    run()
    return StepTimes((time.perf_counter_ns() - begin) / 1000, ())
