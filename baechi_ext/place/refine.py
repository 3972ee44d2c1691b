"""Refinement: an anytime search from any plan, over placements and orders."""

from baechi_ext.ir.check import verify_placement
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.cheap import start_of
from baechi_ext.place.common import PlaceOptions, PlanResult, Task, begin
from baechi_ext.place.refining import refined
from baechi_ext.place.trial import Trial, try_orders


def refine(graph: OpGraph, cluster: Cluster, options: PlaceOptions) -> PlanResult:
    """The best plan that simulated annealing (`annealing`) finds from `options.initial`, or from the plan of `m_etf`.

    Ends at the time limit, when the plan meets the lower bound, when nothing better has been found for long (seconds for 20 ops,
    minutes for 100), or when the user interrupts it: then the result says so. The start may exceed memory limits; then the search
    first looks for a plan that doesn't. Never worse than its start, and the same for the same seed where the clock did not end it.
    Raises InfeasibleError where no valid plan was found, PlanError where the start splits a group.
    """
    task = begin("refine", graph, cluster, options)
    start, interrupted = _start(task)
    return refined(task, start, interrupted=interrupted)


def _start(task: Task) -> tuple[Trial, bool]:
    initial = task.options.initial
    if initial is None:
        return start_of(task, "m_etf"), False
    placement = task.graph.pinned(initial.placement)
    verify_placement(task.graph, task.cluster, placement, "the initial plan")
    return try_orders(task.simulator, placement, initial.priorities or (None,)), False
