"""What `baechi compare --out=DIR` leaves in DIR."""

import contextlib
from pathlib import Path

from baechi_ext.cost import Profile
from baechi_ext.errors import MissingBackendError
from baechi_ext.ir import OpGraph
from baechi_ext.ir.files import write_json
from runtime.compare.comparison import Comparison
from runtime.compare.plots import save_steps
from runtime.run_folder import COMPARISON, PLOT, SINGLE_GRAPH, SPLIT_GRAPH, method_plan


def keep(folder: Path, graph: OpGraph, profile: Profile, comparison: Comparison) -> None:
    """Writes graph.json, profile.json, every method's plan, that of the recommended one as plan.json, compare.json, and with matplotlib
    compare.png. The graph's costs are those of plan.json: of devices at work beside others, or where it has one device, of one alone. The
    graph with the others, for plans made with them, is graph_single.json, or graph_split.json."""
    chosen = comparison.recommended
    best = None if chosen is None else comparison.contender(chosen).result
    graphs = {SPLIT_GRAPH: graph, SINGLE_GRAPH: comparison.single.graph}
    graphs.pop(SPLIT_GRAPH if best is None or best.splits else SINGLE_GRAPH).save(folder / "graph.json")
    for name, other in graphs.items():
        other.save(folder / name)
    profile.save(folder / "profile.json")
    for contender in comparison.contenders:
        if contender.result is not None:
            contender.result.plan.save(folder / method_plan(contender.method))
    if best is not None:
        best.plan.save(folder / "plan.json")
    write_json(folder / COMPARISON, comparison.to_json())
    with contextlib.suppress(MissingBackendError):
        save_steps(folder / PLOT, comparison)
