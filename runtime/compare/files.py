"""What `baechi compare --out=DIR` leaves in DIR."""

import contextlib
from pathlib import Path

from baechi_ext.cost import Profile
from baechi_ext.errors import MissingBackendError
from baechi_ext.ir import OpGraph
from baechi_ext.ir.files import write_json
from baechi_ext.ir.made_by import MadeBy, signed
from runtime.compare.comparison import Comparison
from runtime.compare.plots import save_steps
from runtime.run_folder import COMPARISON, PLOT, SINGLE_GRAPH, SPLIT_GRAPH, method_plan


def keep(folder: Path, graph: OpGraph, profile: Profile, comparison: Comparison, made_by: MadeBy) -> None:
    """Writes graph.json, profile.json, every method's plan, that of the recommended one as plan.json, compare.json, and with matplotlib
    compare.png. The graph's costs are those of plan.json: of devices at work beside others, or where it has one device, of one alone. The
    graph with the others, for plans made with them, is graph_single.json, or graph_split.json."""
    chosen = comparison.recommended
    best = None if chosen is None else comparison.contender(chosen).result
    graphs = {SPLIT_GRAPH: graph, SINGLE_GRAPH: comparison.single.graph}
    graphs.pop(SPLIT_GRAPH if best is None or best.splits else SINGLE_GRAPH).save(folder / "graph.json", made_by)
    for name, other in graphs.items():
        other.save(folder / name, made_by)
    profile.save(folder / "profile.json", made_by)
    for contender in comparison.contenders:
        if contender.result is not None:
            contender.result.plan.save(folder / method_plan(contender.method), made_by)
    if best is not None:
        best.plan.save(folder / "plan.json", made_by)
    write_json(folder / COMPARISON, signed(comparison.to_json(), made_by))
    with contextlib.suppress(MissingBackendError):
        save_steps(folder / PLOT, comparison, made_by)
