"""A recorded step: every op and transfer is seen once, in an order that can be, and what it holds is what is accounted."""

import json
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from baechi_ext.ir import Cluster, OpGraph, Plan
from baechi_ext.ir.measured import MeasuredStep
from baechi_ext.simulate import Timeline, simulate
from baechi_ext.simulate.one_device import one_device_timeline
from baechi_ext.simulate.peak import persistent_bytes
from baechi_runtime.files.run_folder import RunFolder
from baechi_runtime.measure.recording import DeviceMemory, DeviceNotes, Recording
from baechi_runtime.models.training_step import TrainingStep, WithLoss, optimizer_spec
from baechi_runtime.report.trace import trace
from baechi_runtime.torch.lowering.devices import CpuDevice, cpu_devices
from baechi_runtime.torch.lowering.split_gpu import split_gpu
from baechi_runtime.torch.measure import measured_peak_bytes
from baechi_runtime.torch.processes.clocks import clocks_ahead
from baechi_runtime.torch.streams.executor import StreamExecutor
from baechi_runtime.torch.threads.accounting import counting
from baechi_runtime.torch.threads.executor import ThreadExecutor
from baechi_runtime.torch.threads.step_recorder import NO_CUDA_TRANSFERS, clock_of
from tests.runtime.chrome_trace import problems_of
from tests.runtime.forked_workers import ForkedWorkers
from tests.torch_steps import capture, make_step, scattered


def require_possible(step: MeasuredStep, timeline: Timeline, *, wrong_us: float = 0.0) -> None:
    """The step's ops and transfers fit the plan, and no op starts before what it reads is there, but for what clocks may be wrong."""
    graph, ops = timeline.graph, {op.id: op for op in step.ops}
    assert {op.id: op.device for op in step.ops} == {op.id: d for op, d in zip(graph.ops, timeline.placement, strict=True)}
    assert all(op.end_us <= step.wall_us + wrong_us for op in step.ops)
    for device, order in enumerate(timeline.device_order()):
        assert [op.id for op in step.ops if op.device == device] == [graph.ops[v].id for v in order]
    sent = {(t.op, t.tensor, t.source, t.target): t for t in step.transfers}
    tensors = graph.tensors
    expected = {(graph.ops[tensors[t.tensor].producer].id, tensors[t.tensor].name, t.source, t.target) for t in timeline.transfers}
    assert set(sent) == expected
    assert len(step.transfers) == len(timeline.transfers)
    for v, op in enumerate(graph.ops):
        for t in graph.inputs[v]:
            producer = graph.ops[tensors[t].producer].id
            source, here = ops[producer].device, ops[op.id].device
            came = ops[producer].end_us if source == here else sent[producer, tensors[t].name, source, here].end_us
            assert came <= ops[op.id].start_us + wrong_us
    assert all(t.start_us >= ops[t.op].start_us for t in step.transfers)


@pytest.mark.parametrize(("name", "optimizer", "num_devices"), [("branches", "adam", 2), ("tied", "sgd", 3), ("tied", "momentum", 1)])
def test_threads(name: str, optimizer: str, num_devices: int) -> None:
    step = make_step(name, optimizer)
    graph, binding = capture(step)
    timeline = scattered(graph, num_devices, 5)
    with ThreadExecutor(cpu_devices(num_devices), timeout_seconds=60) as executor:
        placed = executor.load(timeline, binding, step)
        placed.run()
        programs = placed.programs
        measured = placed.record().measured(graph, "thread")
        assert placed.programs is programs
        assert all("noting" not in action.__qualname__ for program in programs for _, action in program.actions)
        loss, _ = placed.run()
        peak = measured_peak_bytes(executor, timeline, binding, step)
    assert torch.isfinite(loss)
    require_possible(measured, timeline)
    assert measured.clock == "monotonic"
    assert tuple(max(held.bytes for held in device) for device in measured.memory) == peak
    assert MeasuredStep.from_json(json.loads(json.dumps(measured.to_json())), graph) == measured
    plan = planned(graph, timeline)
    found = trace(RunFolder(Path("run"), graph, plan, None, None, measured))
    assert problems_of(found) == []
    arrows = [event["id"] for event in found["traceEvents"] if event["ph"] == "s"]
    assert len(arrows) == 2 * len(timeline.transfers)  # none is left out: on one clock nothing comes before its cause


class Noting(nn.Module):
    """A layer, and what it gave last in a buffer that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 5)
        self.register_buffer("seen", torch.zeros(4, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.layer(x)
        torch.mul(found.detach(), 2, out=self.seen)
        return found


def test_a_buffer_that_is_written_and_never_read_is_held() -> None:
    step = TrainingStep("noting", WithLoss(Noting()), (torch.randn(4, 8), torch.randint(5, (4,))), optimizer_spec("sgd", 0.05))
    graph, binding = capture(step)
    assert "model.seen" not in binding.state_reader
    (writer,) = binding.buffer_writes
    placement = [int(v == writer) for v in range(len(graph))]
    with ThreadExecutor(cpu_devices(2), timeout_seconds=60) as executor:
        timeline = simulate(graph, Cluster.uniform(2), placement)
        recording = executor.load(timeline, binding, step).record()
    assert persistent_bytes(timeline).tolist() == [held.resident for held in recording.held or ()] == [4 * (8 * 5 + 5), 4 * 4 * 5]


def planned(graph: OpGraph, timeline: Timeline) -> Plan:
    rank = {v: i for i, v in enumerate(timeline.started)}
    order = tuple(float(rank[v]) for v in range(len(graph)))
    return Plan(graph, "", "feasible", timeline.cluster, timeline.placement, order, timeline.makespan_us, 0.0, (), 0.0)


def test_what_is_live_against_a_count_of_all_slots_after_every_op() -> None:
    step = make_step("branches")
    graph, binding = capture(step)
    timeline = one_device_timeline(graph)
    with ThreadExecutor(cpu_devices(1), timeout_seconds=60) as executor:
        program = executor.load(timeline, binding, step).programs[0]
    left_out = {value.untyped_storage().data_ptr() for value in step.state().values()}

    def counted(slots: list[Any]) -> int:
        tensors = [t for value in slots for t in (value if isinstance(value, (list, tuple)) else (value,)) if t is not None]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(size for pointer, size in storages.items() if pointer not in left_out)

    slots: list[Any] = [None] * program.num_slots
    expected = []
    with torch.no_grad():
        for segment in program.segments:
            for action in (*segment.arrivals, *segment.views, segment.compute):
                action(slots)
            running = counted(slots) + int(graph.ops[segment.op].temporary_bytes)
            for action in segment.after:
                action(slots)
            expected.append((segment.op, running, counted(slots)))
    found: list[tuple[int, int, int]] = []
    counting(program, timeline, step.state().values(), found).run()
    assert found == expected
    assert len({running for _, running, _ in expected}) > 5


def test_worker_processes_whose_clocks_are_asked_for(workers: ForkedWorkers) -> None:
    """They share a clock, so what is found out of it must be true to within what is said."""
    found = json.loads(workers.run("recorded_on_processes", 2))
    step = make_step("branches")
    graph, _ = capture(step)
    measured = MeasuredStep.from_json(found["measured"], graph)
    (note,) = measured.notes
    said, _, wrong = note.partition("off by ")
    assert said == "cpu:1 is on another machine; its times may be "
    require_possible(measured, scattered(graph, 2, 5), wrong_us=float(wrong.removesuffix(" us")) + 1)
    assert all(device[0].at_us == 0 and device[0].bytes > 0 for device in measured.memory)
    before, after = found["losses"]
    assert after < before  # the recorded steps were steps of the training


def test_only_clocks_of_other_machines_than_rank_0s_are_asked_for() -> None:
    told = {1: (5_000_000, 1_600), 3: (-7_000, 40_000)}
    ahead, remarks = clocks_ahead([CpuDevice(rank, node) for rank, node in enumerate((4, 0, 4, 1))], told.pop)
    assert (ahead, told) == ([0, 5_000_000, 0, -7_000], {})
    assert remarks == [f"cpu:{rank} is on another machine; its times may be off by {us} us" for rank, us in ((1, 2), (3, 40))]


def test_a_transfer_is_over_when_its_sender_says_so_or_its_reader_has_it() -> None:
    """The first was there before its reader came; for the second one the reader waited, longer than the sender took."""
    step = make_step("branches")
    graph, _ = capture(step)
    timeline = scattered(graph, 2, 5)
    sent: list[list[Any]] = [[], []]
    received: list[list[Any]] = [[], []]
    for t, (given, gone, came, had) in zip(timeline.transfers[:2], ((1000, 3000, 9000, 9500), (1000, 5000, 2000, 6000)), strict=True):
        sent[t.source].append((t.tensor, t.target, given, gone))
        received[t.target].append((t.tensor, came, had))
    devices = [DeviceNotes([], s, r) for s, r in zip(sent, received, strict=True)]
    measured = Recording(1000, 10.0, devices, [DeviceMemory(0, []), DeviceMemory(0, [])], "monotonic").measured(graph, "process")
    assert sorted((t.start_us, t.end_us) for t in measured.transfers) == [(0.0, 2.0), (0.0, 5.0)]


class Event:
    """A CUDA event that happens when it is recorded."""

    def __init__(self) -> None:
        self.ns = time.monotonic_ns()

    def synchronize(self) -> None:
        time.sleep(2e-5)


def test_events_are_told_by_the_hosts_clock() -> None:
    """To within what waiting for the first one takes; and their distances to the nanosecond."""
    device: Any = SimpleNamespace(
        mark=Event, synchronize=lambda: None, elapsed_us=lambda start, end: (end.ns - start.ns) / 1000, torch_device=torch.device("cuda")
    )
    clock = clock_of(device)
    clock.begin()
    events = [clock.mark() for _ in range(3)]
    told = [clock.at_ns(event) for event in events]
    assert (clock.name, clock_of(cpu_devices(1)[0]).name) == ("cuda_event", "monotonic")
    assert [b - a for a, b in pairwise(told)] == [b.ns - a.ns for a, b in pairwise(events)]
    shift = told[0] - events[0].ns
    assert 0 <= shift < 60e9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_a_split_gpu() -> None:
    step = make_step("branches")
    graph, binding = capture(step)
    timeline = scattered(graph, 2, 5)
    with StreamExecutor(split_gpu(2), timeout_seconds=60) as executor:
        placed = executor.load(timeline, binding, step)
        placed.run()
        measured = placed.record().measured(graph, "one gpu split")
    assert (measured.clock, measured.transfers, measured.notes) == ("cuda_event", (), (NO_CUDA_TRANSFERS,))
    ops = {op.id: op for op in measured.ops}
    assert set(ops) == set(graph.index)
    assert MeasuredStep.from_json(measured.to_json(), graph) == measured
    same = [(u, v) for v in range(len(graph)) for u in graph.predecessors[v] if timeline.placement[u] == timeline.placement[v]]
    assert all(ops[graph.ops[u].id].end_us <= ops[graph.ops[v].id].start_us for u, v in same)
