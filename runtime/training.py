"""The order of the stages of the main job, `baechi train`: capture, profile, place, simulate, apply, check, measure, report."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from baechi_ext import hybrid
from baechi_ext.capture.torch_joint import Binding, CaptureOptions, capture_joint
from baechi_ext.cost import Profile, attach_costs, scale_links
from baechi_ext.errors import ClusterError, ExecutionError, MismatchError, OptionError
from baechi_ext.hybrid.placer import HybridResult
from baechi_ext.hybrid.plan import HybridPlan
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.ir.files import make_folder, require_writable, write_json
from baechi_ext.ir.made_by import MadeBy, signed
from baechi_ext.place.common import PlanResult
from runtime import pipeline
from runtime.accounting import how_measured, measured_peak_bytes, require_room
from runtime.cluster import free_bytes, measured_cluster, notes_on, topology
from runtime.cuda.graphs import CudaRecorder
from runtime.cuda.split_gpu import split_gpu
from runtime.executor import Executor, LoadedStep
from runtime.hybrid.executor import NOT_KEPT, GroupedExecutor, GroupedStep
from runtime.links import LinkProbe
from runtime.measure import WARMUP, measure
from runtime.models.registry import make_step
from runtime.parity import check_parity
from runtime.parity_result import Parity, require_parity
from runtime.processes.executor import ProcessExecutor, follow
from runtime.processes.worker_group import WorkerGroup, worker_place
from runtime.profiler import ProfileOptions, profile_step
from runtime.program import one_device_timeline
from runtime.progress import progress, rounds
from runtime.report import StepReport
from runtime.run_folder import MEASURED, begin_run, best_until_then
from runtime.sharding.ops import sharding_of
from runtime.step import TrainingStep, optimizer_spec
from runtime.step_recorder import record_step
from runtime.tables import as_time, search_news
from runtime.thread_executor import ThreadExecutor
from runtime.torch_devices import TorchDevice, cpu_devices, cpu_workers, cuda_devices, cuda_workers
from runtime.train_request import TrainRequest
from runtime.trained_step import TrainedStep
from runtime.training_run import RunReport, train_on

T = TypeVar("T")


@dataclass(frozen=True)
class Captured:
    """A real step, its costed graph, and what runs it."""

    step: TrainingStep
    graph: OpGraph
    """With the costs of a device beside others at work, where there are others."""
    alone: OpGraph
    """With the costs of a device that works alone."""
    binding: Binding
    profile: Profile


def train(request: TrainRequest) -> StepReport | RunReport | Profile | None:
    """The report of a measured, placed step, or with `run` of a training; with `costgen` the profile, written to `cost_path`. None in a
    worker process that does not report (ranks other than 0).

    Raises what the stages raise: CaptureError, ProfileError, MismatchError, InfeasibleError, ParityError, ExecutionError,
    MissingBackendError where there are too few CUDA devices; with `run` what train_on raises.
    """
    if request.costgen:
        require_writable(request.costs_file)
    elif request.out is not None:
        make_folder(Path(request.out))
    return with_executor(request, partial(_drive, request))


def with_executor(request: TrainRequest, drive: Callable[[Executor], T]) -> T | None:
    """What `drive` returns for the executor of the request. In a worker group rank 0 drives; the others do as they are told and
    return None."""
    if request.workers == "thread":
        recorder = CudaRecorder if request.cuda_graphs else None
        with ThreadExecutor(devices_of(request), request.timeout_seconds, recorder) as executor:
            return drive(executor)
    rank, size = worker_place()
    if size != request.num_devices:
        raise ExecutionError(f"{size} workers were started for --num_devices={request.num_devices}; start one worker per device")
    devices = (cuda_workers if request.cuda else cpu_workers)(size)
    with WorkerGroup.join(request.timeout_seconds, devices[rank].torch_device) as group:
        # Now that torch.distributed has started its threads: they may run on any core, and only have to share this one where all are busy.
        devices[rank].enter()
        if group.rank == 0:
            with ProcessExecutor(group, devices) as executor:
                return drive(executor)
        _, graph, binding = capture(request)
        follow(group, devices[rank], graph, binding, lambda: build_step(request))
    return None


def devices_of(request: TrainRequest) -> list[TorchDevice]:
    """The devices that one process runs. Raises MissingBackendError where there are too few."""
    make = split_gpu if request.split_gpu else cuda_devices if request.cuda else cpu_devices
    return make(request.num_devices)


def _drive(request: TrainRequest, executor: Executor) -> StepReport | RunReport | Profile:
    captured = capture_and_profile(request, executor)
    if request.costgen:
        captured.profile.save(request.costs_file, request.made_by)
        return captured.profile
    cluster, probe = find_cluster(request, executor)
    cluster = scale_links(cluster, request.comm_cost_factor)
    result = _planned(request, captured, cluster)
    if request.out is not None:
        keep(Path(request.out), captured, result, request.made_by)
    if result.interrupted:
        raise KeyboardInterrupt(best_until_then(request.out))
    if request.log_device_placement:
        placed = zip(captured.graph.ops, result.plan.placement, strict=True)
        sys.stderr.write("".join(f"{op.id} -> {cluster.devices[d].name}\n" for op, d in placed))
    if isinstance(result.plan, HybridPlan):
        executor = _on_groups(request, executor, result)
    report = (run_plan if request.run is None else run_training)(request, executor, captured, (result, probe))
    if request.out is not None:
        write_json(Path(request.out) / "report.json", signed(report.to_json(), request.made_by))
    return report


def _planned(request: TrainRequest, captured: Captured, cluster: Cluster) -> PlanResult:
    graph = captured.graph
    sharding = None
    if request.plan.method == hybrid.METHOD:
        with progress(f"finding out how the layers of {request.model} split"):
            sharding = sharding_of(captured.step, graph)
    with progress(pipeline.announcement(graph, cluster, request.plan)) as show:
        watched = request.plan.watched(lambda search: show(search_news(search)))
        if sharding is not None:
            return pipeline.plan_hybrid(graph, cluster, watched, sharding)
        result = pipeline.plan(graph, cluster, watched)
    return pipeline.whole_if_faster(result, graph, cluster, request.plan, one_device_timeline(captured.alone))


def _on_groups(request: TrainRequest, executor: Executor, result: HybridResult) -> GroupedExecutor:
    """What runs a plan on groups of several devices. Raises OptionError where this run can't."""
    plan = result.plan
    groups = f"{len(plan.groups)} group{'s' * (len(plan.groups) > 1)} of {plan.group_size} devices"
    found = f"the best plan has {groups} and a predicted step of {as_time(result.predicted_step_us)} ({'; '.join(result.notes)})"
    if request.run is not None and request.run.checkpoint is not None:
        raise OptionError(f"{found}; {NOT_KEPT}")
    if request.cuda or not isinstance(executor, ProcessExecutor):
        raise OptionError(f"{found}; such a plan runs on CPU workers: add --workers=process, or choose --placement_method=auto")
    return GroupedExecutor(executor, result, plan)


def build_step(request: TrainRequest) -> TrainingStep:
    """The model's step with fresh weights: the same ones for the same request."""
    return make_step(request.model, request.model_options, optimizer_spec(request.optimizer, request.learning_rate))


def capture(request: TrainRequest) -> tuple[TrainingStep, OpGraph, Binding]:
    """The model's step, its graph without costs, and what runs it."""
    with progress(f"building {request.model}"):
        step = build_step(request)
    spec = step.optimizer
    options = CaptureOptions(spec.name, spec.slots, request.colocate_grads_with_ops, request.relaxed_random)
    with progress(f"capturing the training step of {request.model}"):
        graph, binding = capture_joint(step.module, step.inputs, options, request.model)
    return step, graph, binding


def capture_and_profile(request: TrainRequest, executor: Executor) -> Captured:
    """The model's step, captured, with costs read from `cost_path` or measured on device 0; first of all with the hints it needs."""
    topology(executor.devices)
    step, graph, binding = capture(request)
    if not request.costgen:
        pipeline.prepared(graph, request.plan, [d.name for d in executor.devices])
    if request.cost_path is not None and not request.costgen:
        profile = Profile.load(request.cost_path, graph)
        if profile.clock != executor.devices[0].clock_name:
            raise MismatchError(
                f"{request.cost_path}: the costs are of the clock {profile.clock!r}, this run's devices go by "
                f"{executor.devices[0].clock_name!r}; profile these devices with --costgen"
            )
    else:
        profile = profile_step(executor, graph, binding, step, ProfileOptions())
    together = attach_costs(graph, profile, contended=len(executor.devices) > 1)
    return Captured(step, together, attach_costs(graph, profile), binding, profile)


def find_cluster(request: TrainRequest, executor: Executor) -> tuple[Cluster, LinkProbe | None]:
    """The devices as the placer sees them, and the link probe where one was needed.

    Raises ClusterError where a given cluster has another number of devices than the executor.
    """
    cluster, probe = request.cluster, None
    if cluster is not None and len(cluster) != len(executor.devices):
        raise ClusterError(
            f"the cluster file has {len(cluster)} devices and the run {len(executor.devices)}; give --num_devices={len(cluster)}"
        )
    if cluster is None:
        cluster, probe = measured_cluster(executor, topology(executor.devices), request.link, threads=request.workers == "thread")
    if request.use_free_memory:
        free = zip(cluster.devices, free_bytes(executor.devices), strict=True)
        cluster = replace(cluster, devices=tuple(replace(d, memory_bytes=min(d.memory_bytes or size, size)) for d, size in free))
    limited = []
    for device in cluster.devices:
        size = request.device_memory or device.memory_bytes
        limited.append(replace(device, memory_bytes=None if size is None else int(size * request.memory_fraction)))
    return replace(cluster, devices=tuple(limited)), probe


def run_plan(
    request: TrainRequest, executor: Executor, captured: Captured, placed: tuple[PlanResult, LinkProbe | None]
) -> StepReport:
    """Parity, accounting and interleaved timing of a plan on the executor."""
    result, probe = placed
    step, binding, timeline = captured.step, captured.binding, result.timeline
    parity = _parity(request, executor, captured, result)
    with progress("accounting memory"):
        peak = measured_peak_bytes(executor, timeline, binding, step)
    require_room(executor.devices, timeline.cluster, peak)
    single = one_device_timeline(captured.alone)
    variants = {"single": executor.load(single, binding, step), "placed": executor.load(timeline, binding, step)}
    with progress(f"measuring {request.num_steps} steps of each variant") as show:
        measurement = measure(executor, step, variants, num_steps=request.num_steps, on_step=rounds(show, WARMUP + request.num_steps))
    notes = [*_notes(request, captured, result, parity), *recorded(request, captured, variants["placed"])]
    if probe is not None:
        notes.append(f"probed link: {probe}")
    notes += notes_on(executor.devices, variants["placed"])
    sent = variants["placed"].sent_bytes() if isinstance(variants["placed"], GroupedStep) else None
    return StepReport(
        model=request.model,
        executor=kind_of_executor(request),
        result=result,
        single=single,
        parity=parity,
        measurement=measurement,
        measured_peak_bytes=peak,
        peak_measured_by=how_measured(executor),
        probe=probe,
        notes=tuple(notes),
        sent_bytes=sent,
    )


def run_training(
    request: TrainRequest, executor: Executor, captured: Captured, placed: tuple[PlanResult, LinkProbe | None]
) -> RunReport:
    """Parity, and then the training that `request.run` asks for, on the executor."""
    if request.run is None:
        raise OptionError("there is no training to run; give --train_steps=N")
    result, _ = placed
    step, run = captured.step, request.run
    parity = _parity(request, executor, captured, result)
    training = {
        "model": request.model,
        "graph_fingerprint": captured.graph.fingerprint,
        "optimizer": step.optimizer.name,
        "learning_rate": step.optimizer.learning_rate,
        "seed": step.seed,
        "devices": executor.devices[0].torch_device.type,
    }
    loaded = executor.load(result.timeline, captured.binding, step)
    with progress(f"training {request.model} until step {run.steps}") as show:
        progressed = train_on(TrainedStep(loaded), run, training, show)
    notes = [*_notes(request, captured, result, parity), *recorded(request, captured, loaded), *notes_on(executor.devices, loaded)]
    return RunReport(
        model=request.model,
        executor=kind_of_executor(request),
        result=result,
        parity=parity,
        progressed=progressed,
        checkpoint=run.checkpoint,
        notes=tuple(notes),
    )


def _parity(request: TrainRequest, executor: Executor, captured: Captured, result: PlanResult) -> Parity:
    with progress("checking parity with the unplaced step"):
        if isinstance(executor, GroupedExecutor):
            parity = executor.check_parity(captured.step)
        else:
            parity = check_parity(executor, result.timeline, captured.binding, captured.step)
    if not request.relaxed_random:
        require_parity(parity)
    return parity


def recorded(request: TrainRequest, captured: Captured, placed: LoadedStep) -> list[str]:
    """Writes measured.json, where files are kept: steps beside the timed ones, or behind the trained ones. What is to be said of it."""
    if request.out is None:
        return []
    if request.cuda_graphs:
        return [f"no {MEASURED}: in CUDA graphs the ops can't be told apart; run without --cuda_graphs to see them"]
    with progress("recording a step op by op"):
        recording = record_step(placed, captured.binding)
    recording.measured(captured.graph, kind_of_executor(request)).save(Path(request.out) / MEASURED, request.made_by)
    return list(recording.notes)


def _notes(request: TrainRequest, captured: Captured, result: PlanResult, parity: Parity) -> list[str]:
    notes, binding = list(result.notes), captured.binding
    if request.relaxed_random and binding.seeded_ops:
        same = "all the same" if parity.passed else "so parity does not hold"
        notes.append(f"--relaxed_random: {len(binding.seeded_ops)} seeded ops draw numbers in no fixed order, {same}")
    if request.comm_cost_factor != 1:
        notes.append(f"--comm_cost_factor: planned and predicted with {request.comm_cost_factor:g} times the links' costs")
    if request.plan.cost_factor != 1:
        factor = request.plan.cost_factor
        notes.append(f"--cost_factor: planned with costs off by up to {factor:g} times, on purpose, and predicted with the right ones")
    return notes


def kind_of_executor(request: TrainRequest) -> str:
    """What the report calls what runs the devices."""
    if not request.cuda:
        return request.workers
    if request.workers == "process":
        return "cuda processes"
    return ("one gpu split" if request.split_gpu else "cuda streams") + " with graphs" * request.cuda_graphs


def keep(folder: Path, captured: Captured, result: PlanResult, made_by: MadeBy) -> None:
    """Writes graph.json, with the costs that the plan is predicted with, profile.json and plan.json."""
    begin_run(folder)
    graph = captured.graph if result.splits or isinstance(result.plan, HybridPlan) else captured.alone
    graph.save(folder / "graph.json", made_by)
    captured.profile.save(folder / "profile.json", made_by)
    result.plan.save(folder / "plan.json", made_by)
