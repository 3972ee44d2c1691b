"""Profiling a captured TensorFlow step on the devices that will run it: RunMetadata of whole steps, op by op, beside steps that are not
traced.

Tracing makes ops slower, short ones by several times, and leaves out what the executor does between them. So a traced step only says how
its time is distributed; how much that is in all, a step says that was timed just before it and not traced.
"""

import contextlib
import platform
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from baechi_ext.capture.tensorflow_graph import CapturedFunction
from baechi_ext.capture.tensorflow_private import tensorflow
from baechi_ext.cost.profile import Contention, OpProfile, Profile
from baechi_runtime.host.host_memory import available_bytes
from baechi_runtime.report.progress import progress
from baechi_runtime.tensorflow.lowering.placed_graph import kernel_of, placed_graph
from baechi_runtime.tensorflow.servers.clocks import cpu_ns
from baechi_runtime.tensorflow.servers.devices import Devices, Servers
from baechi_runtime.tensorflow.servers.session import PlacedSession

if TYPE_CHECKING:
    from baechi_runtime.tensorflow.step import TensorFlowStep

CLOCK = "run_metadata"
FEWEST_REPEATS = 3


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    warmup: int = 2
    repeats: int = 8
    enough_seconds: float = 60.0
    """Once the steps have taken this long, FEWEST_REPEATS are enough: long steps need fewer to be told from noise."""


def profile(
    captured: CapturedFunction,
    step: "TensorFlowStep",
    devices: Devices,
    options: ProfileOptions = ProfileOptions(),  # noqa: B008 - frozen
    *,
    memory_bytes: int = 0,
) -> Profile:
    """The profile of every op on the first of `devices`: alone, and where there are more, while those run the step, too, each its own.

    The devices keep the settings (threads, cores, kernels) that the placed step will have. `memory_bytes` is what a step holds, where
    known: so many devices are kept at work as there is memory for. The step's own variables keep their values. Raises ExecutionError
    where a device fails or dies.
    """
    values = {v.shared_name: v.variable.numpy() for v in captured.variables}
    with _session(captured, devices, 0, values, step.inputs) as session:
        with progress(f"profiling {len(captured.graph)} ops, {options.warmup + options.repeats} steps"):
            alone = _steps(session, captured, devices, options)
        companions = _companions(devices, memory_bytes)
        beside: list[Traced] = []
        if companions:
            said = f"profiling beside {companions} other device{'s' * (companions > 1)} at work"
            with progress(said), _busy(captured, devices, companions, values, step.inputs):
                beside = _steps(session, captured, devices, options)
    temporary = {op: max(t.temporary_bytes.get(op, 0) for t in alone) for op in captured.nodes}
    made = {op: max(t.output_bytes.get(op, 0) for t in alone) for op in captured.nodes}
    graph = captured.graph
    return Profile(
        graph_fingerprint=graph.fingerprint,
        op_digests=dict(zip(graph.index, graph.op_digests, strict=True)),
        clock=CLOCK,
        warmup=options.warmup,
        ops={
            op.id: OpProfile(
                samples_us=tuple(t.op_us[op.id] for t in alone),
                output_bytes=op.output_bytes or (made[op.id] if op.op != "ReadVariableOp" else 0),
                temporary_bytes=temporary[op.id],
                persistent_bytes=op.persistent_bytes,
                contended_us=tuple(t.op_us[op.id] for t in beside),
            )
            for op in graph.ops
        },
        metadata=_metadata(devices),
        contention=Contention(companions + 1, tuple(t.step_us for t in beside)) if beside else None,
    )


def _metadata(devices: Devices) -> dict[str, str]:
    return {
        "device": devices.names[0],
        "processor": platform.processor() or platform.machine(),
        "tensorflow": tensorflow().__version__,
        "python": platform.python_version(),
    }


def _session(
    captured: CapturedFunction, devices: Devices, device: int, values: Mapping[str, np.ndarray], inputs: Sequence[np.ndarray]
) -> PlacedSession:
    """The whole step on one device, ready to run."""
    session = PlacedSession(placed_graph(captured, dict.fromkeys(captured.nodes, device), devices.names), devices)
    try:
        session.initialise(values)
        session.run(inputs)
    except BaseException:
        session.close()
        raise
    return session


@dataclass(frozen=True)
class Traced:
    """One traced step, its times as in one that was not."""

    step_us: float
    op_us: Mapping[str, float]
    temporary_bytes: Mapping[str, int]
    output_bytes: Mapping[str, int]


def _steps(session: PlacedSession, captured: CapturedFunction, devices: Devices, options: ProfileOptions) -> list[Traced]:
    timed: list[tuple[float, float]] = []
    traces: list[Any] = []
    started = time.perf_counter()
    for repeat in range(options.warmup + options.repeats):
        if len(timed) >= FEWEST_REPEATS and time.perf_counter() - started > options.enough_seconds:
            break
        step, trace = _timed(session, devices), session.trace()
        if repeat >= options.warmup:
            timed.append(step)
            traces.append(trace)
    return [read_trace(t, captured, devices.names[0], us) for t, us in zip(traces, without_waits(timed), strict=True)]


def _timed(session: PlacedSession, devices: Devices) -> tuple[float, float]:
    """A step's wall time, and what the first device's process spent on its core; 0 where that is not known. Microseconds."""
    pid = devices.servers[0].process.pid if isinstance(devices, Servers) and devices.servers else None
    spent, begin = cpu_ns(pid) if pid else 0, time.perf_counter_ns()
    session.run()
    wall_ns = time.perf_counter_ns() - begin
    return wall_ns / 1000, (cpu_ns(pid) - spent) / 1000 if pid else 0.0


def without_waits(timed: Sequence[tuple[float, float]]) -> list[float]:
    """The device's own time for each step, from (wall time, time on the core): its time on the core, so that neither waiting for a core
    that another program has, nor the call from another process and its answer count; the wall time where there is no such clock."""
    return [min(wall_us, cpu_us) if cpu_us else wall_us for wall_us, cpu_us in timed]


def read_trace(metadata: Any, captured: CapturedFunction, device: str, step_us: float) -> Traced:
    """Reads the RunMetadata of a step that ran on one device; the times add up to `step_us`."""
    op_of = {node: op for op, nodes in captured.nodes.items() for node in nodes}
    us = dict.fromkeys(captured.nodes, 0.0)
    temporary: dict[str, int] = {}
    made: dict[str, int] = {}
    kernels: dict[str, str] = {}
    for stats in _stats(metadata, device):
        op = op_of.get(stats.node_name)
        if op is None:
            continue
        us[op] += stats.all_end_rel_nanos / 1000
        outputs = sum(output.tensor_description.allocation_description.requested_bytes for output in stats.output)
        peak = sum(memory.peak_bytes for memory in stats.memory)
        temporary[op] = max(temporary.get(op, 0), peak - outputs)
        if stats.node_name == op:
            made[op] = outputs
            kernels[op] = kernel_of(stats.timeline_label)
    _give_back_fused(us, kernels, captured)
    return Traced(step_us, as_untraced(us, step_us), temporary, made)


def _stats(metadata: Any, device: str) -> Iterable[Any]:
    """Statistics of a device's nodes; transfers are in an entry of the same name, and have no node's label."""
    for entry in metadata.step_stats.dev_stats:
        if entry.device == device:
            yield from (stats for stats in entry.node_stats if f"{stats.node_name} = " in stats.timeline_label)


def _give_back_fused(us: dict[str, float], kernels: Mapping[str, str], captured: CapturedFunction) -> None:
    """Where an op was fused into the one that reads it, such as a convolution into the addition of its bias, it gets the time back: with
    the two on different devices it takes nearly all of it."""
    graph = captured.graph
    for v, op in enumerate(graph.ops):
        if op.id in kernels:
            continue
        for w in graph.successors[v]:
            reader = graph.ops[w]
            kernel = kernels.get(reader.id, "")
            if op.op in kernel and reader.op not in kernel:
                us[op.id], us[reader.id] = us[op.id] + us[reader.id], 0.0
                break


def as_untraced(us: Mapping[str, float], step_us: float) -> dict[str, float]:
    """Times that add up to the step's: what the executor took between ops is shared out evenly, what tracing added is taken off in
    proportion."""
    total = sum(us.values())
    if total > step_us:
        return {op: each * step_us / total for op, each in us.items()}
    between = (step_us - total) / max(1, len(us))
    return {op: each + between for op, each in us.items()}


def _companions(devices: Devices, memory_bytes: int) -> int:
    """Number of other devices to keep at work; none where all are logical devices of one process, which share its threads."""
    others = len(devices.names) - 1 if isinstance(devices, Servers) else 0
    available = available_bytes()
    return others if available is None or not memory_bytes else max(0, min(others, int(available / memory_bytes) - 1))


@contextlib.contextmanager
def _busy(
    captured: CapturedFunction, devices: Devices, count: int, values: Mapping[str, np.ndarray], inputs: Sequence[np.ndarray]
) -> Iterator[None]:
    """While it is entered, devices 1 to `count` run the step over and over."""
    over = threading.Event()

    def work(session: PlacedSession) -> None:
        while not over.is_set():
            session.run()

    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(_session(captured, devices, device, values, inputs)) for device in range(1, count + 1)]
        workers = stack.enter_context(ThreadPoolExecutor(count))
        working = [workers.submit(work, session) for session in sessions]
        try:
            yield
        finally:
            over.set()
        for each in working:
            each.result()
