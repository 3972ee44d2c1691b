"""All placement methods by name; the order is the order of menus. Modules are loaded when a method is asked for."""

from importlib import import_module

from baechi_ext.errors import OptionError
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.common import PlaceOptions, PlanResult

METHODS: dict[str, tuple[str, str]] = {
    "single": ("baechi_ext.place.baselines:single", "everything on the one device that is fastest and holds it"),
    "random": ("baechi_ext.place.baselines:random", "each group on a device drawn by lot, by --seed"),
    "round_robin": ("baechi_ext.place.baselines:round_robin", "groups dealt to the devices in turn, in topological order"),
    "contiguous": ("baechi_ext.place.baselines:contiguous", "topological chunks of equal time"),
    "metis": ("baechi_ext.place.metis:metis", "balanced parts with the least transfer time between them (METIS; needs pymetis)"),
    "scotch": ("baechi_ext.place.scotch:scotch", "the same by Scotch's mapping (needs its program: apt-get install scotch)"),
    "heft": ("baechi_ext.place.heft:heft", "heterogeneous earliest finish time, into gaps too (Topcuoglu et al.)"),
    "m_topo": ("baechi_ext.place.m_topo:m_topo", "topological chunks of equal memory (Baechi)"),
    "m_topo_nonuniform": (
        "baechi_ext.place.m_topo_nonuniform:m_topo_nonuniform",
        "topological chunks as large as each device's memory (Baechi)",
    ),
    "m_etf": ("baechi_ext.place.m_etf:m_etf", "earliest task first under memory limits (Baechi)"),
    "m_etf_reserve": (
        "baechi_ext.place.m_etf_reserve:m_etf_reserve",
        "m_etf, with working memory reserved for a group until its last op ends (Baechi)",
    ),
    "m_sct": ("baechi_ext.place.m_sct:m_sct", "small communication times: m_etf guided by a favourite-child LP (Baechi)"),
    "m_sct_reserve": ("baechi_ext.place.m_sct_reserve:m_sct_reserve", "m_sct with the same reserve (Baechi)"),
    "exact": ("baechi_ext.place.exact.placer:exact", "proven optimal up to about 12 ops; beyond, the best found by --time_limit"),
    "expert": ("baechi_ext.place.expert:expert", "where the model's author would put each layer, or --expert_file"),
}


def place(method: str, graph: OpGraph, cluster: Cluster, options: PlaceOptions = PlaceOptions()) -> PlanResult:  # noqa: B008 - frozen
    """The plan of `method` (a key of METHODS) for a costed graph.

    Raises OptionError for an unknown method, InfeasibleError where no valid plan was found.
    """
    if method not in METHODS:
        raise OptionError(f"unknown placement method {method!r}; choose one of {', '.join(METHODS)}")
    module, function = METHODS[method][0].split(":")
    return getattr(import_module(module), function)(graph, cluster, options)
