"""The solver's process: `python -m baechi_ext.place.exact.worker`. ortools and highspy cannot share one.

Reads one JSON line {"graph", "cluster", "placement", "start_us", "horizon_us", "seconds", "threads", "seed"}; writes JSON lines, each
with a proven bound or a schedule: {"bound_us"}, {"placement", "start_us"}, and last {"status"}. Ends when its input does.
"""

import json
import os
import sys
import threading
from typing import Any

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.exact.cp_model import PlacingModel, hint, placing_model


def main() -> None:
    """Solves what stands on the first line of stdin."""
    from ortools.sat.python import cp_model

    task = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    graph, cluster = OpGraph.from_json(task["graph"]), Cluster.from_json(task["cluster"])
    placing = placing_model(graph, cluster, task["horizon_us"])
    if task["placement"] is not None:
        hint(placing, task["placement"], task["start_us"])
    invalid = placing.model.validate()
    if invalid:
        _say({"status": "invalid", "why": invalid})
        return
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = task["seconds"]
    solver.parameters.num_workers = task["threads"]
    solver.parameters.random_seed = task["seed"] % 2**31
    solver.best_bound_callback = lambda bound: _say({"bound_us": bound / placing.ticks_per_us})
    status = solver.solve(placing.model, _watcher(placing))
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN):
        _say({"bound_us": solver.best_objective_bound / placing.ticks_per_us})
    _say({"status": solver.status_name(status).lower()})


def _watcher(p: PlacingModel) -> Any:
    """Sends every schedule that the solver finds."""
    from ortools.sat.python import cp_model

    class Watcher(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            placement = [next(d for d, x in enumerate(on) if self.boolean_value(x)) for on in p.on]
            _say({"placement": placement, "start_us": [self.value(s) / p.ticks_per_us for s in p.start]})

    return Watcher()


_lock = threading.Lock()


def _say(message: dict[str, Any]) -> None:
    with _lock:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


def _end_with_parent() -> None:
    """Ends the process when its input ends: the process that asked is gone, however that ended."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
