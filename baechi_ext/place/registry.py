"""All placement methods by name; the order is that of menus, and the one in which searches try the cheap methods.

Modules are loaded when a method is asked for.
"""

from collections.abc import Callable
from dataclasses import replace
from pkgutil import resolve_name
from typing import NamedTuple

from baechi_ext.errors import OptionError
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.common import PlaceOptions, PlanResult, Task, begin
from baechi_ext.place.order_choice import AUTO, choose_order

Placer = Callable[[Task], PlanResult]
"""The plan of a task that was just begun. Raises InfeasibleError where no valid plan was found."""


class Method(NamedTuple):
    """A placement method: where it is ("module:function"), and a line for menus."""

    function: str
    help: str
    cheap: bool = False
    """Quick enough for a search to start from."""
    always: bool = False
    """And looked at by a search however little time it has."""
    time_limit_seconds: float = 60.0
    """The limit where nobody gives one."""
    ordered: bool = False
    """Visits ops one after the other, in the options' traversal order."""


METHODS: dict[str, Method] = {
    "auto": Method(
        "baechi_ext.place.auto:auto", "the best of the quick methods, refined; one device where nothing beats it", time_limit_seconds=10.0
    ),
    "refine": Method(
        "baechi_ext.place.auto:refine", "simulated annealing from --initial_plan, or from the plan of m_etf", time_limit_seconds=10.0
    ),
    "single": Method("baechi_ext.place.baselines:single", "everything on the fastest device that holds it", cheap=True, always=True),
    "m_etf": Method("baechi_ext.place.etf:m_etf", "earliest task first under memory limits (Baechi)", cheap=True, always=True),
    "heft": Method("baechi_ext.place.etf:heft", "heterogeneous earliest finish time, into gaps too (Topcuoglu et al.)", cheap=True),
    "contiguous": Method(
        "baechi_ext.place.baselines:contiguous", "topological chunks of equal time", cheap=True, always=True, ordered=True
    ),
    "m_topo": Method(
        "baechi_ext.place.baselines:m_topo", "topological chunks of equal memory (Baechi)", cheap=True, always=True, ordered=True
    ),
    "metis": Method(
        "baechi_ext.place.partitioners:metis", "balanced parts with the least transfer time between them (METIS; needs pymetis)", cheap=True
    ),
    "m_sct": Method("baechi_ext.place.etf:m_sct", "small communication times: m_etf guided by a favourite-child LP (Baechi)", cheap=True),
    "scotch": Method("baechi_ext.place.partitioners:scotch", "like metis, by Scotch's mapping (needs its program: apt-get install scotch)"),
    "m_etf_reserve": Method(
        "baechi_ext.place.etf:m_etf_reserve", "m_etf, with working memory reserved for a group until its last op ends (Baechi)"
    ),
    "m_sct_reserve": Method("baechi_ext.place.etf:m_sct_reserve", "m_sct with the same reserve (Baechi)"),
    "m_topo_nonuniform": Method(
        "baechi_ext.place.baselines:m_topo_nonuniform", "topological chunks as large as each device's memory (Baechi)", ordered=True
    ),
    "placeto": Method(
        "baechi_ext.place.placeto.placer:placeto",
        "a learned policy that moves op after op (Placeto; needs torch); --placeto_episodes lets it learn on the graph",
        ordered=True,
    ),
    "round_robin": Method("baechi_ext.place.baselines:round_robin", "groups dealt to the devices in turn", ordered=True),
    "random": Method("baechi_ext.place.baselines:random", "each group on a device drawn at random, by --seed", ordered=True),
    "exact": Method("baechi_ext.place.exact.placer:exact", "proven optimal up to about 20 ops; beyond, the best found by --time_limit"),
    "expert": Method("baechi_ext.place.baselines:expert", "where the model's author would put each layer, or --expert_file"),
}


def place(
    method: str,
    graph: OpGraph,
    cluster: Cluster,
    options: PlaceOptions = PlaceOptions(),  # noqa: B008 - frozen
    search: Task | None = None,
) -> PlanResult:
    """The plan of `method` (a key of METHODS) for a costed graph. Where the order is to be chosen, its notes say which one was, and why.

    `search`: the task of a search that asks for it, see `Task.search`.
    Raises OptionError for an unknown method or an option that is not for it, InfeasibleError where no valid plan was found.
    """
    if method not in METHODS:
        raise OptionError(f"unknown placement method {method!r}; choose one of {', '.join(METHODS)}")
    require_taken(method, options)
    placer: Placer = resolve_name(METHODS[method].function)
    if options.traversal_order != AUTO:
        return placer(begin(method, graph, cluster, options, search))
    choice = choose_order(method, graph, cluster)
    result = placer(begin(method, graph, cluster, replace(options, traversal_order=choice.order), search))
    return replace(result, notes=(*result.notes, choice.reason))


def require_taken(method: str, options: PlaceOptions) -> None:
    """Raises OptionError where the options hold what is not for the method: an order and it visits ops in none, a policy of another."""
    if method != "placeto" and (options.placeto_policy is not None or options.placeto_episodes):
        raise OptionError(f"--placeto_policy and --placeto_episodes are only for --placement_method=placeto, not {method}; drop them")
    if options.traversal_order is not None and not METHODS[method].ordered:
        ordered = ", ".join(name for name, entry in METHODS.items() if entry.ordered)
        raise OptionError(
            f"--traversal_order is only for methods that visit ops in an order ({ordered}), and {method} is none; drop it or choose one"
        )
