"""The order of the stages of `baechi compare --framework=tensorflow`: capture and profile once, then for every method place, load and
check; measure all in turn."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import tensorflow as tf

from baechi_ext.cost import scale_links
from baechi_ext.ir import Cluster
from baechi_ext.ir.files import make_folder
from baechi_ext.simulate import Timeline
from runtime import pipeline
from runtime.compare.comparison import Comparison
from runtime.compare.contender import SINGLE, CompareRequest, Contender, planned
from runtime.compare.files import keep
from runtime.program import one_device_timeline
from runtime.progress import progress, rounds
from runtime.run_folder import begin_run
from runtime.tensorflow.accounting import accounted_peak_bytes
from runtime.tensorflow.measure import WARMUP, measure, peak_bytes
from runtime.tensorflow.placed_function import draws_anew
from runtime.tensorflow.servers import Devices
from runtime.tensorflow.session import PlacedSession
from runtime.tensorflow.training import (
    Captured,
    capture_and_profile,
    check_parity,
    find_cluster,
    kind_of_executor,
    load,
    one_thread,
    open_devices,
    recorded,
    require_taken,
    serve,
    unplaced_step,
)
from runtime.train_request import TrainRequest


def compare(request: CompareRequest) -> Comparison | None:
    """Every method's plan, predicted and measured. None in a process that only serves.

    Raises what capture, profiling and link probing raise; what a method raises is its row's refusal.
    """
    train = request.train
    require_taken(train)
    if train.out is not None:
        make_folder(Path(train.out))
    if train.task_index > 0:
        return serve(train)
    one_thread()
    with ExitStack() as stack:
        devices = open_devices(train, stack)
        captured = capture_and_profile(train, devices[0])
        return compared(request, captured, devices, train.model, captured.function.notes)


def compared(
    request: CompareRequest, captured: Captured, devices: tuple[Devices, Devices], model: str, notes: Sequence[str]
) -> Comparison:
    """Every method's plan of a captured step, predicted and measured, and kept where files are."""
    train = request.train
    cluster, probe = find_cluster(train, devices[0])
    contenders = check_contenders(captured, scale_links(cluster, train.comm_cost_factor), devices, request.plans)
    sessions = sessions_of(captured, contenders, devices)
    where = {method: devices[method != SINGLE] for method in sessions}
    with progress(f"measuring {train.num_steps} steps of each of {len(sessions) + 1} variants") as show:
        told, unplaced = rounds(show, WARMUP + train.num_steps), unplaced_step(captured.step)
        measurement = measure(where, unplaced, sessions, num_steps=train.num_steps, on_step=told)
    comparison = Comparison(
        model=model,
        executor=f"TensorFlow, {kind_of_executor(train)}",
        contenders=tuple(contenders),
        measurement=measurement,
        single=one_device_timeline(captured.alone),
        peaks_measured_by="accounting" if devices[1].shared_memory else "allocator",
        notes=(*notes, *([] if probe is None else [f"probed link: {probe}"])),
        unplaced=f"tf.function, {_threads()}",
    )
    if train.out is not None:
        begin_run(Path(train.out))
        if comparison.recommended is not None:
            said = _recorded(train, captured, comparison.contender(comparison.recommended), devices)
            comparison = replace(comparison, notes=(*comparison.notes, *said))
        keep(Path(train.out), captured.graph, captured.profile, comparison, train.made_by)
    return comparison


def _threads() -> str:
    """How many of them compute an op of the unplaced step: one, unless a script chose otherwise."""
    count = tf.config.threading.get_intra_op_parallelism_threads()
    return "one thread" if count == 1 else f"{count} threads" if count else "a thread a core"


def _recorded(train: TrainRequest, captured: Captured, contender: Contender, devices: tuple[Devices, Devices]) -> tuple[str, ...]:
    """Writes measured.json of the contender's own plan. Of `single` that is not what was measured: a plan names one of all devices."""
    if contender.result is None:
        return ()
    timeline, there = contender.result.timeline, devices[contender.method != SINGLE]
    with load(captured, timeline, there) as session:
        return recorded(train, session, timeline, there)


def check_contenders(
    captured: Captured, cluster: Cluster, devices: tuple[Devices, Devices], plans: Mapping[str, pipeline.PlanRequest]
) -> list[Contender]:
    """Every method's plan, run and checked, one after the other: what is loaded besides holds constants, which a peak would count."""

    def check(contender: Contender) -> None:
        timeline, there = _where(captured, contender, devices)
        with load(captured, timeline, there) as session:
            if not draws_anew(captured.function):
                contender.parity = check_parity(captured, session)
            contender.peak_bytes = accounted_peak_bytes(session, timeline) if there.shared_memory else peak_bytes(session, there)

    return list(planned(captured.graph, cluster, plans, one_device_timeline(captured.alone), check))


def sessions_of(captured: Captured, contenders: Sequence[Contender], devices: tuple[Devices, Devices]) -> dict[str, PlacedSession]:
    """What is measured, loaded, by method."""
    return {c.method: load(captured, *_where(captured, c, devices)) for c in contenders if not c.refusal}


def _where(captured: Captured, contender: Contender, devices: tuple[Devices, Devices]) -> tuple[Timeline, Devices]:
    """What runs, and where: `single` as one device's program on the first devices, all else on the second, whose memory may be limited."""
    if contender.method == SINGLE or contender.result is None:
        return one_device_timeline(captured.alone), devices[0]
    return contender.result.timeline, devices[1]
