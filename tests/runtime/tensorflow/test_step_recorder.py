"""A traced step of TensorFlow's as a measured step: what a trace by hand says, and real ones, of servers and of this process."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from baechi_ext.ir import Cluster
from baechi_ext.ir.measured import MeasuredStep
from baechi_ext.simulate import Timeline, simulate
from baechi_runtime.tensorflow.servers.devices import Devices, Logical, Servers
from baechi_runtime.tensorflow.servers.step_recorder import BY_REFERENCE, SEVERAL_HOSTS, record_step
from tests.build import cluster_of, graph_of
from tests.runtime.tensorflow.steps import Step, branches

NAMES = ("/job:worker/replica:0/task:0/device:CPU:0", "/job:worker/replica:0/task:1/device:CPU:0")
HOUR = 3_600_000_000


def by_hand() -> Any:
    """a on device 0, in two nodes, the second of which says too late that it is done; b begins meanwhile. c on device 1 reads a; it asked
    for it early. A constant comes when it likes."""
    found = tf.compat.v1.RunMetadata()

    def node(device: int, name: str, kernel: str, start_us: float, end_us: float, bytes_in_use: int) -> None:
        start_ns = round((HOUR + start_us) * 1000)
        stats = devices[device].node_stats.add(node_name=name, timeline_label=f"{name} = {kernel}()", all_start_nanos=start_ns)
        stats.op_start_rel_nanos, stats.op_end_rel_nanos = 0, round((end_us - start_us) * 1000)
        stats.memory.add(allocator_name="cpu", allocator_bytes_in_use=bytes_in_use, peak_bytes=5, live_bytes=3)

    devices = [found.step_stats.dev_stats.add(device=name) for name in NAMES]
    node(0, "constant", "Const", 2, 50, 7)
    node(0, "a/part", "Cast", 0, 1, 8)
    node(0, "a", "MatMul", 1, 4.5, 9)
    node(0, "b", "Relu", 4, 6, 10)
    node(1, "c", "Relu", 8, 9, 11)
    label = f"[4B] [0.2Mb/s] edge_7_a from {NAMES[0]} to {NAMES[1]}"
    devices[1].node_stats.add(node_name="RecvTensor", timeline_label=label, all_start_micros=HOUR - 20, all_end_rel_micros=27)
    return found


def test_a_trace_by_hand() -> None:
    graph = graph_of({"a": 1, "b": 1, "c": 1, "constant": 0}, ("a", "b", 4), ("a", "c", 4))
    timeline = simulate(graph, cluster_of(2), (0, 0, 1, 0))
    op_of = {"a": "a", "a/part": "a", "b": "b", "c": "c", "constant": "constant"}
    devices = SimpleNamespace(shared_memory=False, several_hosts=True)
    session: Any = SimpleNamespace(devices=devices, placed=SimpleNamespace(op_of=op_of, devices=NAMES))
    step = record_step(session, timeline, "servers", [by_hand()])
    spans = {op.id: (op.device, op.start_us, op.end_us) for op in step.ops}
    assert spans == {"a": (0, 0.0, 4.5), "b": (0, 4.5, 6.0), "c": (1, 8.0, 9.0), "constant": (0, 4.5, 4.5)}
    (transfer,) = step.transfers
    assert (transfer.op, transfer.source, transfer.target, transfer.start_us, transfer.end_us) == ("a", 0, 1, 4.5, 7.0)
    assert [(held.at_us, held.bytes) for held in step.memory[1]] == [(8.0, 13), (9.0, 11)]
    assert (step.wall_us, step.executor, step.notes) == (9.0, "servers", (SEVERAL_HOSTS,))
    assert MeasuredStep.from_json(json.loads(json.dumps(step.to_json())), graph) == step


@pytest.fixture(scope="module")
def step() -> Step:
    return branches()


@pytest.fixture(params=[Logical, Servers])
def devices(request: pytest.FixtureRequest) -> Iterator[Devices]:
    with request.param(2) as devices:
        yield devices


def scattered(step: Step) -> Timeline:
    """Every second colocation group, or op without, on the other device."""
    graph, where = step.graph, {}
    placement = [where.setdefault(op.colocation or op.id, len(where) % 2) for op in graph.ops]
    return simulate(graph, Cluster.uniform(2), placement)


def test_real_steps(step: Step, devices: Devices) -> None:
    timeline = scattered(step)
    graph = timeline.graph
    with step.session(devices, timeline.placement, [graph.ops[v].id for v in timeline.started]) as session:
        session.run()
        measured = record_step(session, timeline, "")
    ops = {op.id: op for op in measured.ops}
    assert {op.id: op.device for op in measured.ops} == {op.id: d for op, d in zip(graph.ops, timeline.placement, strict=True)}
    assert all(ops[graph.ops[u].id].end_us <= ops[op.id].start_us for v, op in enumerate(graph.ops) for u in graph.predecessors[v])
    assert 0 < max(op.end_us for op in measured.ops) == measured.wall_us
    assert MeasuredStep.from_json(json.loads(json.dumps(measured.to_json())), graph) == measured
    if devices.shared_memory:
        assert (measured.transfers, measured.notes) == ((), (BY_REFERENCE,))
        assert all(any(held.bytes > 0 for held in device) for device in measured.memory)
    else:
        assert len(measured.transfers) > len(timeline.transfers) / 4
        assert all(t.end_us <= max(ops[graph.ops[w].id].end_us for w in readers(timeline, t.op)) for t in measured.transfers)


def readers(timeline: Timeline, op: str) -> list[int]:
    graph = timeline.graph
    return list(graph.successors[graph.index[op]])
