"""The compiled simulation against the simulator, which shares no code with it. All numbers are small, so that sums are exact."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from baechi_ext.ir import Cluster, Link, OpGraph
from baechi_ext.simulate import simulate
from benchmarks.arrays import Decision, make_problem, make_state
from benchmarks.families import Case
from benchmarks.kernel import run
from tests.simulate.strategies import cases


def compiled(graph: OpGraph, cluster: Cluster, placement: list[int], priority: list[int] | None) -> tuple[float, list[float], list[int]]:
    """Makespan, peaks and order of starts."""
    problem = make_problem(graph, cluster)
    state = make_state(problem)
    order = np.array(placement if priority is None else priority, dtype=np.float64)
    plan = Decision(np.array(placement, dtype=np.int64), order, priority is not None)
    run(problem, state, plan)  # a state can be used again
    makespan_us = run(problem, state, plan)
    return makespan_us, state.peak.tolist(), state.started.tolist()


@settings(max_examples=400, deadline=None, derandomize=True)
@given(cases(), st.data())
def test_the_same_as_the_simulator(case: tuple[OpGraph, Cluster], data: st.DataObject) -> None:
    graph, cluster = case
    n = len(graph)
    placement = data.draw(st.lists(st.integers(0, len(cluster) - 1), min_size=n, max_size=n), label="placement")
    priority = data.draw(st.none() | st.lists(st.integers(-1, 3), min_size=n, max_size=n), label="priority")
    expected = simulate(graph, cluster, placement, priority)
    makespan_us, peaks, started = compiled(graph, cluster, placement, priority)
    assert makespan_us == expected.makespan_us
    assert peaks == list(expected.peak_memory_bytes)
    assert started == list(expected.started)


def test_the_same_on_a_large_graph_with_links_that_occupy_devices() -> None:
    case = Case("training", 1000, 1.0, "speeds", "loose", seed=3)
    for parallel in (False, True):
        cluster = replace(case.cluster, default=replace(case.cluster.default, send_us=5.0, receive_us=7.0), parallel_transfers=parallel)
        placement = [v * 7 % 4 for v in range(len(case.graph))]
        expected = simulate(case.graph, cluster, placement)
        makespan_us, peaks, started = compiled(case.graph, cluster, placement, None)
        assert abs(makespan_us / expected.makespan_us - 1) < 1e-9
        assert peaks == list(expected.peak_memory_bytes)
        assert started == list(expected.started)


def test_no_ops() -> None:
    assert compiled(OpGraph.from_edges([], []), Cluster.uniform(2, link=Link(1, 1)), [], None) == (0.0, [0.0, 0.0], [])
