"""The placement that a person chose: the ops' expert hints, from the model or a file."""

from baechi_ext.errors import InfeasibleError, OptionError
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.expert import with_experts
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.common import PlaceOptions, PlanResult, Proposal, begin, conclude


def require_hints(graph: OpGraph) -> None:
    """Raises OptionError for a graph without any hint."""
    if len(graph) and all(op.expert is None for op in graph.ops):
        raise OptionError(
            "the graph has no expert hints; give some with --expert_file=FILE, take a model that has them (gnmt_v2, wide_towers), or "
            "choose another --placement_method"
        )


def expert(graph: OpGraph, cluster: Cluster, options: PlaceOptions) -> PlanResult:
    """Each op on the device of its hint, modulo their number; ops without a hint follow their group and neighbours.

    Only the order is chosen here: ops that nothing connects with a hint go to the first device, and a placement that does not fit
    is not repaired. Raises OptionError for a graph without any hint, InfeasibleError where memory does not suffice.
    """
    task = begin("expert", graph, cluster, options)
    require_hints(graph)
    hinted = with_experts(graph, [op.expert for op in graph.ops])
    placement = [(op.expert or 0) % len(cluster) for op in hinted.ops]
    try:
        return conclude(task, [Proposal(placement)], repairs=False)
    except InfeasibleError as e:
        if e.status == "infeasible":
            raise
        raise InfeasibleError(f"{e}, or a method that looks at memory (the expert's placement is taken as it is)", e.status) from e
