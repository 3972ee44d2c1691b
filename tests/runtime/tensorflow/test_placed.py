"""One placed step beside one unplaced step, on servers and on logical devices."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from baechi_ext.errors import PlanError
from baechi_ext.ir import Cluster, Link
from baechi_ext.place.common import PlaceOptions
from baechi_ext.place.registry import METHODS
from baechi_runtime.drivers import pipeline
from baechi_runtime.tensorflow.lowering.placed_graph import SCOPE, placed_graph
from baechi_runtime.tensorflow.servers.devices import Logical, Servers
from tests.runtime.tensorflow.steps import Step, branches, step_of

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def step() -> Step:
    return branches()


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with Servers(2) as servers:
        yield servers


def require_same(step: Step, loss: float, variables: dict[str, np.ndarray]) -> None:
    expected, after = step.unplaced()
    assert loss == pytest.approx(expected, rel=TOLERANCE)
    assert variables.keys() == after.keys()
    for name, value in after.items():
        allowed = TOLERANCE * float(np.abs(value).max())
        np.testing.assert_allclose(variables[name], value, rtol=0, atol=allowed, err_msg=name)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_placed_step_is_an_unplaced_step(step: Step, servers: Servers, method: str) -> None:
    graph = step.graph
    options = PlaceOptions(seed=0, time_limit_seconds=0.3)
    if method == "expert":
        hints = iter(range(len(graph)))
        graph = graph.replace_ops([replace(op, expert=next(hints) % 2 if op.phase == "forward" else None) for op in graph.ops])
    result = pipeline.plan(graph, Cluster.uniform(2, link=Link(0.0001, 1.0)), pipeline.PlanRequest(method, options=options))
    with step.session(servers, result.plan.placement) as session:
        loss = float(session.run()[0])
        require_same(step, loss, session.variables())


def by_groups(step: Step, count: int) -> list[int]:
    """Colocation groups, and ops without, in turn on the devices: as many borders as there can be."""
    turn: dict[str, int] = {}
    return [turn.setdefault(op.colocation or op.id, len(turn) % count) for op in step.captured.graph.ops]


def test_op_by_op_and_bit_for_bit_on_servers(step: Step, servers: Servers) -> None:
    with step.session(servers, by_groups(step, 2)) as session:
        require_same(step, float(session.run()[0]), session.variables())


def test_steps_of_one_plan_repeat_bit_for_bit_on_servers(step: Step, servers: Servers) -> None:
    """Whatever is on its way to another device when a gradient is summed up."""
    with step.session(servers, by_groups(step, 2)) as session:
        found = []
        for _ in range(8):
            session.initialise(step.first)
            loss = session.run()[0]
            found.append({"loss": loss, **session.variables()})
    for name, value in found[0].items():
        assert all(np.array_equal(value, other[name]) for other in found[1:]), name


def test_a_sum_is_the_same_whoever_holds_its_terms() -> None:
    """A session in which two of a sum's three terms are still held begins AddN with the third; one in which none is, with the first.
    In a placed graph both are the sum in order."""
    size = 200_000
    values = [np.random.default_rng(i).normal(size=size).astype(np.float32) for i in range(3)]
    in_order, from_the_end = (values[0] + values[1]) + values[2], (values[2] + values[1]) + values[0]
    assert not np.array_equal(in_order, from_the_end)
    held, summed = _sums(values)
    assert np.array_equal(held["AddN"], from_the_end)
    assert np.array_equal(summed["AddN"], in_order)
    assert np.array_equal(held["placed"], in_order)
    assert np.array_equal(summed["placed"], in_order)


def _sums(values: list[np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The sum, as captured and as placed: where its first two terms are results of the step, too, and where they are not."""
    found = []
    for held in (True, False):
        def step(a: tf.Tensor, b: tf.Tensor, c: tf.Tensor) -> tuple[tf.Tensor, ...]:
            terms = [tf.negative(x) for x in (a, b, c)]
            return (tf.add_n(terms), *(terms[:2] if held else ()))  # noqa: B023 - traced in this round

        captured = step_of(step, [-v for v in values])
        raw = tf.Graph()
        with raw.as_default():
            tf.import_graph_def(captured.captured.graph_def, name="")
        with tf.compat.v1.Session(graph=raw, config=Logical(1).config()) as session:
            fed = dict(zip(captured.captured.inputs, captured.inputs, strict=True))
            plain = session.run(list(captured.captured.outputs), fed)
        with Logical(1) as devices:
            placed = captured.session(devices, [0] * len(captured.captured.graph)).run()
        found.append({"AddN": plain[0], "placed": placed[0]})
    return found[0], found[1]


def test_sums_of_lists_of_tensors_stay_as_they_are() -> None:
    """Three gradients of one list are added by an AddN; there is no AddV2 of lists."""
    values = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            rows = tf.TensorArray(tf.float32, 3).unstack(x)
            loss = tf.reduce_sum(rows.stack() ** 2) + tf.reduce_sum(rows.stack() ** 3) + tf.reduce_sum(tf.sin(rows.stack()))
        return tape.gradient(loss, x)

    captured = step_of(step, [values])
    variants = [n for n in captured.captured.graph_def.node if n.op == "AddN" and n.attr["T"].type == tf.variant.as_datatype_enum]
    assert [len(node.input) for node in variants] == [3]
    with Logical(1) as devices:
        (found,) = captured.session(devices, [0] * len(captured.captured.graph)).run()
    np.testing.assert_allclose(found, 2 * values + 3 * values**2 + np.cos(values), rtol=1e-5)


def test_logical_devices_in_a_given_order_do_one_op_at_a_time(step: Step) -> None:
    """Two devices at work at once, each in its order."""
    with Logical(2) as devices:
        session = step.session(devices, by_groups(step, 2), list(step.captured.graph.index))
        require_same(step, float(session.run()[0]), session.variables())
        spans = defaultdict(list)
        for device in session.traced()[1].step_stats.dev_stats:
            for node in device.node_stats:
                if not node.node_name.startswith((SCOPE, "_")) and not re.search("Const|VarHandle", node.timeline_label):
                    start = node.all_start_nanos + node.op_start_rel_nanos
                    spans[device.device].append((start, node.all_start_nanos + node.op_end_rel_nanos))
    assert len(spans) == 2
    for ran in spans.values():
        ran.sort()
        assert all(end <= start for (_, end), (start, _) in zip(ran, ran[1:], strict=False))


def test_two_plans_on_the_same_servers_share_nothing(step: Step, servers: Servers) -> None:
    one, other = step.session(servers, [0] * len(step.captured.graph)), step.session(servers, by_groups(step, 2))
    for _ in range(3):
        one.run()
    require_same(step, float(other.run()[0]), other.variables())
    one.close()
    other.run()
    other.close()


def test_a_variable_whose_ops_are_apart_is_refused(step: Step) -> None:
    where = dict.fromkeys(step.captured.graph.index, 0)
    grouped = [op.id for op in step.captured.graph.ops if op.colocation is not None]
    where[grouped[0]] = 1
    with pytest.raises(PlanError, match="are on devices .0, 1.; put them on one"):
        placed_graph(step.captured, where, ["/cpu:0", "/cpu:1"])


def test_an_op_without_a_device_is_refused(step: Step) -> None:
    where = dict.fromkeys(step.captured.graph.index, 0)
    first = next(iter(where))
    for bad in (None, 2):
        where[first] = bad
        with pytest.raises(PlanError, match=f"op '{first}' is on device {bad}; expected one of the 2 devices"):
            placed_graph(step.captured, where, ["/cpu:0", "/cpu:1"])
