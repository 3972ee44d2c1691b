"""Small graphs: `auto` proves its plan, or that there is none."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baechi_ext.errors import InfeasibleError
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.place.auto import exhaust
from baechi_ext.place.common import PlaceOptions, begin
from baechi_ext.place.exact.search import Search
from baechi_ext.place.registry import place
from baechi_ext.place.trial import Trial
from tests import oracle
from tests.build import cluster_of, graph_of, with_memory
from tests.simulate.strategies import clusters, graphs


@settings(max_examples=40)
@given(graphs(max_ops=4), clusters(max_devices=3), st.sampled_from([None, 8, 14, 20]))
def test_small_graphs_get_the_optimum_and_a_proof(graph: OpGraph, cluster: Cluster, memory_bytes: int | None) -> None:
    cluster = with_memory(cluster, memory_bytes)
    best = oracle.optimum(graph, cluster, with_orders=True)
    try:
        result = place("auto", graph, cluster, PlaceOptions(time_limit_seconds=2))
    except InfeasibleError as e:
        assert (e.status, best.makespan_us) == ("infeasible", float("inf"))
    else:
        assert result.predicted_step_us == pytest.approx(best.makespan_us)
        assert (result.status, result.lower_bound_us) == ("optimal", pytest.approx(best.makespan_us))
        assert oracle.violations(graph, cluster, result.plan.placement, result.plan.priority) == []


WAITS = graph_of(
    {"a": 1, "m": 1, "r": 1},
    ("a", "r", 6, "x"), ("a", "m", 1, "y"), ("m", "r", 1, "z"),
    temporary_bytes={"m": 6}, colocation=dict.fromkeys("amr", "g"),
)  # fmt: skip
"""a's tensor of 6 bytes waits for r while m needs 8; each op alone fits in 10."""


def test_that_there_is_no_plan_is_proven() -> None:
    with pytest.raises(InfeasibleError, match="no plan can exist: auto tried every placement and order") as e:
        place("auto", WAITS, cluster_of(2, memory_bytes=10), PlaceOptions(time_limit_seconds=1))
    assert e.value.status == "infeasible"


def test_what_is_not_small_is_left_as_it_is() -> None:
    graph = graph_of({f"o{i}": 1 + i for i in range(60)})
    task = begin("auto", graph, cluster_of(2), PlaceOptions())
    start = Trial((0,) * 60, None, task.simulator)
    assert exhaust(task, start) == (start, False, False)


def test_an_interrupt_leaves_the_best_plan_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of({f"o{i}": 7 + i % 5 for i in range(30)}, *((f"o{i}", f"o{j}", 5) for i in range(25) for j in (i + 2, i + 5)))
    run, found = Search.run, []

    def interrupted(search: Search, best_us: float) -> Trial | None:
        if found:
            raise KeyboardInterrupt
        found.append(run(search, best_us))
        return found[0]

    monkeypatch.setattr(Search, "run", interrupted)
    result = place("auto", graph, cluster_of(3, 0.0, 4.0))
    single = place("single", graph, cluster_of(3, 0.0, 4.0))
    assert result.interrupted
    assert result.predicted_step_us < single.predicted_step_us
