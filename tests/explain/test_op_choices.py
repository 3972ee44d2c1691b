"""An op on other devices: the same numbers as plans made by hand, and why it is where it is."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.errors import OptionError
from baechi_ext.explain import op_choices
from baechi_ext.explain.op_choices import BEST, EQUAL, NO_OTHER, NO_ROOM, PINNED, WORSE, Mover
from baechi_ext.ir import Plan
from baechi_ext.simulate import simulate
from tests.build import cluster_of, graph_of, with_memory
from tests.explain.plans import plan_of, plans


@given(plan=plans(), data=st.data())
def test_choices_are_plans_with_the_op_elsewhere(plan: Plan, data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(plan.graph.ops))
    found = op_choices(plan, op.id)
    together = {op.id} | {other.id for other in plan.graph.ops if op.colocation is not None and other.colocation == op.colocation}
    assert [plan.graph.ops[v].id for v in found.asked] == [op.id]
    assert {plan.graph.ops[v].id for v in found.moved} == together
    for choice in found.choices:
        placement = [choice.device if other.id in together else d for other, d in zip(plan.graph.ops, plan.placement, strict=True)]
        timeline = simulate(plan.graph, plan.cluster, placement, plan.priority)
        assert (choice.step_us, choice.peak_memory_bytes) == (timeline.makespan_us, timeline.peak_memory_bytes)
        limits = [device.memory_bytes for device in plan.cluster.devices]
        assert choice.fits is all(limit is None or peak <= limit for peak, limit in zip(timeline.peak_memory_bytes, limits, strict=True))
        sent = [plan.graph.tensors[x.tensor] for x in timeline.transfers]
        own = [t for t in sent if together & {plan.graph.ops[v].id for v in (t.producer, *t.readers)}]
        assert (choice.transfers, choice.bytes_moved) == (len(own), sum(t.bytes for t in own))
    assert len(found.choices) == len(plan.cluster)
    json.dumps(found.to_json(), allow_nan=False)


def test_moving_everything_moves_every_transfer() -> None:
    graph = graph_of({"a": 10, "b": 10}, ("a", "b", 8))
    found = Mover(plan_of(graph, cluster_of(2), (0, 1))).choices([0, 1])
    assert found.here == (1, 1)
    assert found.device is None
    assert found.step_us == 28
    assert [(c.step_us, c.transfers, c.bytes_moved) for c in found.choices] == [(20, 0, 0), (20, 0, 0)]
    assert found.verdict == WORSE


# Why an op is where it is


def test_reasons() -> None:
    # a and b are independent; c reads b. c beside a: 10 + 5, and 20 bytes to wait for.
    graph = graph_of({"a": 10, "b": 10, "c": 5}, ("b", "c", 20))
    plan = plan_of(graph, cluster_of(2), (0, 1, 1))
    c = op_choices(plan, "c")
    assert (c.verdict, c.device, c.step_us, c.critical_us) == (BEST, 1, 15, 5)
    assert c.best is not None
    assert (c.best.device, c.best.step_us, c.best.transfers, c.best.bytes_moved) == (0, 35, 1, 20)
    assert op_choices(plan_of(graph, cluster_of(2), (0, 1, 0)), "c").verdict == WORSE
    assert op_choices(plan_of(graph_of({"a": 1}), cluster_of(2), (0,)), "a").verdict == EQUAL
    assert op_choices(plan_of(graph, cluster_of(1), (0, 0, 0)), "a").verdict == NO_OTHER


def test_there_is_no_room_elsewhere() -> None:
    graph = graph_of({"a": 1, "b": 1}, persistent_bytes={"a": 60, "b": 60})
    found = op_choices(plan_of(graph, with_memory(cluster_of(2), 100), (0, 1)), "a")
    assert (found.verdict, found.best) == (NO_ROOM, None)
    assert [(c.fits, c.peak_memory_bytes) for c in found.choices] == [(True, (60, 60)), (False, (0, 120))]


def test_a_pinned_group() -> None:
    graph = graph_of({"a": 1, "b": 1, "c": 1}, colocation={"a": "g", "b": "g"})
    graph = graph.replace_ops([replace(op, pin=1) if op.id == "b" else op for op in graph.ops])
    found = op_choices(plan_of(graph, cluster_of(2), (1, 1, 0)), "a")
    assert (found.verdict, found.pin, found.moved, found.here) == (PINNED, 1, (0, 1), (0, 2))


# What is asked for


def test_names_are_those_of_pins() -> None:
    graph = graph_of({"a": 1, "b": 2, "c": 4}, module={"a": "net.one", "b": "net.two"})
    plan = plan_of(graph, cluster_of(2), (0, 0, 1))
    assert op_choices(plan, "net").asked == (0, 1)
    assert op_choices(plan, "net.t*").asked == (1,)
    assert op_choices(plan, "b").to_json()["compute_us"] == 2
    assert op_choices(plan, "net").to_json()["on_devices"] == [2, 0]
    with pytest.raises(OptionError, match="'x' matches nothing: no module, parameter, op or colocation group .* its modules are net"):
        op_choices(plan, "x")


def test_an_ops_id_goes_before_patterns() -> None:
    graph = graph_of({"a": 1, "a*": 1, "ab": 1})
    assert op_choices(plan_of(graph, cluster_of(2), (0, 0, 0)), "a*").asked == (1,)
