"""Plans of small graphs."""

from collections.abc import Sequence

from hypothesis import strategies as st

from baechi_ext.ir import Cluster, OpGraph, Plan
from tests.build import with_memory
from tests.simulate.strategies import cases


def plan_of(graph: OpGraph, cluster: Cluster, placement: Sequence[int], priority: Sequence[float] | None = None) -> Plan:
    """A plan that says nothing of what it is predicted to take."""
    ranks = None if priority is None else tuple(priority)
    return Plan(graph, "by hand", "feasible", cluster, tuple(placement), ranks, 0.0, 0.0, (), 0.0)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A plan of a random graph on a random cluster, with priorities or without; it may break any rule but that of devices."""
    graph, cluster = draw(cases())
    n = len(graph)
    placement = draw(st.lists(st.integers(0, len(cluster) - 1), min_size=n, max_size=n))
    priority = draw(st.none() | st.permutations(range(n)))
    return plan_of(graph, with_memory(cluster, draw(st.sampled_from([None, 30, 60]))), placement, priority)
