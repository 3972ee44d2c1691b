"""Profiling: what every op of a captured step takes where it will run. The one-device program itself is timed, op by op."""

import gc
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeVar, cast

import torch

from baechi_ext.capture.torch_joint import Binding
from baechi_ext.capture.torch_private import memory_profile, profiler_events
from baechi_ext.collector import without_collection
from baechi_ext.cost.profile import Contention, OpProfile, Profile
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.simulate import Timeline
from baechi_ext.simulate.one_device import one_device_timeline
from baechi_ext.stderr import stderr_without
from baechi_runtime.host.host_memory import available_bytes
from baechi_runtime.host.processor import processor
from baechi_runtime.models.training_step import TrainingStep
from baechi_runtime.report.progress import progress
from baechi_runtime.torch.lowering.devices import TorchDevice, one_thread
from baechi_runtime.torch.lowering.op_error import explained
from baechi_runtime.torch.lowering.ops import Segment, Slots
from baechi_runtime.torch.lowering.random_state import as_it_was
from baechi_runtime.torch.processes.executor import Executor
from baechi_runtime.torch.streams.executor import StreamStep
from baechi_runtime.torch.threads.executor import PlacedStep

T = TypeVar("T")
_NO_NEWS = b"CPUAllocator.cpp"
"""The source of a warning of torch's profiler: memory that is freed while it looks was allocated before."""
_HOST_BOUND = 1.03
"""Steps that take longer than this times their ops on the device are bound by the host."""
_ERROR_OF_MEDIAN = 1.2533
"""The standard error of a median: sqrt(pi / 2) times that of a mean."""


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    warmup: int = 2
    repeats: int = 8
    enough_seconds: float = 60.0
    """Once the passes have taken this long, FEWEST_REPEATS are enough: long steps need fewer to be told from noise."""
    enough_error: float = 0.0
    """The same once what a typical pass takes, by which all times are scaled, is known to this part of itself; 0: never."""


FEWEST_REPEATS = 3
FULL = ProfileOptions()
QUICK = ProfileOptions(enough_seconds=10.0, enough_error=0.01)
"""For a training that waits for its plan. On a quiet machine 3 repeats are enough; where others work too it takes up to all 8."""


def profile_step(executor: Executor, graph: OpGraph, binding: Binding, step: TrainingStep, options: ProfileOptions) -> Profile:
    """The profile of every op on the executor's device 0: alone, and where it has more devices that share a host's memory or a GPU's while
    those are at work, too. Parameters, buffers and random state are put back afterwards.

    Times are of the device's own clock (thread CPU time, CUDA events), from an op's first instruction to its last free, so that
    they add up to the step; on a CPU device the Python that starts an op is part of it, as it is in the step. A CUDA device is timed while
    it is behind its host, whose time for each op is noted by itself. Where steps are CUDA graphs, they are scaled to the time of the
    graph: its kernels follow each other more closely than those given one by one.
    """
    device = executor.devices[0]
    timeline = one_device_timeline(graph)
    contention = None
    contended: list[list[float]] = [[] for _ in range(len(graph))]
    with as_it_was(step), without_collection():
        placed = cast(PlacedStep, executor.load(timeline, binding, step))  # as every executor loads a plan for one device
        gc.collect()
        most = f"{'up to ' * (options.enough_error > 0)}{options.warmup + options.repeats} passes"
        with progress(f"profiling {len(graph)} ops, {most}"):
            samples, _, issued = _passes(executor, placed, options, by_wall=False)
        with progress("measuring temporary memory"):
            temporary = temporary_bytes(executor, placed)
        whole = _graph_passes_us(placed, options)
        companions = _companions(executor, timeline, graphs=bool(whole))
        if companions:
            beside = f"profiling beside {companions} other device{'s' * (companions > 1)} at work"
            with progress(beside), executor.keep_busy(companions, timeline, binding, step):
                if whole:
                    contended, passes_us = samples, _graph_passes_us(placed, options)
                else:
                    contended, passes_us, _ = _passes(executor, placed, options, by_wall=True)
            contention = Contention(companions + 1, passes_us)
    return Profile(
        graph_fingerprint=graph.fingerprint,
        op_digests=dict(zip(graph.index, graph.op_digests, strict=True)),
        clock=device.clock_name,
        warmup=options.warmup,
        ops={
            op.id: OpProfile(tuple(samples[v]), op.output_bytes, temporary[v], op.persistent_bytes, tuple(contended[v]), issued[v])
            for v, op in enumerate(graph.ops)
        },
        metadata={
            "device": device.name,
            "processor": processor(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        contention=contention,
        pass_us=whole,
        by_op=isinstance(placed, StreamStep) and placed.cannot_be_graph,
    )


def _companions(executor: Executor, timeline: Timeline, *, graphs: bool) -> int:
    """The number of other devices to keep at work: all for whose own steps there is memory, of a host's, or of one GPU's parts where steps
    are graphs: op by op the host can't keep several at work. GPUs of their own share nothing that their clocks would not see."""
    devices, needed = executor.devices, timeline.peak_memory_bytes[0]
    if all(d.torch_device.type == "cpu" for d in devices):
        available = available_bytes()
    elif graphs and devices[0].share > 1:
        available = sum(executor.memory_bytes())
    else:
        return 0
    others = len(devices) - 1
    return others if available is None or needed == 0 else max(0, min(others, int(available / needed) - 1))


def _graph_passes_us(placed: PlacedStep, options: ProfileOptions) -> tuple[float, ...]:
    """The wall times of steps that are one CUDA graph, in microseconds; empty where they are none."""
    if not isinstance(placed, StreamStep):
        return ()
    if not placed.is_graph:
        placed.rehearse()
    return placed.graph_us(options.repeats)


def _passes(
    executor: Executor, placed: PlacedStep, options: ProfileOptions, *, by_wall: bool
) -> tuple[list[list[float]], tuple[float, ...], list[float]]:
    """For each op its samples, the time of each pass (see `_clocked`), both in microseconds, without the warm-up; and for each op what it
    took the host, where that is not part of them: the median, see `_as_in_steps`.

    `by_wall`: ops are scaled to the passes' own time, not to the sum of their ops.
    """
    device = executor.devices[0]
    samples: list[list[float]] = [[] for _ in placed.programs[0].segments]
    hosts: list[list[float]] = [[] for _ in samples]
    passes: list[float] = []
    typical: list[float] = []
    steps_us: list[float] = []
    started = time.perf_counter()
    for repeat in range(options.warmup + options.repeats):
        late = time.perf_counter() - started > options.enough_seconds
        if len(passes) >= FEWEST_REPEATS and (late or _error_of(typical) < options.enough_error):
            break
        pass_us, (times, issued) = executor.call(0, lambda: _clocked(lambda: _timed_pass(placed, device)))
        if repeat >= options.warmup:
            passes.append(pass_us)
            typical.append(pass_us if by_wall else sum(times.values()))
            for v, us in times.items():
                samples[v].append(us)
            for v, us in issued.items():
                hosts[v].append(us)
            if isinstance(placed, StreamStep) and placed.executor.recorder is None:
                steps_us.append(executor.call(0, lambda: _clocked(placed.by_op)[0]))
    issue_us = [statistics.median(host) if host else 0.0 for host in hosts]
    return samples, tuple(passes), _as_in_steps(issue_us, steps_us, sum(map(statistics.median, samples)))


def _as_in_steps(issue_us: list[float], steps_us: Sequence[float], device_us: float) -> list[float]:
    """The host's time for each op, scaled to that of whole steps, which are not interrupted to be timed; only down, if the device bounds
    these."""
    if not steps_us or not any(issue_us):
        return issue_us
    step_us = statistics.median(steps_us)
    scale = step_us / sum(issue_us)
    if step_us < _HOST_BOUND * device_us:
        scale = min(1.0, scale)
    return [us * scale for us in issue_us]


def _error_of(passes: Sequence[float]) -> float:
    """The standard error of their median, as of a normal distribution, in parts of it."""
    middle = statistics.median(passes)
    spread = _ERROR_OF_MEDIAN * statistics.stdev(passes) / math.sqrt(len(passes))
    return spread / middle if spread else 0.0


def _clocked(function: Callable[[], T]) -> tuple[float, T]:
    """The wall time of a call in microseconds, and what it returns. What the thread spent waiting for a core is left out: other
    programs took it, or other devices where there are fewer cores than devices. Waits for locks and memory are in it."""
    begin = time.perf_counter_ns()  # around the other clock's readings: a thread may have to wait between them
    waited = _waited_for_core_ns()
    value = function()
    waited = _waited_for_core_ns() - waited
    return (time.perf_counter_ns() - begin - waited) / 1000, value


def _waited_for_core_ns() -> int:
    """Nanoseconds the calling thread was ready to run and did not, since it began; 0 where the system does not say (only Linux does)."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def _timed_pass(placed: PlacedStep, device: TorchDevice) -> tuple[dict[int, float], dict[int, float]]:
    """Op -> microseconds of one step of a one-device program; and those that they take the host, where that is not part of them."""
    if isinstance(placed, StreamStep):
        return _timed_behind_host(placed)
    program = placed.programs[0]
    slots = program.empty()
    marks = [device.mark()]
    with torch.no_grad():
        for segment in program.segments:
            for action in (*segment.arrivals, *segment.views, segment.compute, *segment.after):
                action(slots)
            marks.append(device.mark())
        for action in program.epilogue:
            action(slots)
    device.synchronize()
    return {s.op: device.elapsed_us(a, b) for s, (a, b) in zip(program.segments, pairwise(marks), strict=True)}, {}


def _timed_behind_host(placed: StreamStep) -> tuple[dict[int, float], dict[int, float]]:
    """See `_timed_pass`. Updates that are one call share its time: the device's by bytes, the host's equally."""
    if not placed.walk.runs:
        placed.walk.run(placed.empty())  # kernels are loaded, and chosen, when they are first asked for
    times = placed.walk.time_ops(placed.empty())
    device, host = ({v: each[i] for v, each in times.items()} for i in range(2))
    state, names = placed.step.state(), placed.context.binding.state_names
    sizes = {v: state[names[b.parameters[0]]].nbytes for v, b in enumerate(placed.context.binding.ops) if b.parameters and v in times}
    whole = sum(sizes.values())
    if whole and placed.optimizers:
        device_us, host_us = (sum(of[v] for v in sizes) for of in (device, host))
        device |= {v: device_us * size / whole for v, size in sizes.items()}
        host |= dict.fromkeys(sizes, host_us / len(sizes))
    return device, host


def temporary_bytes(executor: Executor, placed: PlacedStep) -> list[int]:
    """For each op, the bytes it allocated and freed again while it computed, at most at one time, beyond its outputs."""
    if executor.devices[0].peak_bytes() is not None:
        return executor.call(0, lambda: _temporary_by_allocator(placed, executor.devices[0]))
    return _temporary_by_profiler(placed, executor.devices[0])


def _run_computing(placed: PlacedStep, device: TorchDevice, compute: Callable[[Segment, Slots], None]) -> None:
    """Runs the program of a step on one device, whose ops `compute` computes. Raises OpFailure where one fails."""
    program = placed.programs[0]
    with explained(device.name, placed.timeline.graph):
        replace(program, segments=tuple(replace(s, compute=partial(compute, s)) for s in program.segments)).run()


def _temporary_by_allocator(placed: PlacedStep, device: TorchDevice) -> list[int]:
    found = [0] * len(placed.programs[0].segments)

    def compute(segment: Segment, slots: Slots) -> None:
        device.reset_peak()
        before = torch.cuda.memory_allocated(device.torch_device)
        segment.compute(slots)
        device.synchronize()
        # An update lets go of gradients that were kept for it.
        held = max(before, torch.cuda.memory_allocated(device.torch_device))
        found[segment.op] = max(0, (device.peak_bytes() or 0) - held)

    _run_computing(placed, device, compute)
    return found


def _temporary_by_profiler(placed: PlacedStep, device: TorchDevice) -> list[int]:
    """From the allocator events of torch's profiler; in this thread, because the profiler belongs to the thread that first used it."""
    found = [0] * len(placed.programs[0].segments)

    def compute(segment: Segment, slots: Slots) -> None:
        with torch.profiler.record_function(f"op {segment.op}"):
            segment.compute(slots)

    with one_thread(), stderr_without(_NO_NEWS), memory_profile() as profiler:
        _run_computing(placed, device, compute)
    events = profiler_events(profiler)
    spans = sorted((e.start_ns(), e.start_ns() + e.duration_ns(), int(e.name()[3:])) for e in events if e.name().startswith("op "))
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    position = 0
    for start, end, op in spans:
        now = top = 0
        while position < len(changes) and changes[position][0] <= end:
            at, size = changes[position]
            position += 1
            if at >= start:
                now += size
                top = max(top, now)
        found[op] = max(0, top - max(now, 0))
    return found
