"""The order of the stages of `baechi train --framework=tensorflow`: capture, profile, place, apply, check, measure, report."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from baechi_ext.capture.groups import Groups
from baechi_ext.capture.tensorflow_graph import CapturedFunction, capture_function
from baechi_ext.cost import Profile, attach_costs, scale_links
from baechi_ext.errors import ClusterError, ExecutionError, MismatchError, OptionError
from baechi_ext.ir import Cluster, Device, Link, OpGraph
from baechi_ext.ir.files import make_folder, require_writable, write_json
from baechi_ext.ir.made_by import signed
from baechi_ext.place.common import PlanResult
from baechi_ext.simulate import Timeline
from runtime import pipeline
from runtime.host_memory import usable_bytes
from runtime.links import LinkProbe
from runtime.parity_result import Parity
from runtime.program import one_device_timeline
from runtime.progress import progress, rounds
from runtime.report import StepReport
from runtime.run_folder import MEASURED, begin_run, best_until_then
from runtime.tables import search_news
from runtime.tensorflow.accounting import accounted_peak_bytes
from runtime.tensorflow.gpus import Gpus
from runtime.tensorflow.links import probe_link
from runtime.tensorflow.measure import WARMUP, measure, peak_bytes
from runtime.tensorflow.placed_graph import placed_graph
from runtime.tensorflow.profiler import CLOCK, profile
from runtime.tensorflow.servers import Devices, Logical, Servers, listens
from runtime.tensorflow.session import PlacedSession
from runtime.tensorflow.step import TensorFlowStep, build_step
from runtime.tensorflow.step_recorder import SEVERAL_HOSTS, record_step
from runtime.tensorflow.trained_session import TrainedSession
from runtime.tensorflow.verify import TOLERANCE, Verification, off_by_the_last_place, results_of
from runtime.train_request import TrainRequest
from runtime.training_run import RunOptions, RunReport, train_on

SLACK_BYTES = 64 * 1024 * 1024
"""What a step may take beyond its tensors: scratch memory of kernels, and what no tensor fits into any more."""
_POLL_SECONDS = 1.0
_MISSES = 3
"""Looks in a row in which the first host is not there, until it is taken to be done."""


@dataclass(frozen=True)
class Captured:
    """A real step, its costed graph, and what runs it."""

    step: TensorFlowStep
    function: CapturedFunction
    graph: OpGraph
    """With the costs of a device beside others at work, where there are others."""
    alone: OpGraph
    profile: Profile
    first: dict[str, np.ndarray]
    """The variables' first values."""

    @cached_property
    def unplaced(self) -> Callable[..., Any]:
        """The step as a tf.function of its own."""
        return tf.function(self.step.function)


def train(request: TrainRequest) -> StepReport | RunReport | Profile | None:
    """The report of a measured, placed step, or with `run` of a training; with `costgen` the profile, written to `cost_path`. None in a
    process that only serves.

    Raises what the stages raise: CaptureError, MismatchError, InfeasibleError, ParityError, ExecutionError, MissingBackendError; with
    `run` what train_on raises.
    """
    require_taken(request)
    if request.costgen:
        require_writable(request.costs_file)
    elif request.out is not None:
        make_folder(Path(request.out))
    if request.task_index > 0:
        return serve(request)
    one_thread()
    with ExitStack() as stack:
        devices, bound = open_devices(request, stack)
        captured = capture_and_profile(request, devices)
        if request.costgen:
            captured.profile.save(request.costs_file, request.made_by)
            return captured.profile
        cluster, probe = find_cluster(request, devices)
        result = planned(request, captured, scale_links(cluster, request.comm_cost_factor))
        if result.interrupted:
            raise KeyboardInterrupt(best_until_then(request.out))
        if request.run is None:
            report = run_plan(request, (devices, bound), captured, (result, probe))
        else:
            report = run_training(request, request.run, bound, captured, result)
    if request.out is not None:
        write_json(Path(request.out) / "report.json", signed(report.to_json(), request.made_by))
    return report


def require_taken(request: TrainRequest) -> None:
    """Raises OptionError for what is torch's alone."""
    for name in ("cuda_graphs", "use_free_memory", "relaxed_random"):
        if getattr(request, name):
            raise OptionError(f"--{name} is for --framework=torch; drop it")


def one_thread() -> None:
    """This process computes unplaced steps with one thread, as a device does."""
    with contextlib.suppress(RuntimeError):  # somebody used TensorFlow before; the pools are what they are
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)


def serve(request: TrainRequest) -> None:
    """Serves one of several hosts until the first one, which drives, is gone. Raises ExecutionError where it never comes."""
    hosts = request.cluster_hosts or ()
    limits = memory_limits(request)
    with Servers(len(hosts), limits, hosts=hosts, task=request.task_index, timeout_seconds=request.timeout_seconds) as servers:
        deadline, seen, misses = time.monotonic() + request.timeout_seconds, False, 0
        with progress(f"serving device {request.task_index} at {hosts[request.task_index]} for {hosts[0]}"):
            while misses < _MISSES:
                there = listens(hosts[0])
                seen, misses = seen or there, misses + 1 if seen and not there else 0
                if not seen and time.monotonic() > deadline:
                    waited = f"{hosts[0]}, which drives, did not come within {request.timeout_seconds:g} s"
                    raise ExecutionError(f"{waited}; start it, or raise --timeout")
                if gone := [server.ended() for server in servers.servers if server.ended()]:
                    raise ExecutionError(f"{gone[0]}; see whether the machine ran out of memory")
                time.sleep(_POLL_SECONDS)


def memory_limits(request: TrainRequest) -> list[int | None]:
    """What each server may allocate: what was asked for, if anything was, and some slack. A plan keeps to the machine's memory as well."""
    given: list[int | float | None] = [request.device_memory] * request.num_devices
    if request.device_memory is None and request.cluster is not None:
        given = [d.memory_bytes for d in request.cluster.devices]
    return [None if size is None else int(size) + SLACK_BYTES for size in given]


def open_devices(request: TrainRequest, stack: ExitStack) -> tuple[Devices, Devices]:
    """Where the step is profiled and runs on one device; and where it runs placed: the same, unless memory is limited."""
    seconds, count = request.timeout_seconds, request.num_devices
    if request.cuda:
        if request.split_gpu and request.device_memory is None:
            raise OptionError("--split_gpu needs to know what each part may hold; give --device_memory=SIZE")
        gpus = stack.enter_context(Gpus(count, part_bytes=request.device_memory if request.split_gpu else None, timeout_seconds=seconds))
        return gpus, gpus
    if request.workers == "thread":
        logical = stack.enter_context(Logical(count, timeout_seconds=seconds))
        return logical, logical
    limits, hosts = memory_limits(request), request.cluster_hosts
    with progress(f"starting {count} servers"):
        if hosts is not None:
            servers = stack.enter_context(Servers(count, limits, hosts=hosts, timeout_seconds=seconds))
            servers.await_hosts()
            return servers, servers
        if not any(limits):
            servers = stack.enter_context(Servers(count, timeout_seconds=seconds))
            return servers, servers
        # With a limit that none reaches: other kernels are chosen where there is one.
        free = stack.enter_context(Servers(count, [usable_bytes()] * count, timeout_seconds=seconds))
        return free, stack.enter_context(Servers(count, limits, timeout_seconds=seconds))


def capture(request: TrainRequest) -> tuple[TensorFlowStep, CapturedFunction, OpGraph]:
    """The model's step, its capture, and its graph without costs."""
    with progress(f"building {request.model}"):
        step = build_step(request.model, request.model_options, request.optimizer, request.learning_rate)
    with progress(f"capturing the training step of {request.model}"):
        kind = "GPU" if request.cuda else "CPU"
        function = capture_function(
            step.function, step.signature(), optimizer=step.optimizer, expert=step.expert, name=request.model, device_type=kind
        )
    graph = with_gradients_beside(function.graph) if request.colocate_grads_with_ops else function.graph
    return step, replace(function, graph=graph), graph


def with_gradients_beside(graph: OpGraph) -> OpGraph:
    """Each backward and update op in the colocation group of its forward op."""
    groups = Groups()
    for v, op in enumerate(graph.ops):
        if op.colocation is not None:
            groups.join(v, op.colocation)
        if op.forward_op is not None:
            groups.join(v, graph.index[op.forward_op])
    labels = groups.labels(graph.ops)
    return graph.replace_ops([replace(op, colocation=label) for op, label in zip(graph.ops, labels, strict=True)])


def capture_and_profile(request: TrainRequest, devices: Devices) -> Captured:
    """The model's step, captured, with costs read from `cost_path` or measured on device 0; first of all with the hints it needs."""
    step, function, graph = capture(request)
    if not request.costgen:
        pipeline.prepared(graph, request.plan, short_names(devices))
    if request.cost_path is not None and not request.costgen:
        costs = Profile.load(request.cost_path, graph)
        if costs.clock != CLOCK:
            raise MismatchError(
                f"{request.cost_path}: the costs are of the clock {costs.clock!r}, TensorFlow's are of {CLOCK!r}; profile with --costgen"
            )
    else:
        costs = profile(function, step, devices)
    together = attach_costs(graph, costs, contended=len(devices.names) > 1)
    first = {v.shared_name: v.variable.numpy() for v in function.variables}
    return Captured(step, function, together, attach_costs(graph, costs), costs, first)


def short_names(devices: Devices) -> list[str]:
    """As reports and pins call them: cpu:0, cpu:1, ..."""
    kind = "gpu" if isinstance(devices, Gpus) else "cpu"
    return [f"{kind}:{i}" for i in range(len(devices.names))]


def find_cluster(request: TrainRequest, devices: Devices) -> tuple[Cluster, LinkProbe | None]:
    """The devices as the placer sees them, and the link probe where one was needed.

    Raises ClusterError where a given cluster has another number of devices.
    """
    names, probe, cluster = short_names(devices), None, request.cluster
    if cluster is not None and len(cluster) != len(names):
        raise ClusterError(f"the cluster file has {len(cluster)} devices and the run {len(names)}; give --num_devices={len(cluster)}")
    if cluster is None:
        link = request.link or Link()
        if request.link is None and len(names) > 1:
            with progress(f"probing the link {names[0]} -> {names[1]}"):
                probe = probe_link(devices, 0, 1)
            link = probe.to_link()
        held = None if isinstance(devices, Gpus) else usable_bytes() // len(names)
        cluster = Cluster(tuple(Device(name, held) for name in names), link, parallel_transfers=isinstance(devices, Logical))
    sizes = [request.device_memory or d.memory_bytes for d in cluster.devices]
    limited = [None if size is None else int(size * request.memory_fraction) for size in sizes]
    held = tuple(replace(d, memory_bytes=size) for d, size in zip(cluster.devices, limited, strict=True))
    return replace(cluster, devices=held), probe


def planned(request: TrainRequest, captured: Captured, cluster: Cluster) -> PlanResult:
    """The plan, kept in `out` with graph and profile; the best one so far where its search was interrupted."""
    with progress(pipeline.announcement(captured.graph, cluster, request.plan)) as show:
        result = pipeline.plan(captured.graph, cluster, request.plan.watched(lambda search: show(search_news(search))))
    result = pipeline.whole_if_faster(result, captured.graph, cluster, request.plan, one_device_timeline(captured.alone))
    if request.out is not None:
        begin_run(Path(request.out))
        (captured.graph if result.splits else captured.alone).save(Path(request.out) / "graph.json", request.made_by)
        captured.profile.save(Path(request.out) / "profile.json", request.made_by)
        result.plan.save(Path(request.out) / "plan.json", request.made_by)
    if request.log_device_placement:
        placed = zip(captured.graph.ops, result.plan.placement, strict=True)
        sys.stderr.write("".join(f"{op.id} -> {cluster.devices[d].name}\n" for op, d in placed))
    return result


def load(captured: Captured, timeline: Timeline, devices: Devices) -> PlacedSession:
    """The step, placed as the timeline says, with its first values and inputs. Devices keep to its order."""
    graph = timeline.graph
    where = {op.id: d for op, d in zip(graph.ops, timeline.placement, strict=True)}
    order = [graph.ops[v].id for v in timeline.started]
    session = PlacedSession(placed_graph(captured.function, where, devices.names, order=order), devices)
    session.initialise(captured.first)
    session.feed(captured.step.inputs)
    return session


def check_parity(captured: Captured, session: PlacedSession) -> Parity:
    """One placed step beside one unplaced step from the same state: loss and every variable. Both begin anew afterwards.

    Raises ParityError where they differ by more than rounding explains.
    """
    step, variables = captured.step, {v.shared_name: v.variable for v in captured.function.variables}

    def unplaced(change: int | None = None) -> dict[str, np.ndarray]:
        given = {n: x if change is None else off_by_the_last_place(x, change) for n, x in captured.first.items()}
        for name, variable in variables.items():
            variable.assign(given[name])
        inputs = [x if change is None else off_by_the_last_place(x, change) for x in step.inputs]
        results = results_of(captured.unplaced(*map(tf.constant, inputs)))
        after = {n: v.numpy() for n, v in variables.items()}
        for name, variable in variables.items():
            variable.assign(captured.first[name])
        return results | after

    with _as_captured():
        verification, expected = Verification(), unplaced()
        session.initialise(captured.first)
        actual = results_of(session.run()) | session.variables()
        session.initialise(captured.first)
        verification.compare(expected, actual, unplaced)
    differences = {n: float(np.abs(x.astype(np.float64) - actual[n]).max(initial=0.0)) for n, x in expected.items() if x.dtype.kind == "f"}
    worst = max(differences, key=differences.__getitem__, default="")
    return Parity(True, max(differences.values(), default=0.0), verification.max_rel_diff, worst, len(expected), TOLERANCE)


@contextlib.contextmanager
def _as_captured() -> Iterator[None]:
    """Traced now, a tf.function keeps its graph as it is, as placed ones do: rewriting would round in another way."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": before.get("disable_meta_optimizer", False)})


def run_plan(
    request: TrainRequest, devices: tuple[Devices, Devices], captured: Captured, placed: tuple[PlanResult, LinkProbe | None]
) -> StepReport:
    """Parity, peak memory and timing in turn of a plan. `devices`: for one device, and for the placed step."""
    (free, bound), (result, probe) = devices, placed
    timeline = result.timeline
    session = load(captured, timeline, bound)
    with progress("checking parity with the unplaced step"):
        parity = check_parity(captured, session)
    with progress("measuring peak memory"):
        peak = accounted_peak_bytes(session, timeline) if bound.shared_memory else peak_bytes(session, bound)
    single = one_device_timeline(captured.alone)
    sessions = {"single": load(captured, single, free), "placed": session}
    unplaced, where = unplaced_step(captured.step), {"single": free, "placed": bound}
    with progress(f"measuring {request.num_steps} steps of each variant") as show:
        told = rounds(show, WARMUP + request.num_steps)
        measurement = measure(where, unplaced, sessions, num_steps=request.num_steps, on_step=told)
    notes = [*_notes(request, captured, result, probe), *recorded(request, session, timeline, bound)]
    return StepReport(
        model=request.model,
        executor=kind_of_executor(request),
        result=result,
        single=single,
        parity=parity,
        measurement=measurement,
        measured_peak_bytes=peak,
        peak_measured_by="accounting" if bound.shared_memory else "allocator",
        probe=probe,
        notes=tuple(notes),
        unplaced="tf.function, one thread",
    )


def run_training(request: TrainRequest, run: RunOptions, devices: Devices, captured: Captured, result: PlanResult) -> RunReport:
    """Parity, and then the training that is asked for, on the devices."""
    training = {
        "model": request.model,
        "graph_fingerprint": captured.graph.fingerprint,
        "optimizer": request.optimizer,
        "learning_rate": request.learning_rate,
        "seed": request.model_options.seed,
        "devices": "gpu" if request.cuda else "cpu without oneDNN" if any(memory_limits(request)) else "cpu",
    }
    session = load(captured, result.timeline, devices)
    with progress("checking parity with the unplaced step"):
        parity = check_parity(captured, session)
    with progress(f"training {request.model} until step {run.steps}") as show:
        progressed = train_on(TrainedSession(session), run, training, show)
    notes = [*_notes(request, captured, result, None), *recorded(request, session, result.timeline, devices)]
    return RunReport(
        model=request.model,
        executor=kind_of_executor(request),
        result=result,
        parity=parity,
        progressed=progressed,
        checkpoint=run.checkpoint,
        notes=tuple(notes),
    )


def recorded(request: TrainRequest, session: PlacedSession, timeline: Timeline, devices: Devices) -> tuple[str, ...]:
    """Writes measured.json, where files are kept: a traced step behind the timed or trained ones. What is to be said of it."""
    if request.out is None:
        return ()
    with progress("recording a step op by op"):
        notes = () if request.cluster_hosts is None else (SEVERAL_HOSTS,)
        kind = kind_of_executor(request)
        step = record_step(session, timeline, kind, shared_memory=devices.shared_memory, notes=notes)
    step.save(Path(request.out) / MEASURED, request.made_by)
    return step.notes


def unplaced_step(step: TensorFlowStep) -> Callable[[], object]:
    """The user's own step, with all of TensorFlow's rewriting, on inputs that are in memory already."""
    function, inputs = tf.function(step.function), [tf.constant(x) for x in step.inputs]
    return lambda: [np.asarray(x) for x in tf.nest.flatten(function(*inputs))]


def kind_of_executor(request: TrainRequest) -> str:
    """What the report calls what runs the devices."""
    if request.cuda:
        return "one gpu split" if request.split_gpu else "gpus"
    if request.cluster_hosts is not None:
        return "servers of several hosts"
    return "logical devices" if request.workers == "thread" else "servers"


def _notes(request: TrainRequest, captured: Captured, result: PlanResult, probe: LinkProbe | None) -> Sequence[str]:
    notes = [*result.notes, *captured.function.notes]
    if request.plan.method in pipeline.SEARCHES and len(result.timeline.cluster) > 1 and not result.splits:
        notes.append(result.why_whole)
    if any(memory_limits(request)):
        notes.append("memory is limited, so oneDNN is off on the devices: it ends a process that runs out of memory")
    if request.comm_cost_factor != 1:
        factor = request.comm_cost_factor
        notes.append(f"--comm_cost_factor: planned and predicted with {factor:g} times the links' costs")
    if request.plan.cost_factor != 1:
        factor = request.plan.cost_factor
        notes.append(f"--cost_factor: planned with costs off by up to {factor:g} times, on purpose, and predicted with the right ones")
    if probe is not None:
        notes.append(f"probed link: {probe}")
    return notes
