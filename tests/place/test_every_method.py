"""Rules for every method of the registry, whoever wrote it: on random small graphs, at the edges of what a graph may be, and on
clusters of unequal devices and links. The oracle judges; it shares no code with any method."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baechi_ext.errors import InfeasibleError
from baechi_ext.ir import Cluster, Device, Link, OpGraph
from baechi_ext.place.common import PlaceOptions, PlanResult
from baechi_ext.place.registry import place
from baechi_ext.simulate import lower_bound_us, simulate
from tests import oracle
from tests.build import cluster_of, graph_of
from tests.place.instances import RUNNABLE
from tests.simulate.strategies import clusters, graphs

each_method = pytest.mark.parametrize("method", RUNNABLE)
OPTIONS = PlaceOptions(seed=1, time_limit_seconds=2)
EXAMPLES = settings(max_examples=25)


def planned(method: str, graph: OpGraph, cluster: Cluster) -> PlanResult:
    """The plan of a method, after all that must hold for it was checked. `expert` gets a hint for every op: one device after the other."""
    if method == "expert":
        hinted = {op.colocation or op.id: i for i, op in enumerate(graph.ops)}
        graph = graph.replace_ops([replace(op, expert=hinted[op.colocation or op.id]) for op in graph.ops])
    result = place(method, graph, cluster, OPTIONS)
    plan = result.plan
    assert oracle.violations(graph, cluster, plan.placement, plan.priority) == []
    assert plan.predicted_step_us == pytest.approx(oracle.simulate(graph, cluster, plan.placement, plan.priority).makespan_us)
    timeline = simulate(graph, cluster, plan.placement, plan.priority)
    assert plan.predicted_step_us == timeline.makespan_us
    assert tuple(plan.peak_memory_bytes) == timeline.peak_memory_bytes
    assert lower_bound_us(graph, cluster) <= plan.lower_bound_us * (1 + 1e-9)
    assert plan.lower_bound_us <= plan.predicted_step_us
    assert plan.status in ("optimal", "feasible")
    return result


@each_method
@EXAMPLES
@given(graph=graphs(7), cluster=clusters(3))
def test_random_graphs(method: str, graph: OpGraph, cluster: Cluster) -> None:
    planned(method, graph, cluster)


@each_method
@EXAMPLES
@given(graph=graphs(7), cluster=clusters(3), share=st.floats(0.4, 1.2), data=st.data())
def test_random_graphs_in_limited_memory(method: str, graph: OpGraph, cluster: Cluster, share: float, data: st.DataObject) -> None:
    """Limits around what one device would need; some devices have none. A method may find no plan, and then says so."""
    peak = simulate(graph, cluster, (0,) * len(graph)).peak_memory_bytes[0]
    limits = [data.draw(st.sampled_from([share * peak, share * peak, 2 * peak, None])) for _ in cluster.devices]
    devices = tuple(replace(d, memory_bytes=limit) for d, limit in zip(cluster.devices, limits, strict=True))
    try:
        planned(method, graph, replace(cluster, devices=devices))
    except InfeasibleError as e:
        assert e.status in ("infeasible", "unknown")


SEVERAL = {"a": 5, "b": 3, "c": 4, "d": 1}
EDGES = (("a", "b", 8), ("a", "c", 8), ("b", "d", 2), ("c", "d", 2))
CORNERS: dict[str, tuple[OpGraph, Cluster]] = {
    "no op": (graph_of({}), cluster_of(3)),
    "one op": (graph_of({"a": 7}), cluster_of(3)),
    "one op, one device": (graph_of({"a": 7}), cluster_of(1)),
    "one device": (graph_of(SEVERAL, *EDGES), cluster_of(1)),
    "more devices than ops": (graph_of(SEVERAL, *EDGES), cluster_of(9)),
    "only isolated ops": (graph_of(dict.fromkeys("abcdefg", 3)), cluster_of(3)),
    "some isolated ops": (graph_of({**SEVERAL, "x": 2, "y": 0}, *EDGES), cluster_of(2)),
    "a chain": (graph_of(dict.fromkeys("abcdefg", 3), *((u, v, 2) for u, v in zip("abcdef", "bcdefg", strict=True))), cluster_of(3)),
    "no time": (graph_of(dict.fromkeys("abcd", 0), *EDGES), cluster_of(2)),
    "no time, no bytes, no link": (graph_of(dict.fromkeys("abcd", 0), ("a", "b", 0), ("b", "c", 0)), cluster_of(3, us_per_byte=0)),
    "some take no time": (graph_of({"a": 0, "b": 3, "c": 0, "d": 0}, *EDGES), cluster_of(2, memory_bytes=40)),
    "costs far apart": (graph_of({"a": 1e-9, "b": 1e12, "c": 1e-9, "d": 1e12}, *EDGES), cluster_of(2, latency_us=1e-9)),
    "costs far apart in memory": (
        graph_of(SEVERAL, ("a", "b", 1e12), ("a", "c", 1e12), ("b", "d", 1), persistent_bytes={"a": 1e-9, "b": 1e12}),
        cluster_of(2, memory_bytes=6e12, us_per_byte=1e-9),
    ),
    "one group": (graph_of(SEVERAL, *EDGES, colocation=dict.fromkeys("abcd", "g")), cluster_of(3)),
    "a group of all that is apart": (graph_of(dict.fromkeys("abcd", 2), colocation={"a": "g", "d": "g"}), cluster_of(3)),
}


@each_method
@pytest.mark.parametrize("corner", CORNERS)
def test_corners(method: str, corner: str) -> None:
    planned(method, *CORNERS[corner])


# Unequal devices and links. What each method reaches; the others reach the optimum.

FIVE = graph_of(dict.fromkeys("abcde", 8), persistent_bytes=dict.fromkeys("abcde", 1))
FORK = graph_of({"a": 1, "b": 10, "c": 10}, ("a", "b", 0), ("a", "c", 0), persistent_bytes=dict.fromkeys("abc", 1))
FAST_AND_SLOW = Cluster((Device("slow", None, 1.0), Device("fast", None, 4.0)), Link(0, 1))
ONE_WAY = Cluster(tuple(map(Device, "xyz")), Link(0, 100), {("y", "x"): Link(0, 1), ("y", "z"): Link(0, 3)})
SPEED_US = {"single": 10, "m_topo": 16, "m_topo_nonuniform": 10}
LINK_US = {"single": 21, "m_topo_nonuniform": 21, "round_robin": 15, "metis": 21, "scotch": 21, "m_topo": 21, "placeto": 21}
DRAWS_LOTS = {"random"}
FOLLOWS_HINTS = {"expert"}


def reaches(method: str, graph: OpGraph, cluster: Cluster, expected_us: float) -> None:
    """The optimum of the oracle is checked on the way."""
    result = planned(method, graph, cluster)
    if method not in DRAWS_LOTS | FOLLOWS_HINTS:
        assert result.predicted_step_us <= expected_us


@each_method
def test_a_fast_device_gets_more(method: str) -> None:
    """Five of 8: four on the device of speed 4 and one on the other end together at 8."""
    assert oracle.optimum(FIVE, FAST_AND_SLOW).makespan_us == 8
    reaches(method, FIVE, FAST_AND_SLOW, SPEED_US.get(method, 8))


@each_method
def test_links_are_directed(method: str) -> None:
    """Only from y something can be sent in little time, to x sooner than to z: a and one of the others on y, the last one on x."""
    assert oracle.optimum(FORK, ONE_WAY).makespan_us == 12
    reaches(method, FORK, ONE_WAY, LINK_US.get(method, 12))
