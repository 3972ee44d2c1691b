"""`exact`: a plan and a proof. Two proofs work side by side until they meet, or time is up.

- The search (search.py) tries every placement and every order in which the simulator could start the ops: what it leaves does not exist.
- The constraint program (cp_model.py) relaxes the simulator. Its bound is a bound; its schedules may wait where the simulator never does,
  so each is only a candidate that is simulated like any other.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from baechi_ext.errors import InfeasibleError, MissingBackendError, SolverError
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.common import PlanResult, SearchProgress, Task, finish
from baechi_ext.place.exact.process import SolverProcess, threads
from baechi_ext.place.exact.search import Search, is_small
from baechi_ext.place.feasibility import NEXT_STEPS, refuse_after_all_tried
from baechi_ext.place.searching import trial_by, trial_of
from baechi_ext.place.trial import Trial, longest_placed_path_order, try_orders
from baechi_ext.simulate import lower_bound_us

_STARTS = ("m_etf", "m_sct", "contiguous")
_MOST_COPIES = 2_000_000
"""Tensors, times pairs of devices, of which the solver's model has a variable each."""
_ALONE_STEPS = 100_000
"""So many steps the search goes alone: what it solves by then it solves the same way every time, and without a second process."""
_MET = 1e-9
_WAIT_SECONDS = 0.05


def exact(task: Task) -> PlanResult:
    """The best plan found within the time limit, or until the user interrupts it, and the bound proven by then; status "optimal"
    where they meet.

    Raises InfeasibleError, status "infeasible" where it is proven that no plan is valid, "unknown" where none was found in time;
    MissingBackendError where ortools is not installed; SolverError where the solver failed and there is no plan either.
    """
    if importlib.util.find_spec("ortools") is None:
        raise MissingBackendError("exact needs ortools; pip install 'ortools>=9.12,<10', or use another method")
    proof = _Proof(task)
    interrupted = False
    try:
        proof.start()
        if not proof.closed:
            proof.search_alone()
        if not proof.closed:
            proof.search_beside_solver()
    except KeyboardInterrupt:
        if proof.best is None:
            raise
        interrupted = True
    return replace(proof.result(), interrupted=interrupted)


class _Proof:
    """The best plan so far and the bound so far."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.best: Trial | None = None
        self.bound_us = lower_bound_us(task.graph, task.cluster, thorough=True)
        self.search = Search(task.simulator) if is_small(task.graph, task.cluster) else None
        self.no_plan = False
        """True once it is proven that there is no valid plan."""
        self.complaint = ""

    @property
    def best_us(self) -> float:
        return float("inf") if self.best is None else self.best.timeline.makespan_us

    @property
    def closed(self) -> bool:
        return self.no_plan or self.proven or self.seconds_left <= 0

    @property
    def proven(self) -> bool:
        """True once no plan is faster than the best one."""
        return self.best_us <= self.bound_us * (1 + _MET)

    @property
    def seconds_left(self) -> float:
        return self.task.options.time_limit_seconds - self.task.elapsed_seconds()

    def start(self) -> None:
        """Starts with the best plan of a few quick methods; where they find none, with what half of the time finds, unless all is tried."""
        for method in _STARTS:
            if not self.closed:
                self._offer(trial_of(self.task, method, self.task.graph)[0])
        if self.best is None and self.search is None and not self.closed:
            options = replace(self.task.options, time_limit_seconds=self.seconds_left / 2)
            self._offer(trial_by(_STARTS[0], self.task, self.task.graph, options)[0])

    def _offer(self, trial: Trial | None) -> None:
        if trial is not None and trial.valid and trial.timeline.makespan_us < self.best_us:
            self.best = trial

    def search_alone(self) -> None:
        """A fixed number of steps, so that small instances do not depend on the clock."""
        while self.search is not None and self.search.steps < _ALONE_STEPS and not self.closed:
            self._go_on(self.search)

    def _go_on(self, search: Search) -> None:
        self._offer(search.run(self.best_us))
        if search.done:
            self.no_plan = self.best is None
            self.bound_us = self.best_us if self.best is not None else self.bound_us

    def search_beside_solver(self) -> None:
        """Searches beside the solver until one of them has a proof; not at all where the solver's model would be too large."""
        tensors, k = len(self.task.graph.tensors), len(self.task.cluster)
        if tensors * k * k > _MOST_COPIES:
            self.complaint = f"{tensors} tensors on {k} devices are too many for the solver"
            return
        with SolverProcess(self._solver_task()) as solver:
            while not self.closed and (self.search is not None or solver.status is None):
                if self.search is not None:
                    self._go_on(self.search)
                for message in solver.messages(0.0 if self.search is not None else min(_WAIT_SECONDS, self.seconds_left)):
                    self._hear(message)
                self._tell()
            self.complaint = solver.complaint and f"the solver's process ended early ({solver.complaint})"

    def _solver_task(self) -> dict[str, Any]:
        start: dict[str, Any] = {"placement": None, "start_us": None}
        if self.best is not None:
            start = {"placement": list(self.best.placement), "start_us": list(self.best.timeline.start_us)}
        return {
            "graph": self.task.graph.to_json(),
            "cluster": self.task.cluster.to_json(),
            "horizon_us": longest_step_us(self.task.graph, self.task.cluster) if self.best is None else self.best_us,
            "seconds": self.seconds_left,
            "threads": threads(),
            "seed": self.task.options.seed,
            **start,
        }

    def _hear(self, message: dict[str, Any]) -> None:
        if "bound_us" in message:
            self.bound_us = max(self.bound_us, message["bound_us"] * (1 - 1e-12))
        if "placement" in message:
            self._offer(self._simulated(tuple(message["placement"]), message["start_us"]))
        if message.get("status") == "infeasible":
            self.no_plan = self.best is None

    def _tell(self) -> None:
        watch = self.task.options.watch
        if watch is not None and self.best is not None:
            watch(SearchProgress(self.best_us, 0.0, self.bound_us, 0, self.task.elapsed_seconds()))

    def _simulated(self, placement: tuple[int, ...], start_us: Sequence[float]) -> Trial:
        placed_path = longest_placed_path_order(self.task.graph, self.task.cluster, placement)
        return try_orders(self.task.simulator, placement, [tuple(start_us), placed_path])

    def result(self) -> PlanResult:
        """The plan. Raises InfeasibleError or SolverError where there is none."""
        if self.best is not None:
            found = finish(self.task, self.best, min(self.bound_us, self.best_us))
            lost = f"{self.complaint}, so what more it would have found or proven is missing"
            return replace(found, notes=(*found.notes, lost)) if self.complaint and not self.proven else found
        if self.no_plan:
            refuse_after_all_tried(self.task.method)
        if self.complaint:
            raise SolverError(f"{self.complaint}, and no plan was found; use another method")
        raise InfeasibleError(
            f"exact found no plan that fits within {self.task.options.time_limit_seconds:g} s, not proven impossible; "
            f"raise --time_limit, {NEXT_STEPS}",
            status="unknown",
        )


def longest_step_us(graph: OpGraph, cluster: Cluster) -> float:
    """No step takes longer: at any time some op runs or some tensor travels."""
    links = {link for row in cluster.link_table() for link in row}
    moves = (link.total_us(t.bytes) for t in graph.tensors for link in links)
    return graph.total_compute_us() / min(d.speed for d in cluster.devices) + len(cluster) * sum(moves)
