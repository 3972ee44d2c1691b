"""The default: the best plan of the cheap methods, refined for as long as there is time."""

from dataclasses import replace

from baechi_ext.ir.check import verify_placement
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.cheap import cheap_start
from baechi_ext.place.common import PlaceOptions, PlanResult, Proposal, begin, finish
from baechi_ext.place.trial import Trial, try_orders
from baechi_ext.simulate import lower_bound_us


def auto(graph: OpGraph, cluster: Cluster, options: PlaceOptions) -> PlanResult:
    """The best plan of the cheap methods and of `options.initial`, refined until the time limit.

    Never slower than `single` where one device holds the graph; where no plan found is faster than that, the plan is that one
    (`PlanResult.splits` is False). Raises InfeasibleError where no valid plan was found.
    """
    from baechi_ext.place.registry import place  # above the placers

    task = begin("auto", graph, cluster, options)
    start, interrupted = cheap_start(task)
    if options.initial is not None:
        verify_placement(graph, cluster, options.initial.placement, "the initial plan")
        given = try_orders(task.simulator, options.initial.placement, options.initial.priorities or (None,))
        start = min([start, given], key=lambda trial: trial.key)
    if interrupted or (start.valid and start.makespan_us <= lower_bound_us(graph, cluster)):
        return finish(task, start, interrupted=interrupted)
    left_seconds = max(options.time_limit_seconds - task.elapsed_seconds(), 0.0)
    initial = Proposal(start.placement, (start.priority,))
    found = place("refine", graph, cluster, replace(options, initial=initial, time_limit_seconds=left_seconds))
    return finish(task, Trial(found.plan.placement, found.plan.priority, task.simulator), interrupted=found.interrupted)
