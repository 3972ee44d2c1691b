"""Graphs that are odd but legal: every method gives a valid plan with finite times, and its bound stays below."""

import math

import pytest

from baechi_ext.ir import Cluster, Link
from baechi_ext.place.common import PlaceOptions
from baechi_ext.place.registry import place
from tests import oracle
from tests.build import cluster_of, graph_of
from tests.place.instances import RUNNABLE

FAN = {f"f{i}": float(1 + i % 3) for i in range(120)}
GRAPHS = {
    "empty": graph_of({}),
    "one op": graph_of({"a": 5}),
    "no op takes time": graph_of(dict.fromkeys("abcd", 0), ("a", "b", 3), ("b", "c", 0), ("a", "d", 3)),
    "isolated ops": graph_of({f"i{v}": v for v in range(9)}),
    "tiny beside huge": graph_of(
        {"a": 1e12, "b": 1e-9, "c": 1e-9, "d": 1e12, "e": 3},
        ("a", "b", 1), ("b", "c", 1), ("c", "d", 1), ("a", "e", 1),
    ),
    "tensors of no bytes": graph_of({"a": 2, "b": 3, "c": 4}, ("a", "b", 0), ("a", "c", 0)),
    "many into one": graph_of({**FAN, "sink": 1.0}, *[(name, "sink", 5) for name in FAN]),
    "one into many": graph_of({"source": 1.0, **FAN}, *[("source", name, 5) for name in FAN]),
    "many tensors into one": graph_of({"a": 1.0, "b": 1.0}, *[("a", "b", 2, f"t{i}") for i in range(120)]),
}  # fmt: skip
CLUSTERS = {
    "two": cluster_of(2),
    "more devices than ops": Cluster.uniform(12, link=Link(1e-3, 2.0)),
    "unequal": cluster_of(2, 1.0, 1e-3, speeds=(0.1, 10.0)),
}


TRIED = [(method, name) for name in GRAPHS for method in RUNNABLE if method != "expert"]
"""The expert needs hints."""
SEARCHES = ("auto", "placeto", "refine")
"""They take all the time they get, however small the graph."""


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize(("method", "name"), [(m, name) for m, name in TRIED if m != "exact" or len(GRAPHS[name]) <= 100])
def test_every_method_copes(name: str, cluster: Cluster, method: str) -> None:
    graph = GRAPHS[name]
    plan = place(method, graph, cluster, PlaceOptions(time_limit_seconds=0.2 if method in SEARCHES else 2)).plan
    assert math.isfinite(plan.predicted_step_us)
    assert 0 <= plan.lower_bound_us <= plan.predicted_step_us
    assert len(plan.placement) == len(graph)
    if len(graph) <= 100:
        assert oracle.violations(graph, cluster, plan.placement, plan.priority) == []
        assert plan.predicted_step_us == pytest.approx(oracle.simulate(graph, cluster, plan.placement, plan.priority).makespan_us)
