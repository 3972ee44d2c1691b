"""The simulator against an independent, slow one (tests/oracle.py) on random graphs, clusters, placements and priorities.

All numbers are small integers or halves, so that sums are exact and ties are frequent.
"""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.simulate import Simulator, Timeline, simulate
from tests import oracle
from tests.simulate.strategies import cases

Case = tuple[OpGraph, Cluster]


def draw_plan(data: st.DataObject, graph: OpGraph, cluster: Cluster) -> tuple[list[int], list[int] | None]:
    n = len(graph)
    placement = data.draw(st.lists(st.integers(0, len(cluster) - 1), min_size=n, max_size=n), label="placement")
    priority = data.draw(st.none() | st.lists(st.integers(-1, 3), min_size=n, max_size=n), label="priority")
    return placement, priority


@settings(max_examples=400)
@given(cases(), st.data())
def test_the_same_timeline(case: Case, data: st.DataObject) -> None:
    graph, cluster = case
    placement, priority = draw_plan(data, graph, cluster)
    timeline = simulate(graph, cluster, placement, priority)
    expected = oracle.simulate(graph, cluster, placement, priority)
    assert timeline.makespan_us == expected.makespan_us
    assert list(timeline.start_us) == expected.start_us
    assert list(timeline.end_us) == expected.end_us
    assert {(t.tensor, t.target): (t.start_us, t.end_us) for t in timeline.transfers} == expected.copies
    assert len(timeline.transfers) == len(expected.copies)
    assert list(timeline.peak_memory_bytes) == oracle.peak_bytes(graph, cluster, placement, expected)
    for device, busy in enumerate(timeline.busy_us):
        assert busy == sum(e - s for s, e, d in zip(expected.start_us, expected.end_us, placement, strict=True) if d == device)


@given(cases(), st.data())
def test_what_every_timeline_holds(case: Case, data: st.DataObject) -> None:
    graph, cluster = case
    placement, priority = draw_plan(data, graph, cluster)
    timeline = simulate(graph, cluster, placement, priority)
    check_order(timeline)
    check_critical_path(timeline)
    again = simulate(graph, cluster, placement, [timeline.started.index(v) for v in range(len(graph))])
    assert again.start_us == timeline.start_us  # a plan runs the same with its own order of starts as priorities


def check_order(timeline: Timeline) -> None:
    graph, rank = timeline.graph, {v: i for i, v in enumerate(timeline.started)}
    assert sorted(timeline.started) == list(range(len(graph)))
    assert all(rank[t.producer] < rank[w] for t in graph.tensors for w in t.readers)
    for order in timeline.device_order():
        assert all(timeline.end_us[v] <= timeline.start_us[w] for v, w in zip(order, order[1:], strict=False))


def check_critical_path(timeline: Timeline) -> None:
    graph, path = timeline.graph, timeline.critical_path()
    assert timeline.end_us[path[-1]] == timeline.makespan_us
    for v, w in zip(path, path[1:], strict=False):
        assert timeline.end_us[v] <= timeline.start_us[w]
        assert v in graph.predecessors[w] or timeline.placement[v] == timeline.placement[w]


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
