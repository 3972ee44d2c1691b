"""m_etf_reserve and m_sct_reserve: what is reserved, how long, and what that changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.ir import Cluster, Link
from baechi_ext.place.etf import reserving
from baechi_ext.place.list_scheduler import runner
from baechi_ext.place.registry import place
from tests.build import cluster_of, graph_of
from tests.group.training_graphs import any_graphs, training_graphs
from tests.place.training import branchy_blocks

PAIRS = graph_of(
    {"fa": 1, "fb": 1, "ba": 1, "bb": 1},
    ("fa", "ba", 2),
    ("fb", "bb", 2),
    ("fa", "fb", 1, "across"),
    ("bb", "ba", 0),
    persistent_bytes={"fa": 1, "fb": 1},
    temporary_bytes={"fa": 1, "ba": 5, "bb": 5},
    output_bytes={"ba": 1},
    colocation={"fa": "A", "ba": "A", "fb": "B", "bb": "B"},
)


def test_the_reserve_is_the_largest_working_memory_and_the_largest_output() -> None:
    """A: 5 + 1 of ba that is no tensor, and fa's two tensors of 2 + 1; B: 5 and 2."""
    graph = reserving(PAIRS)
    reserves = {(t.producer, t.readers): t.bytes for t in graph.tensors if t.name == "reserve"}
    assert reserves == {(0, (2,)): 6 + 3, (1, (3,)): 5 + 2}
    assert [(op.temporary_bytes, op.output_bytes, op.persistent_bytes) for op in graph.ops] == [(0, 0, 1), (0, 0, 1), (0, 0, 0), (0, 0, 0)]


def test_groups_that_could_run_in_turn_are_spread() -> None:
    """One after the other they need 5 of working memory at a time; reserved, each keeps its own until its last op has ended."""
    cluster = cluster_of(2, memory_bytes=16, latency_us=1)
    assert set(runner(PAIRS, cluster, None)(1e6, False, None).placement) == {0}
    assert set(runner(reserving(PAIRS), cluster, None)(1e6, False, None).placement) == {0, 1}


def test_a_reserve_is_given_back() -> None:
    """Three groups, one after the other, on a device with room for one reserve."""
    graph = graph_of(
        {f"{g}{i}": 1 for g in "xyz" for i in range(2)},
        *(("x0", "x1", 0), ("x1", "y0", 0), ("y0", "y1", 0), ("y1", "z0", 0), ("z0", "z1", 0)),
        temporary_bytes={f"{g}1": 6 for g in "xyz"},
        colocation={f"{g}{i}": g for g in "xyz" for i in range(2)},
    )
    assert runner(reserving(graph), cluster_of(2, memory_bytes=8, latency_us=9), None)(0.0, False, None).placement == (0,) * 6


@given(st.one_of(training_graphs(), any_graphs()))
def test_the_order_of_ops_stays_possible(graph) -> None:  # type: ignore[no-untyped-def]
    scheduled = reserving(graph)
    assert [op.id for op in scheduled.ops] == [op.id for op in graph.ops]
    assert len(scheduled.tensors) == len(graph.tensors) + sum(len(members) > 1 for members in graph.groups.values())


@pytest.mark.parametrize("method", ["m_etf", "m_sct"])
def test_without_limits_nothing_changes(method: str) -> None:
    graph, cluster = branchy_blocks(4, 3, 1), Cluster.uniform(3, link=Link(1e-4, 30))
    plain, reserved = place(method, graph, cluster), place(f"{method}_reserve", graph, cluster)
    assert (plain.plan.placement, plain.predicted_step_us) == (reserved.plan.placement, reserved.predicted_step_us)
