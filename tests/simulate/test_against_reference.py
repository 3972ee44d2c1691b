"""The simulator against an independent, slow one (tests/oracle.py) on random graphs, clusters, placements and priorities.

Most numbers are small integers or halves, so that sums are exact and ties are frequent.
"""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baechi_ext.ir import Cluster, Device, Link, Op, OpGraph
from baechi_ext.simulate import Simulator, Timeline, simulate
from tests import oracle
from tests.simulate.strategies import cases

Case = tuple[OpGraph, Cluster]
SCALES = st.sampled_from([1.0, 0.1, 1 / 3, 1e-9, 1e9, 1e13])


def draw_plan(data: st.DataObject, graph: OpGraph, cluster: Cluster) -> tuple[list[int], list[int] | None]:
    n = len(graph)
    placement = data.draw(st.lists(st.integers(0, len(cluster) - 1), min_size=n, max_size=n), label="placement")
    priority = data.draw(st.none() | st.lists(st.integers(-1, 3), min_size=n, max_size=n), label="priority")
    return placement, priority


@settings(max_examples=200)
@given(cases(), st.data())
def test_the_same_timeline(case: Case, data: st.DataObject) -> None:
    graph, cluster = case
    placement, priority = draw_plan(data, graph, cluster)
    timeline = simulate(graph, cluster, placement, priority)
    expected = oracle.simulate(graph, cluster, placement, priority)
    check_equal(timeline, expected)
    assert list(timeline.peak_memory_bytes) == oracle.peak_bytes(graph, cluster, placement, expected)
    for device, busy in enumerate(timeline.busy_us):
        assert busy == sum(e - s for s, e, d in zip(expected.start_us, expected.end_us, placement, strict=True) if d == device)


def check_equal(timeline: Timeline, expected: oracle.Step) -> None:
    """To the last bit."""
    assert repr(timeline.makespan_us) == repr(expected.makespan_us)
    assert list(map(repr, timeline.start_us)) == list(map(repr, expected.start_us))
    assert list(timeline.end_us) == expected.end_us
    assert {(t.tensor, t.target): (t.start_us, t.end_us) for t in timeline.transfers} == expected.copies
    assert len(timeline.transfers) == len(expected.copies)


def rescaled(case: Case, data: st.DataObject) -> Case:
    """The case with times and links that no float holds exactly, up to those that others are lost in."""
    graph, cluster = case
    ops = [replace(op, compute_us=op.compute_us * data.draw(SCALES)) for op in graph.ops]
    costs = ("us_per_byte", "latency_us", "send_us", "send_us_per_byte", "receive_us", "receive_us_per_byte", "issue_us")

    def scaled(link: Link) -> Link:
        return Link(**{name: getattr(link, name) * data.draw(SCALES) for name in costs})

    devices = tuple(replace(d, speed=d.speed * data.draw(st.sampled_from([1.0, 1.0, 0.7, 3.3]))) for d in cluster.devices)
    pairs = {ends: scaled(link) for ends, link in cluster.pairs.items()}
    return graph.replace_ops(ops), replace(cluster, devices=devices, default=scaled(cluster.default), pairs=pairs)


@settings(max_examples=150)
@given(cases(), st.data())
def test_the_same_timeline_with_any_costs(case: Case, data: st.DataObject) -> None:
    graph, cluster = rescaled(case, data)
    if data.draw(st.booleans()):
        graph = graph.replace_ops([replace(op, temporary_bytes=op.temporary_bytes / 3 + 1e-9) for op in graph.ops])
    simulator = Simulator(graph, cluster)
    assert simulator.graph.tails_us == tuple(oracle.longest_paths_us(graph))
    for _ in range(2):
        placement, priority = draw_plan(data, graph, cluster)
        timeline = simulator.run(placement, priority)
        check_equal(timeline, oracle.simulate(graph, cluster, placement, priority))
        assert simulator.evaluate(placement, priority) == (timeline.makespan_us, timeline.peak_memory_bytes)


@settings(max_examples=200)
@given(cases(), st.data())
def test_free_transfers_take_no_time(case: Case, data: st.DataObject) -> None:
    graph, cluster = rescaled(case, data)
    placement, priority = draw_plan(data, graph, cluster)
    simulator = Simulator(graph, cluster)
    plain = simulator.run(placement, priority)
    free = {(t.tensor, t.target) for t in plain.transfers if data.draw(st.booleans())}
    check_equal(simulator.run(placement, priority, free), oracle.simulate(graph, cluster, placement, priority, free))
    assert simulator.run(placement, priority) == plain


@pytest.mark.parametrize("parallel", [False, True])
def test_a_large_graph_with_a_tensor_that_everybody_reads(parallel: bool) -> None:
    n, k = 600, 14
    ops = [Op(f"o{v}", compute_us=(v * 37) % 11 / 7, persistent_bytes=v, output_bytes=v % 50, temporary_bytes=v % 3) for v in range(n)]
    edges = [("o0", f"o{v}", 64, "all") for v in range(1, n)]
    edges += [(f"o{v}", f"o{v + 1 + (v * v) % 5}", v % 13, f"x{v % 2}") for v in range(n - 6)]
    edges += [("o1", f"o{v}", 5, f"own{v}") for v in range(2, n)]
    graph = OpGraph.from_edges(ops, edges)
    cluster = Cluster(tuple(Device(f"d{i}", speed=1 + i / 10) for i in range(k)), Link(0.01, 0.1), parallel_transfers=parallel)
    simulator = Simulator(graph, cluster)
    for step in (1, 3, 5):
        placement = [(v * step) % k for v in range(n)]
        for priority in (None, [(v * 7) % 40 for v in range(n)]):
            check_equal(simulator.run(placement, priority), oracle.simulate(graph, cluster, placement, priority))


def test_graphs_without_ops_or_edges() -> None:
    for ops in ([], [Op("a", compute_us=3.0)]):
        graph, cluster = OpGraph.from_edges(ops, []), Cluster.uniform(2)
        check_equal(simulate(graph, cluster, [1] * len(ops)), oracle.simulate(graph, cluster, [1] * len(ops)))


@given(cases(), st.data())
def test_what_every_timeline_holds(case: Case, data: st.DataObject) -> None:
    graph, cluster = case
    placement, priority = draw_plan(data, graph, cluster)
    timeline = simulate(graph, cluster, placement, priority)
    check_order(timeline)
    again = simulate(graph, cluster, placement, [timeline.started.index(v) for v in range(len(graph))])
    assert again.start_us == timeline.start_us  # a plan runs the same with its own order of starts as priorities


def check_order(timeline: Timeline) -> None:
    graph, rank = timeline.graph, {v: i for i, v in enumerate(timeline.started)}
    assert sorted(timeline.started) == list(range(len(graph)))
    assert all(rank[t.producer] < rank[w] for t in graph.tensors for w in t.readers)
    for order in timeline.device_order():
        assert all(timeline.end_us[v] <= timeline.start_us[w] for v, w in zip(order, order[1:], strict=False))


@given(cases(), st.data())
def test_a_simulator_can_be_used_again_and_a_graph_can_be_saved(case: Case, data: st.DataObject) -> None:
    graph, cluster = case
    plan, other = draw_plan(data, graph, cluster), draw_plan(data, graph, cluster)
    simulator = Simulator(graph, cluster)
    first = simulator.run(*plan)
    simulator.run(*other)
    assert simulator.run(*plan) == first
    read = OpGraph.from_json(json.loads(json.dumps(graph.to_json())))
    from_file = simulate(read, Cluster.from_json(json.loads(json.dumps(cluster.to_json()))), *plan)
    assert (from_file.start_us, from_file.end_us, from_file.busy_us) == (first.start_us, first.end_us, first.busy_us)
    assert from_file.peak_memory_bytes == first.peak_memory_bytes
