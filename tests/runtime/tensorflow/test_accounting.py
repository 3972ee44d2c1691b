"""The memory of logical devices, accounted by the trace of a step."""

import random
from dataclasses import replace

import pytest
import tensorflow as tf

from baechi_ext.ir import Cluster, Link, OpGraph
from baechi_ext.simulate import Timeline, simulate
from baechi_runtime.tensorflow.servers.devices import Logical
from baechi_runtime.tensorflow.servers.traces import accounted_peak_bytes, traced_timeline
from tests.runtime.tensorflow.steps import Step, branches


@pytest.fixture(scope="module")
def step() -> Step:
    return branches(width=64)


@pytest.fixture(scope="module")
def graph(step: Step) -> OpGraph:
    """The step's graph, with costs and temporary bytes drawn at random."""
    draw, costless = random.Random(0), step.captured.graph
    ops = [replace(op, compute_us=draw.randint(1, 100), temporary_bytes=draw.randint(0, 9) * 1000) for op in costless.ops]
    return costless.replace_ops(ops)


def by_lot(graph: OpGraph, devices: int, seed: int) -> Timeline:
    """Its groups on devices, with transfers that take no time."""
    draw, where = random.Random(seed), {}
    placement = [where.setdefault(op.colocation or op.id, draw.randrange(devices)) for op in graph.ops]
    return simulate(graph, Cluster.uniform(devices, link=Link(), parallel_transfers=True), placement)


def metadata(timeline: Timeline) -> tf.compat.v1.RunMetadata:
    """The trace of a step that went as it was simulated, an hour after the clock began; and a constant before all."""
    found = tf.compat.v1.RunMetadata()
    stats = found.step_stats.dev_stats.add(device="any")
    stats.node_stats.add(node_name="constant", all_start_nanos=1)
    for op, start, end in zip(timeline.graph.ops, timeline.start_us, timeline.end_us, strict=True):
        node = stats.node_stats.add(node_name=op.id, all_start_nanos=3_600_000_000_000 + round(start * 1000))
        node.all_end_rel_nanos = round((end - start) * 1000)
    return found


@pytest.mark.parametrize(("devices", "seed"), [(1, 0), (2, 1), (3, 2)])
def test_a_step_that_went_as_simulated_holds_what_was_predicted(graph: OpGraph, devices: int, seed: int) -> None:
    timeline = by_lot(graph, devices, seed)
    op_of = {op.id: op.id for op in graph.ops} | {"constant": graph.ops[0].id}
    traced = traced_timeline(metadata(timeline), op_of, timeline)
    assert traced.makespan_us == pytest.approx(timeline.makespan_us)
    assert traced.peak_memory_bytes == timeline.peak_memory_bytes


def accounted(step: Step, timeline: Timeline) -> tuple[int, ...]:
    """The accounted peaks of a real step that is held to the timeline's order."""
    count, order = len(timeline.cluster), [timeline.graph.ops[v].id for v in timeline.started]
    with Logical(count) as devices, step.session(devices, timeline.placement, order) as session:
        return accounted_peak_bytes(session, timeline)


def test_a_real_step_on_one_device_holds_what_was_predicted(step: Step, graph: OpGraph) -> None:
    timeline = by_lot(graph, 1, 0)
    assert accounted(step, timeline) == timeline.peak_memory_bytes


def test_on_two_devices_it_goes_by_what_ran_when(step: Step, graph: OpGraph) -> None:
    timeline = by_lot(graph, 2, 3)
    tensors, working = sum(t.bytes for t in graph.tensors), max(op.temporary_bytes + op.output_bytes for op in graph.ops)
    for device, found in enumerate(accounted(step, timeline)):
        kept = sum(op.persistent_bytes for op, d in zip(graph.ops, timeline.placement, strict=True) if d == device)
        assert kept < found <= kept + tensors + working
