"""A proven lower bound on the simulated step of every valid plan."""

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.simulate.engine import tails_us

_ROUNDING = 1.0 - 1e-12
"""Sums taken in another order may differ in the last digits; a bound may not be above the optimum for that."""


def lower_bound_us(graph: OpGraph, cluster: Cluster) -> float:
    """No plan for `graph` on `cluster` simulates faster than this, in microseconds. The largest of

    - the compute-only critical path on the fastest device (transfers may all be avoided, ops of a path never overlap);
    - the heaviest colocation group on the fastest device (its ops share one device);
    - total compute over total speed (every device busy from start to end).
    """
    if not graph.ops:
        return 0.0
    fastest = max(d.speed for d in cluster.devices)
    path = max(tails_us(graph))
    group = max((sum(graph.ops[v].compute_us for v in members) for members in graph.groups.values()), default=0.0)
    total = graph.total_compute_us() / sum(d.speed for d in cluster.devices)
    return max(path / fastest, group / fastest, total) * _ROUNDING
