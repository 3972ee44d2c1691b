"""Profiling a captured TensorFlow step on the devices that will run it: RunMetadata of whole steps, op by op, beside steps that are not
traced.

Tracing makes ops slower, short ones by several times, and leaves out what the executor does between them. So a traced step only says how
its time is distributed; how much that is in all, a step says that was timed just before it and not traced.
"""

import platform
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from baechi_ext.capture.tensorflow_graph import CapturedFunction
from baechi_ext.capture.tensorflow_private import tensorflow
from baechi_ext.cost.profile import Contention, OpProfile, Profile
from baechi_runtime.host.processor import processor
from baechi_runtime.measure.timing import StepTimes
from baechi_runtime.report.progress import progress
from baechi_runtime.tensorflow.lowering.placed_graph import placed_graph
from baechi_runtime.tensorflow.measure import timed_step
from baechi_runtime.tensorflow.servers.devices import Devices
from baechi_runtime.tensorflow.servers.session import PlacedSession
from baechi_runtime.tensorflow.servers.traces import CLOCK, kernel_of, node_stats

FEWEST_REPEATS = 3
_IN_PARTS = ("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase")
"""Kinds of ops that run as the ops of their bodies and branches."""


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    warmup: int = 2
    repeats: int = 8
    enough_seconds: float = 60.0
    """Once the steps have taken this long, FEWEST_REPEATS are enough: long steps need fewer to be told from noise."""


def profile(
    captured: CapturedFunction,
    inputs: Sequence[np.ndarray],
    devices: Devices,
    options: ProfileOptions = ProfileOptions(),  # noqa: B008 - frozen
) -> Profile:
    """The profile of every op on the first of `devices`: alone, and where there are more, while those run the step, too, each its own.

    The devices keep the settings (threads, cores, kernels) that the placed step will have. The step's own variables keep their values.
    Raises ExecutionError where a device fails or dies.
    """
    open_on = partial(_session, captured, devices, inputs)
    with open_on(0) as session:
        with progress(f"profiling {len(captured.graph)} ops, {options.warmup + options.repeats} steps"):
            alone = _steps(session, captured, options)
        others = range(1, len(devices.names) if devices.servers else 1)  # logical devices share threads
        beside: list[Traced] = []
        if others:
            said = f"profiling beside {len(others)} other device{'s' * (len(others) > 1)} at work"
            with progress(said), ExitStack() as stack, _busy([stack.enter_context(open_on(device)) for device in others]):
                beside = _steps(session, captured, options)
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
                temporary_bytes=max(t.temporary_bytes.get(op.id, 0) for t in alone),
                persistent_bytes=op.persistent_bytes,
                contended_us=tuple(t.op_us[op.id] for t in beside),
            )
            for op in graph.ops
        },
        metadata={
            "device": devices.names[0],
            "processor": processor(),
            "tensorflow": tensorflow().__version__,
            "python": platform.python_version(),
        },
        contention=Contention(len(others) + 1, tuple(t.step_us for t in beside)) if beside else None,
    )


def _session(captured: CapturedFunction, devices: Devices, inputs: Sequence[np.ndarray], device: int) -> PlacedSession:
    """The whole step on one device, ready to run."""
    session = PlacedSession(placed_graph(captured, dict.fromkeys(captured.nodes, device), devices.names), devices)
    try:
        session.initialise(captured.values())
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


def _steps(session: PlacedSession, captured: CapturedFunction, options: ProfileOptions) -> list[Traced]:
    taken: list[tuple[StepTimes, Any]] = []
    started = time.perf_counter()
    for _ in range(options.warmup + options.repeats):
        if len(taken) >= options.warmup + FEWEST_REPEATS and time.perf_counter() - started > options.enough_seconds:
            break
        times = timed_step(session.run, session.devices.servers[:1])
        taken.append((times, session.traced()[1]))
    return [read_trace(trace, captured, session.placed.devices[0], without_waits(times)) for times, trace in taken[options.warmup :]]


def without_waits(times: StepTimes) -> float:
    """The device's own microseconds of a step: its time on the core, so that neither waiting for a core that another program has, nor the
    call from another process and its answer count; the wall time where there is no such clock."""
    return min([times.wall_us, *filter(None, times.busy_us)])


def read_trace(metadata: Any, captured: CapturedFunction, device: str, step_us: float) -> Traced:
    """Reads the RunMetadata of a step that ran on one device; the times add up to `step_us`."""
    op_of = {node: op for op, nodes in captured.nodes.items() for node in nodes}
    in_parts = {op.id for op in captured.graph.ops if op.op in _IN_PARTS}
    us = dict.fromkeys(captured.nodes, 0.0)
    temporary: dict[str, int] = {}
    made: dict[str, int] = {}
    kernels: dict[str, str] = {}
    for _, stats in node_stats(metadata, [device]):
        op, kernel = op_of.get(stats.node_name) or _op_around(stats.node_name, in_parts), kernel_of(stats)
        if op is None or not kernel:
            continue
        us[op] += stats.all_end_rel_nanos / 1000
        outputs = sum(output.tensor_description.allocation_description.requested_bytes for output in stats.output)
        peak = sum(memory.peak_bytes for memory in stats.memory)
        temporary[op] = max(temporary.get(op, 0), peak - outputs)
        if stats.node_name == op:
            made[op] = outputs
            kernels[op] = kernel
    _give_back_fused(us, kernels, captured)
    return Traced(step_us, as_untraced(us, step_us), temporary, made)


def _op_around(node: str, ops: Collection[str]) -> str | None:
    """The one of these loops and conditions that a node is a part of: it has the name of the innermost before its own."""
    scopes = node.removeprefix("Func/").split("/")[:-1]
    return next((name for name in map("/".join, (scopes[:n] for n in range(len(scopes), 0, -1))) if name in ops), None)


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


@contextmanager
def _busy(sessions: Sequence[PlacedSession]) -> Iterator[None]:
    """While it is entered, each session runs its step over and over."""
    over = threading.Event()

    def work(session: PlacedSession) -> None:
        while not over.is_set():
            session.run()

    with ThreadPoolExecutor(len(sessions)) as workers:
        working = [workers.submit(work, session) for session in sessions]
        try:
            yield
        finally:
            over.set()
        for each in working:
            each.result()
