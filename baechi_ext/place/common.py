"""Shared by all placers: their options, their result, and how a placement becomes a plan."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from baechi_ext.errors import InfeasibleError
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.ir.plan import Plan, memory_violations, verify_placement
from baechi_ext.place.blocks import Block, block_levels
from baechi_ext.place.effort import Effort, clock_seconds
from baechi_ext.place.feasibility import NEXT_STEPS, Conflict, conflict, require_feasible, require_no_conflict, require_sane_costs
from baechi_ext.place.repair import BRIEFLY_REPAIRED_OPS, REPAIRED_OPS, fitted, repair
from baechi_ext.place.traversal import traversal
from baechi_ext.place.trial import Priority, Trial, draining_order, longest_path_order, longest_placed_path_order, try_orders
from baechi_ext.simulate import Simulator, Timeline, lower_bound_us

SMALL = 1000
"""Up to this size of a graph (`OpGraph.size`) quick methods take so little time that none is cut short or left out for it."""
_ROUNDING = 1e-9
_SHORTLIST = 2
_REPAIRED = 3


@dataclass(frozen=True, slots=True)
class Worth:
    """The steps that a search's plan is for: where more time would not pay in so many, it ends before its time limit."""

    steps: float = 1000.0
    """Expected to be run by the plan; a guess, where nobody knows."""
    gap: float = 0.01
    """A plan is good enough so far above the proven bound, as a part of it."""

    def seconds(self, best_us: float, bound_us: float) -> float:
        """The seconds that all that is left to gain is worth: none where that is below the gap, else what it saves in all steps."""
        return 0.0 if best_us <= bound_us * (1 + self.gap) else (best_us - bound_us) * self.steps / 1e6


@dataclass(frozen=True, slots=True)
class PlaceOptions:
    """A caller's choices; a placer reads those that concern it."""

    seed: int = 0
    sct_threshold: float = 0.1
    """m_sct: an LP value up to this much counts as a favourite child (Baechi's default)."""
    time_limit_seconds: float = 60.0
    """For solvers and searches."""
    traversal_order: str | None = None
    """For methods that visit ops one after the other: a key of TRAVERSALS, or "auto"; None is the method's own order."""
    placeto_policy: str | None = None
    """placeto: a policy file; None is the one that comes with the package."""
    placeto_episodes: int = 0
    """placeto: how many episodes the policy learns from on the graph that is to be placed."""
    initial: "Proposal | None" = None
    """Where a search starts: a placement and the orders to try with it."""
    fits: bool = True
    """Take long where plans do not fit: repair them at length, and search for one that fits, whatever its step takes."""
    worth: Worth | None = None
    """auto, refine: end where more time is not worth it; None: use all of it."""
    watch: Callable[["SearchProgress"], None] | None = None
    """Called at least a few times a second by a search that takes long."""

    def to_json(self) -> dict[str, Any]:
        """The options that a plan keeps."""
        said = {name: getattr(self, name) for name in ("seed", "sct_threshold", "time_limit_seconds")}
        further: dict[str, Any] = {name: getattr(self, name) for name in ("traversal_order", "placeto_policy", "placeto_episodes")}
        further["worth"] = None if self.worth is None else asdict(self.worth)
        return said | {name: value for name, value in further.items() if value}


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """The state of a search: its best plan, and the work done for it."""

    best_us: float
    excess_bytes: float
    """The bytes by which the best plan exceeds memory limits."""
    bound_us: float
    evaluations: int
    """The number of plans simulated; 0 for a search that decides op by op."""
    seconds: float


@dataclass(frozen=True)
class PlanResult:
    """A plan, its simulation, and what is known of its quality."""

    plan: Plan
    trial: Trial
    interrupted: bool = False
    """The user stopped the search; this is the best it had found."""
    notes: tuple[str, ...] = ()
    """Remarks for a person on how it was made."""
    untried: tuple[str, ...] = ()
    """Left out for the time limit: quick methods of a search, schedules of a method."""

    @property
    def timeline(self) -> Timeline:
        return self.trial.timeline

    @property
    def status(self) -> str:
        return self.plan.status

    @property
    def predicted_step_us(self) -> float:
        return self.plan.predicted_step_us

    @property
    def lower_bound_us(self) -> float:
        return self.plan.lower_bound_us

    @property
    def placement_seconds(self) -> float:
        return self.plan.placement_seconds

    @property
    def splits(self) -> bool:
        """True if more than one device has something to do."""
        return len(set(self.plan.placement)) > 1

    @property
    def why_whole(self) -> str:
        """The conclusion from a search that leaves everything on one device."""
        if self.untried:
            return (
                f"whether splitting pays is not known: the time limit of {self.plan.method} left out {', '.join(self.untried)}; "
                "give it more time"
            )
        return f"splitting does not pay: {self.plan.method} found nothing faster than one device"


@dataclass(frozen=True)
class Task:
    """One call of a placer: what it was given, since when it runs, and the simulator that judges what it finds."""

    method: str
    options: PlaceOptions
    simulator: Simulator
    started_seconds: float
    search: "Task | None" = None
    """The search that the plan is for: of the same graph, or of one with less colocation, so that its bound and conflict hold here, too."""

    @property
    def graph(self) -> OpGraph:
        return self.simulator.graph

    @property
    def cluster(self) -> Cluster:
        return self.simulator.cluster

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Op positions in the order that the options ask for, or in `graph.order`. Raises OptionError for an unknown one."""
        return traversal(self.graph, self.options.traversal_order or "topo", self.options.seed)

    def elapsed_seconds(self) -> float:
        """Compiling left out."""
        return clock_seconds() - self.started_seconds

    def left_seconds(self, share: float = 1.0) -> float:
        """The seconds until this part of the time limit has passed; infinite for a small graph."""
        limit_seconds = float("inf") if self.graph.size <= SMALL else self.options.time_limit_seconds
        return share * limit_seconds - self.elapsed_seconds()

    def is_enough(self, trial: Trial) -> bool:
        """True if a search is not worth more than it has taken so far; never where the options don't say what it is worth."""
        worth = self.options.worth
        return worth is not None and trial.valid and worth.seconds(trial.makespan_us, self.bound_us) <= self.elapsed_seconds()

    def is_optimal(self, trial: Trial) -> bool:
        """True if the bound proves that no plan is faster."""
        return trial.valid and trial.makespan_us <= self.bound_us * (1 + _ROUNDING)

    @cached_property
    def bound_us(self) -> float:
        return lower_bound_us(self.graph, self.cluster) if self.search is None else self.search.bound_us

    @cached_property
    def conflict(self) -> Conflict | None:
        """See `feasibility.conflict`."""
        return conflict(self.graph, self.cluster) if self.search is None else self.search.conflict

    @cached_property
    def block_levels(self) -> list[list[Block]]:
        """See `blocks.block_levels`."""
        return block_levels(self.graph, self.cluster)


Orders = tuple[Priority | None, ...]
"""Priorities of a placement, the most promising first; None: ops run as they become ready."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A placement and the orders its placer suggests for it."""

    placement: Sequence[int]
    priorities: Orders = ()


def begin(method: str, graph: OpGraph, cluster: Cluster, options: PlaceOptions, search: Task | None = None) -> Task:
    """The task of a placer that is to be called, maybe by a search; its clock runs.

    Raises InfeasibleError, status "infeasible", where no plan can exist; GraphError where costs are beyond all bounds.
    """
    started = clock_seconds()
    if search is not None and graph is search.graph:
        return Task(method, options, search.simulator, started, search)
    require_sane_costs(graph, cluster)
    require_feasible(graph, cluster)
    return Task(method, options, Simulator(graph, cluster), started, search)


def conclude(task: Task, proposals: Iterable[Proposal], *, repairs: bool = True) -> PlanResult:
    """The plan of the best proposal: the fastest in the simulator whose memory fits.

    Each is simulated without priorities and with the first order it suggests; the best few with all their orders, with the
    longest path to the end first, and with the same path of the placed graph, transfers included. Unless `repairs` is False,
    proposals that do not fit but are faster than those that do are repaired, and where none fits placements by bytes alone, too.
    Pinned ops go where they are pinned, whatever a proposal says.

    Raises InfeasibleError where that finds no valid plan, status "infeasible" where it is proven that none exists, else "unknown";
    PlanError where a proposal splits a group.
    """
    simulator = task.simulator
    chosen: dict[tuple[int, ...], Proposal] = {}
    for proposal in proposals:
        placement = task.graph.pinned(proposal.placement)
        verify_placement(task.graph, task.cluster, placement, task.method)
        chosen.setdefault(placement, replace(proposal, placement=placement))
    first = [(try_orders(simulator, p.placement, (None, *p.priorities[:1])), p.priorities[1:]) for p in chosen.values()]
    trials = [_with_all_orders(task, trial, priorities) for trial, priorities in _shortlist(first)]
    best = min(trials, key=lambda trial: trial.key)
    if repairs and not all(trial.valid for trial in trials):
        best = _repaired(task, trials)
    return finish(task, best)


def finish(task: Task, trial: Trial, bound_us: float | None = None, *, interrupted: bool = False) -> PlanResult:
    """The plan of a trial; `bound_us` is a lower bound that the method has proven.

    Raises InfeasibleError where the trial is not valid, status "infeasible" where it is proven that none is, else "unknown".
    """
    if not trial.valid:
        require_no_conflict(task.cluster, task.conflict)
        raise InfeasibleError(_why_not(task, trial), status="unknown")
    bound = task.bound_us if bound_us is None else bound_us
    plan = Plan(
        graph=task.graph,
        method=task.method,
        status="optimal" if trial.makespan_us <= bound * (1 + _ROUNDING) else "feasible",
        cluster=task.cluster,
        placement=trial.placement,
        priority=trial.priority,
        predicted_step_us=trial.makespan_us,
        lower_bound_us=bound,
        peak_memory_bytes=trial.peak_memory_bytes,
        placement_seconds=task.elapsed_seconds(),
        options=task.options.to_json(),
        seed=task.options.seed,
    )
    return PlanResult(plan, trial, interrupted)


def _shortlist(first: Sequence[tuple[Trial, Orders]]) -> list[tuple[Trial, Orders]]:
    """The best few, and the fastest few whether they fit or not."""
    best = sorted(range(len(first)), key=lambda i: first[i][0].key)[:_SHORTLIST]
    fastest = sorted(range(len(first)), key=lambda i: first[i][0].makespan_us)[:_SHORTLIST]
    return [first[i] for i in dict.fromkeys((*best, *fastest))]


def _with_all_orders(task: Task, trial: Trial, priorities: Orders) -> Trial:
    """The trial, or a better one of the same placement in another order; on one device none is faster. In a large graph no other order is
    tried once the time limit has passed, unless the trial does not fit."""
    if trial.valid and (len(set(trial.placement)) <= 1 or task.left_seconds() <= 0):
        return trial
    placed_path = longest_placed_path_order(task.graph, task.cluster, trial.placement)
    orders = [*priorities, placed_path, longest_path_order(task.simulator)]
    best = min([trial, try_orders(task.simulator, trial.placement, orders)], key=lambda t: t.key)
    if best.valid:
        return best
    return min([best, try_orders(task.simulator, trial.placement, [draining_order(task.simulator)])], key=lambda t: t.key)


def _repaired(task: Task, trials: Sequence[Trial]) -> Trial:
    """The best trial once those that do not fit but are faster are repaired; where none can be, one made to fit at any cost in time."""
    simulator, seed = task.simulator, task.options.seed
    best = min(trials, key=lambda trial: trial.key)
    amiss = [trial for trial in trials if not trial.valid]
    amiss.sort(key=lambda trial: trial.makespan_us if best.valid else sum(trial.excess_bytes))
    for trial in amiss[:_REPAIRED]:
        if not best.valid or (trial.makespan_us < best.makespan_us and task.left_seconds() > 0):
            effort = Effort(REPAIRED_OPS) if task.options.fits else Effort(BRIEFLY_REPAIRED_OPS, task.left_seconds())
            repaired = repair(simulator, trial, seed, effort)
            best = min([best, _with_all_orders(task, repaired, ()) if repaired.valid else repaired], key=lambda t: t.key)
    if not best.valid and task.options.fits:
        require_no_conflict(task.cluster, task.conflict)  # a proof that there is none takes less than a search for it
        best = fitted(simulator, best, seed)
    return _with_all_orders(task, best, ())


def _why_not(task: Task, best: Trial) -> str:
    found = "; ".join(memory_violations(task.cluster, best.timeline.peak_memory_bytes))
    return f"{task.method} found no plan that fits, not proven impossible; in the nearest one {found}; {NEXT_STEPS}"


_SIMULATED_OPS = 50_000
_FEWEST_TRIALS, _MOST_TRIALS = 8, 120


def arrange(task: Task, make: Callable[[Sequence[int]], Sequence[int]], priority: Priority | None = None) -> Proposal:
    """The placement `make` gives for the best sequence of devices found; its first order is `priority`.

    The search begins with the devices as they stand and exchanges two at a time while that helps in the simulator. Devices that
    differ in nothing, pinned ops included, are not exchanged: equal devices with equal links cost one call of `make`. The number of
    simulations is bounded by the graph's size; in a large graph the time limit ends it, too.
    """
    priorities = () if priority is None else (priority,)
    sequence = list(range(len(task.cluster)))
    graph = task.graph
    placement = graph.pinned(make(sequence))
    pairs = _exchangeable(task.cluster, pinned=bool(graph.pins))
    left = min(_MOST_TRIALS, max(_FEWEST_TRIALS, _SIMULATED_OPS // max(1, len(graph)))) if pairs else 0
    best = try_orders(task.simulator, placement, (priority,)) if pairs else None
    improved = True
    while best is not None and improved and left > 0:
        improved = False
        for i, j in pairs[:left]:
            if task.left_seconds() <= 0:
                break
            sequence[i], sequence[j] = sequence[j], sequence[i]
            trial = try_orders(task.simulator, graph.pinned(make(sequence)), (priority,))
            left -= 1
            if trial.key < best.key:
                best, improved = trial, True
            else:
                sequence[i], sequence[j] = sequence[j], sequence[i]
    return Proposal(placement if best is None else best.placement, priorities)


def _exchangeable(cluster: Cluster, *, pinned: bool) -> list[tuple[int, int]]:
    """Pairs of places in the sequence whose exchange can change anything: none where all devices and all links are equal."""
    k = len(cluster)
    kinds = {(device.speed, device.memory_bytes) for device in cluster.devices}
    links = {cluster.link(i, j) for i in range(k) for j in range(k) if i != j}
    return [(i, j) for i in range(k) for j in range(i + 1, k)] if pinned or len(kinds) > 1 or len(links) > 1 else []
