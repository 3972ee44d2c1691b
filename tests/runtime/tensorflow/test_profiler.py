"""Profiles of TensorFlow steps: what RunMetadata says is read right, and a real step's profile fits its graph."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from baechi_ext.capture.tensorflow_graph import CapturedFunction, capture_function
from baechi_ext.cost import Profile, attach_costs
from baechi_runtime.measure.timing import StepTimes
from baechi_runtime.tensorflow.profiler import FEWEST_REPEATS, ProfileOptions, as_untraced, profile, read_trace, without_waits
from baechi_runtime.tensorflow.servers.devices import Logical, Servers
from tests.tensorflow_steps import image_step

QUICK = ProfileOptions(warmup=2, repeats=3)


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with Servers(2) as servers:
        yield servers


def convolution(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.bias_add(tf.nn.conv2d(x, tf.ones((3, 3, 3, 4)), 1, "SAME"), tf.ones((4,))) * 2.0


@pytest.fixture(scope="module")
def captured() -> CapturedFunction:
    return capture_function(convolution, [tf.TensorSpec((1, 8, 8, 3))])


def metadata(entries: dict[str, dict[str, Any]], device: str = "/job:worker/replica:0/task:0/device:CPU:0") -> Any:
    """A RunMetadata of nodes with their kernel, times in nanoseconds, and bytes: peak, and of the output."""
    found = tf.compat.v1.RunMetadata()
    stats = found.step_stats.dev_stats.add(device=device)
    for name, entry in entries.items():
        node = stats.node_stats.add(node_name=name, timeline_label=entry.get("label", f"{name} = {entry.get('kernel', 'Op')}(x)"))
        node.all_end_rel_nanos = entry["ns"]
        if "peak" in entry:
            node.memory.add(peak_bytes=entry["peak"], total_bytes=entry["peak"])
        if "made" in entry:
            node.output.add().tensor_description.allocation_description.requested_bytes = entry["made"]
    return found


DEVICE = "/job:worker/replica:0/task:0/device:CPU:0"


def op_of(captured: CapturedFunction, kind: str) -> str:
    return next(op.id for op in captured.graph.ops if op.op == kind)


def test_times_are_summed_over_an_ops_nodes_and_memory_is_what_exceeds_the_output(captured: CapturedFunction) -> None:
    scale = op_of(captured, "Mul")
    constant, node = captured.nodes[scale]
    label = f"[cpu 0.1MB 0.1MB] {node} = Mul(x, y)"
    trace = metadata({constant: {"ns": 500}, node: {"ns": 9500, "peak": 3000, "made": 1024, "label": label}, "elsewhere": {"ns": 7}})
    found = read_trace(trace, captured, DEVICE, step_us=10.0)
    assert found.op_us == {op: 10.0 if op == scale else 0.0 for op in captured.nodes}
    assert found.temporary_bytes[scale] == 3000 - 1024
    assert found.output_bytes[scale] == 1024


def test_transfers_and_other_devices_are_left_out(captured: CapturedFunction) -> None:
    scale = op_of(captured, "Mul")
    trace = metadata({scale: {"ns": 1000}})
    transfer = {"ns": 5000, "label": "[4B] [0.0MB/s] edge_7_Mul from here to there"}
    trace.step_stats.dev_stats.extend(metadata({scale: transfer, "RecvTensor": transfer}).step_stats.dev_stats)
    trace.step_stats.dev_stats.extend(metadata({scale: {"ns": 7000}}, DEVICE.replace("task:0", "task:1")).step_stats.dev_stats)
    assert read_trace(trace, captured, DEVICE, step_us=1.0).op_us[scale] == pytest.approx(1.0)


def test_a_convolution_fused_into_its_bias_gets_its_time_back(captured: CapturedFunction) -> None:
    product, bias, scale = (op_of(captured, kind) for kind in ("Conv2D", "BiasAdd", "Mul"))
    fused = metadata({bias: {"ns": 90_000, "kernel": "_MklNativeFusedConv2D"}, scale: {"ns": 10_000, "kernel": "Mul"}})
    us = read_trace(fused, captured, DEVICE, step_us=100.0).op_us
    assert (us[product], us[bias], us[scale]) == (90.0, 0.0, 10.0)
    apart = metadata({product: {"ns": 80_000}, bias: {"ns": 10_000, "kernel": "BiasAdd"}, scale: {"ns": 10_000}})
    us = read_trace(apart, captured, DEVICE, step_us=100.0).op_us
    assert (us[product], us[bias], us[scale]) == (80.0, 10.0, 10.0)


def test_what_runs_inside_a_loop_or_a_condition_is_its_own(servers: Servers) -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        product = tf.while_loop(lambda i, _: i < 5, lambda i, p: (i + 1, tf.cond(i < 9, lambda: p @ x, lambda: p)), (0, x))[1]
        return tf.reduce_sum(tf.reshape(product, [-1])) + tf.cond(tf.reduce_sum(x) > 0, lambda: tf.reduce_sum(x @ x), lambda: 0.0)

    x = np.full((300, 300), 1 / 300, np.float32)
    captured = capture_function(step, [x])
    loop, condition = (next(op.id for op in captured.graph.ops if op.op.endswith(kind)) for kind in ("While", "If"))
    inside = {f"{loop}/body/_1/{loop}/cond/then/_7/matmul": 50_000, f"Func/{loop}/body/_1/input/_3": 10_000}
    trace = metadata({node: {"ns": ns} for node, ns in (*inside.items(), (f"{condition}/then/_9/matmul", 20_000), ("elsewhere/matmul", 7))})
    assert {op: us for op, us in read_trace(trace, captured, DEVICE, step_us=80.0).op_us.items() if us} == {loop: 60.0, condition: 20.0}
    graph = attach_costs(captured.graph, profile(captured, [x], servers, QUICK))
    us = {op.id: op.compute_us for op in graph.ops}
    assert us[loop] > us[condition] > max(us[op] for op in us if op not in (loop, condition))


def test_traced_times_become_those_of_an_untraced_step() -> None:
    assert as_untraced({"a": 30.0, "b": 10.0}, 20.0) == {"a": 15.0, "b": 5.0}
    assert as_untraced({"a": 30.0, "b": 10.0}, 50.0) == {"a": 35.0, "b": 15.0}


def test_waits_for_a_core_do_not_count() -> None:
    assert [without_waits(StepTimes(wall, (cpu,))) for wall, cpu in ((110, 100), (400, 101), (98, 99))] == [100, 101, 98]
    assert [without_waits(StepTimes(110, busy)) for busy in ((0.0,), ())] == [110, 110], "no clock of the process: its wall time"


def test_the_profile_of_a_real_step(servers: Servers) -> None:
    step = image_step()
    captured = step.capture()
    before = [v.variable.numpy() for v in captured.variables]
    found = profile(captured, step.inputs, servers, QUICK)
    for value, variable in zip(before, captured.variables, strict=True):
        np.testing.assert_array_equal(value, variable.variable.numpy())
    assert {len(p.samples_us) for p in found.ops.values()} == {FEWEST_REPEATS}
    assert {len(p.contended_us) for p in found.ops.values()} == {FEWEST_REPEATS}
    assert found.contention is not None
    assert found.contention.devices == 2
    graph = attach_costs(captured.graph, found)
    assert all(op.compute_us >= 0 for op in graph.ops)
    of_kind = {op.op: op for op in graph.ops}
    assert of_kind["Conv2D"].compute_us > 0
    assert of_kind["MatMul"].compute_us > 0
    assert sum(op.compute_us == 0 for op in graph.ops) < len(graph) / 10
    for old, new in zip(captured.graph.ops, graph.ops, strict=True):
        assert new.persistent_bytes == old.persistent_bytes
        assert new.output_bytes == old.output_bytes or old.output_bytes == 0
    assert Profile.from_json(found.to_json(), captured.graph) == found


def test_what_takes_longest_is_seen_to(servers: Servers) -> None:
    def uneven(x: tf.Tensor) -> tf.Tensor:
        small = tf.matmul(x[:8, :8], x[:8, :8])
        return tf.reduce_sum(tf.matmul(x, x)) + tf.reduce_sum(tf.boolean_mask(small, small > 0))

    x = np.random.default_rng(0).uniform(0.5, 1.0, (600, 600)).astype(np.float32)
    captured = capture_function(uneven, [x])
    found = profile(captured, [x], servers, QUICK)
    graph = attach_costs(captured.graph, found)
    large = next(op for op in graph.ops if op.op == "MatMul" and op.output_bytes == 600 * 600 * 4)
    assert large.compute_us > 0.5 * graph.total_compute_us()
    chosen = next(op for op in graph.ops if op.op == "GatherV2")
    assert chosen.output_bytes == 8 * 8 * 4, "known only when the step runs: all are above 0"


def test_logical_devices_are_profiled_in_one_order() -> None:
    step = image_step()
    captured = step.capture()
    with Logical(2) as devices:
        found = profile(captured, step.inputs, devices, QUICK)
    assert found.contention is None
    assert sum(min(p.samples_us) for p in found.ops.values()) > 0
