"""The default: the best plan of the cheap methods, proven optimal where that is quick, else refined for as long as there is time."""

from dataclasses import replace

from baechi_ext.ir.check import verify_placement
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.cheap import cheap_start
from baechi_ext.place.common import PlaceOptions, PlanResult, begin, finish
from baechi_ext.place.exhausting import exhaust
from baechi_ext.place.refining import refined
from baechi_ext.place.trial import try_orders


def auto(graph: OpGraph, cluster: Cluster, options: PlaceOptions) -> PlanResult:
    """The best plan of the cheap methods and of `options.initial`, refined until the time limit; proven where `exhaust` can.

    Never slower than `single` where one device holds the graph; where no plan found is faster than that, the plan is that one
    (`PlanResult.splits` is False). Raises InfeasibleError where no valid plan was found.
    """
    task = begin("auto", graph, cluster, options)
    cheap = cheap_start(task)
    start, interrupted = cheap.trial, cheap.interrupted
    if options.initial is not None:
        placement = graph.pinned(options.initial.placement)
        verify_placement(graph, cluster, placement, "the initial plan")
        given = try_orders(task.simulator, placement, options.initial.priorities or (None,))
        start = min([start, given], key=lambda trial: trial.key)
    if not interrupted:
        start, optimal, interrupted = exhaust(task, start)
        if optimal:
            return finish(task, start, start.makespan_us)
    return replace(refined(task, start, interrupted=interrupted), untried=cheap.untried)
