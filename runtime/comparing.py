"""The order of the stages of `baechi compare` with PyTorch: capture and profile once, then for every method place, load and check; measure
all in turn."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from baechi_ext.cost import scale_links
from baechi_ext.ir import Cluster
from baechi_ext.ir.files import make_folder
from runtime import pipeline
from runtime.accounting import how_measured, measured_peak_bytes, require_room
from runtime.cluster import notes_on
from runtime.compare.comparison import Comparison
from runtime.compare.contender import SINGLE, CompareRequest, Contender, planned
from runtime.compare.files import keep
from runtime.executor import Executor, LoadedStep
from runtime.measure import WARMUP, measure
from runtime.parity import check_parity
from runtime.parity_result import require_parity
from runtime.program import one_device_timeline
from runtime.progress import progress, rounds
from runtime.run_folder import begin_run
from runtime.training import Captured, capture_and_profile, find_cluster, kind_of_executor, recorded, with_executor


def compare(request: CompareRequest) -> Comparison | None:
    """Every method's plan, predicted and measured. None in a worker process that does not report.

    Raises what capture, profiling and link probing raise, and what one device's step does; what another method raises is its row's refusal.
    """
    if request.train.out is not None:
        make_folder(Path(request.train.out))
    return with_executor(request.train, partial(_drive, request))


def _drive(request: CompareRequest, executor: Executor) -> Comparison:
    train = request.train
    captured = capture_and_profile(train, executor)
    cluster, probe = find_cluster(train, executor)
    cluster = scale_links(cluster, train.comm_cost_factor)
    contenders = load_contenders(captured, cluster, executor, request.plans, relaxed=train.relaxed_random)
    variants = variants_of(contenders)
    with progress(f"measuring {train.num_steps} steps of each of {len(variants)} variants") as show:
        measurement = measure(executor, captured.step, variants, num_steps=train.num_steps, on_step=rounds(show, WARMUP + train.num_steps))
    notes = [note for loaded in [*variants.values()][-1:] for note in notes_on(executor.devices, loaded)]
    comparison = Comparison(
        model=train.model,
        executor=kind_of_executor(train),
        contenders=tuple(contenders),
        measurement=measurement,
        single=one_device_timeline(captured.alone),
        peaks_measured_by=how_measured(executor),
        notes=(*([] if probe is None else [f"probed link: {probe}"]), *notes),
    )
    if train.out is not None:
        begin_run(Path(train.out))
        if comparison.recommended is not None:
            said = recorded(train, captured, _as_planned(captured, comparison.contender(comparison.recommended), executor))
            comparison = replace(comparison, notes=(*comparison.notes, *said))
        keep(Path(train.out), captured.graph, captured.profile, comparison, train.made_by)
    return comparison


def load_contenders(
    captured: Captured, cluster: Cluster, executor: Executor, plans: Mapping[str, pipeline.PlanRequest], *, relaxed: bool = False
) -> list[Contender]:
    """Every method's plan, loaded and checked: it computes what the unplaced step does, unless random numbers are `relaxed`. Of `single` it
    is the one-device program."""
    single, step, binding = one_device_timeline(captured.alone), captured.step, captured.binding

    def load(contender: Contender) -> None:
        timeline = single if contender.method == SINGLE or contender.result is None else contender.result.timeline
        contender.parity = check_parity(executor, timeline, binding, step)
        if not relaxed:
            require_parity(contender.parity)
        contender.peak_bytes = measured_peak_bytes(executor, timeline, binding, step)
        require_room(executor.devices, timeline.cluster, contender.peak_bytes)
        contender.loaded = executor.load(timeline, binding, step)

    return list(planned(captured.graph, cluster, plans, single, load))


def _as_planned(captured: Captured, contender: Contender, executor: Executor) -> LoadedStep:
    """What runs the contender's own plan. Of `single` that is not what was measured: a plan names one of all devices."""
    if contender.method != SINGLE or contender.result is None:
        return contender.loaded
    return executor.load(contender.result.timeline, captured.binding, captured.step)


def variants_of(contenders: list[Contender]) -> dict[str, LoadedStep]:
    """What is measured, by method."""
    return {contender.method: contender.loaded for contender in contenders if contender.loaded is not None}
