"""Explanations of a plan: transfers, idle devices, memory and what-ifs, by hand and against plain simulations."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.cost import scale_links
from baechi_ext.explain import PlanExplanation, explain_plan
from baechi_ext.explain.memory import device_memories, memory_courses
from baechi_ext.ir import Plan
from baechi_ext.simulate import Simulator, simulate
from tests.build import cluster_of, graph_of, with_memory
from tests.explain.plans import plan_of, plans


def gaps(explained: PlanExplanation, device: int) -> list[tuple]:
    ids = [op.id for op in explained.timeline.graph.ops]
    return [
        (gap.start_us, gap.end_us, None if gap.op is None else ids[gap.op], gap.producer_us, gap.queue_us, gap.transfer_us)
        for gap in explained.idle[device].gaps
    ]


# Transfers


def test_what_a_step_gains_without_each_transfer() -> None:
    # a 0-1; its 4 bytes take 1-5 to b, which runs 5-6; c's 2 bytes take 7-9 to d, which runs 9-10: c runs 1-7 after a.
    graph = graph_of({"a": 1, "b": 1, "c": 6, "d": 1}, ("a", "b", 4), ("c", "d", 2))
    costs = explain_plan(plan_of(graph, cluster_of(2), (0, 1, 0, 1), (0, 1, 2, 3))).transfers
    tensors = [graph.ops[graph.tensors[x.transfer.tensor].producer].id for x in costs.by_gain]
    assert tensors == ["c", "a"]
    assert [(x.gain_us, x.us, x.queue_us, x.is_critical) for x in costs.by_gain] == [(2, 2, 0, True), (0, 4, 0, False)]
    assert [x.us for x in costs.by_duration] == [4, 2]
    assert (costs.tried, costs.count) == (2, 2)


@given(plan=plans(), data=st.data())
def test_free_transfers_are_those_of_links_that_cost_nothing(plan: Plan, data: st.DataObject) -> None:
    graph, cluster = plan.graph, plan.cluster
    simulator, step = Simulator(graph, cluster), simulate(graph, cluster, plan.placement, plan.priority)
    every = {(x.tensor, x.target) for x in step.transfers}
    free = simulate(graph, scale_links(cluster, 0.0), plan.placement, plan.priority)
    freed = simulator.run(plan.placement, plan.priority, every)
    assert (freed.start_us, freed.end_us) == (free.start_us, free.end_us)
    assert simulator.run(plan.placement, plan.priority, ()).to_json() == step.to_json()
    if len(every) == 1:
        assert explain_plan(plan).transfers.by_gain[0].gain_us == step.makespan_us - free.makespan_us


@given(plan=plans())
def test_gains_are_those_of_simulations(plan: Plan) -> None:
    costs = explain_plan(plan).transfers
    simulator, step_us = Simulator(plan.graph, plan.cluster), simulate(plan.graph, plan.cluster, plan.placement, plan.priority).makespan_us
    for x in costs.by_gain:
        free = {(x.transfer.tensor, x.transfer.target)}
        assert x.gain_us == step_us - simulator.run(plan.placement, plan.priority, free).makespan_us
    assert costs.tried == costs.count
    assert [x.gain_us for x in costs.by_gain] == sorted((x.gain_us or 0 for x in costs.by_gain), reverse=True)


# Idle devices


def test_what_idle_devices_wait_for() -> None:
    # Device 0: a 0-3, b 3-4. Links: a's 5 bytes 3-8, then b's 2 (requested at 4) 8-10. Device 1: c 8-9, d 10-12. Device 0 ends at 4.
    graph = graph_of({"a": 3, "b": 1, "c": 1, "d": 2}, ("a", "c", 5), ("b", "d", 2))
    explained = explain_plan(plan_of(graph, cluster_of(2), (0, 0, 1, 1), (0, 1, 2, 3)))
    assert gaps(explained, 0) == [(4, 12, None, 0, 0, 0)]
    assert gaps(explained, 1) == [(0, 8, "c", 3, 0, 5), (9, 10, "d", 0, 0, 1)]
    first, second = (idle.waits_us for idle in explained.idle)
    assert (first["tail_us"], second["producer_us"], second["transfer_us"]) == (8, 3, 6)


def test_a_device_waits_for_a_busy_link() -> None:
    # a 0-1 sends 6 bytes to b on device 1 from 1 to 7; c 1-2 sends 2 bytes to d on device 2, from 7 to 9: the sender is busy.
    graph = graph_of({"a": 1, "b": 1, "c": 1, "d": 1}, ("a", "b", 6), ("c", "d", 2))
    explained = explain_plan(plan_of(graph, cluster_of(3), (0, 1, 0, 2), (0, 1, 2, 3)))
    assert gaps(explained, 2) == [(0, 9, "d", 2, 5, 2)]
    assert (explained.idle[2].waits_us["queue_us"], explained.idle[2].us) == (5, 9)


@given(plan=plans())
def test_idle_time_is_what_is_not_busy(plan: Plan) -> None:
    explained = explain_plan(plan)
    for idle, busy_us in zip(explained.idle, explained.timeline.busy_us, strict=True):
        assert idle.us == pytest.approx(explained.timeline.makespan_us - busy_us)
        assert sum(idle.waits_us.values()) == pytest.approx(idle.us)
        for gap in idle.gaps:
            assert min(gap.producer_us, gap.queue_us, gap.transfer_us) >= 0
            assert gap.op is None or gap.producer is not None


# Memory


def test_what_the_peak_consists_of() -> None:
    # Device 1 holds 100 for b and, while b runs from 5 to 7, a's copy of 4 and 30 to work with; b's own tensor of 2 goes to c.
    graph = graph_of(
        {"a": 1, "b": 2, "c": 1}, ("a", "b", 4), ("b", "c", 2),
        persistent_bytes={"b": 100}, temporary_bytes={"b": 30},
    )  # fmt: skip
    timeline = simulate(graph, with_memory(cluster_of(2), 200), (0, 1, 1))
    memory = device_memories(timeline)[1]
    assert (memory.peak_bytes, memory.limit_bytes, memory.share, memory.at_us) == (136, 200, 0.68, 5)
    assert memory.by_kind == {"copy": 4, "tensor": 2, "working": 30, "persistent": 100}
    assert [(h.kind, graph.ops[h.op].id, h.tensor, h.bytes) for h in memory.holders] == [
        ("persistent", "b", None, 100),
        ("working", "b", None, 30),
        ("copy", "a", "", 4),
        ("tensor", "b", "", 2),
    ]
    assert memory_courses(timeline)[1] == ((0, 100), (1, 104), (5, 136), (7, 102), (8, 100))


def test_without_a_limit_there_is_no_share() -> None:
    memory = device_memories(simulate(graph_of({"a": 1}), cluster_of(1), (0,)))[0]
    assert (memory.limit_bytes, memory.share, memory.peak_bytes, memory.holders) == (None, None, 0, ())


@given(plan=plans())
def test_what_is_held_adds_up_to_the_peak(plan: Plan) -> None:
    timeline = simulate(plan.graph, plan.cluster, plan.placement, plan.priority)
    for memory, course in zip(device_memories(timeline), memory_courses(timeline), strict=True):
        assert sum(memory.by_kind.values()) == memory.peak_bytes == max(size for _, size in course)
        assert next(size for at_us, size in course if at_us == memory.at_us) == memory.peak_bytes
        assert sum(holder.bytes for holder in memory.holders) <= memory.peak_bytes


# What-ifs


def test_what_would_change_the_step() -> None:
    # a 0-10, 8 bytes and 2 of latency take 10-20, b runs 20-30.
    graph = graph_of({"a": 10, "b": 10}, ("a", "b", 8))
    steps = {w.change: w.step_us for w in explain_plan(plan_of(graph, cluster_of(2, latency_us=2.0), (0, 1))).what_ifs}
    assert steps == {
        "links twice as fast": 25,
        "links twice as slow": 40,
        "half the latency of links": 29,
        "twice the bandwidth of links": 26,
        "links that take no time": 20,
        "device:0 10% faster": pytest.approx(20 + 10 / 1.1),
        "device:1 10% faster": pytest.approx(20 + 10 / 1.1),
        "all devices 10% faster": pytest.approx(10 + 20 / 1.1),
    }


def test_links_that_nothing_uses_change_nothing() -> None:
    explained = explain_plan(plan_of(graph_of({"a": 11}), cluster_of(2), (1,)))
    assert [(w.change, w.device, w.gain_us) for w in explained.what_ifs] == [("device:1 10% faster", 1, pytest.approx(1))]
    assert explained.transfers.count == 0


# All of it


@given(plan=plans())
def test_every_explanation_is_json(plan: Plan) -> None:
    value = json.loads(json.dumps(explain_plan(plan).to_json(), allow_nan=False))
    assert value["step_us"] == simulate(plan.graph, plan.cluster, plan.placement, plan.priority).makespan_us
    assert sum(part["share"] for part in value["critical_path"]["parts"]) == pytest.approx(1 if value["step_us"] else 0)
    ids = {op.id for op in plan.graph.ops}
    assert {stretch["op"] for stretch in value["critical_path"]["stretches"]} <= ids


def test_an_empty_plan_is_explained() -> None:
    explained = explain_plan(plan_of(graph_of({}), cluster_of(2), ()))
    assert (explained.timeline.makespan_us, explained.critical_path, explained.what_ifs) == (0, (), ())


def test_large_graphs_are_tried_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baechi_ext.explain.sensitivity.OPS_TRIED", 0)
    chain = [(f"n{i}", f"n{i + 1}", i) for i in range(1, 20)]
    graph = graph_of({f"n{i}": 1 for i in range(1, 21)}, *chain)
    costs = explain_plan(plan_of(graph, cluster_of(2), [i % 2 for i in range(20)])).transfers
    assert (costs.tried, costs.count) == (10, 19)
    assert [x.gain_us for x in costs.by_gain] == list(range(19, 9, -1))
