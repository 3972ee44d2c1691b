"""The lower bound, loaded when it is asked for; the proofs are in relaxation.py."""

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph


def lower_bound_us(graph: OpGraph, cluster: Cluster, *, thorough: bool = False) -> float:
    """See `relaxation.lower_bound_us`."""
    from baechi_ext.simulate import relaxation

    return relaxation.lower_bound_us(graph, cluster, thorough=thorough)
