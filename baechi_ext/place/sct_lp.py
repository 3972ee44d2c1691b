"""The favourite-child linear program of m_sct (Baechi, SoCC 2020, section 3.3; after Hanen and Munier, 1995), modelled with PuLP.

An op's favourite child is the one reader that should follow it on its device, so that their transfer is saved.

Variables, for ops i with time p_i, and op pairs (i, j) with an edge between them and transfer time c_ij:
    x_ij    0: j is i's favourite child, the transfer is saved; 1: the transfer is paid. Only where c_ij > 0
    s_i     start of op i
    w       end of the step
Objective: minimise w + epsilon * sum c_ij x_ij                         -> objective
    The second part only chooses among nearly equal w: off the critical path, too, the dear transfers should be saved.
Constraints:
    (1) 0 <= x_ij <= 1, s_i >= 0, w >= 0                                -> variables
    (2) s_i + p_i + c_ij x_ij <= s_j for every pair                     -> precedence
    (3) sum_j x_ij >= (number of pairs with a c_ij > 0 out of i) - 1    -> at_most_one
    (4) sum_i x_ij >= (number of pairs with a c_ij > 0 into j) - 1      -> at_most_one
    (5) s_i + p_i <= w for every op that nobody reads (see (6))         -> step_end

A large graph is cut into slices of a topological order, and each has a program of its own: simplex takes a second for 2,000 ops and
minutes for 5,000. In a slice
    (6) s_i >= longest path to i in the slices before                   -> variables
and p_i in (5) is followed by the longest path through the slices after, so that each program knows what is critical in the whole
graph; a child beyond the end of its parent's slice is nobody's favourite.

All tensors from i to j make one pair. Ops of one colocation group share a device whatever happens: c_ij = 0. The optimum is no
lower bound for the schedule: there, several children may share their parent's device.
"""

import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from baechi_ext.errors import MissingBackendError, SolverError, SolverTimeoutError
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph

Pair = tuple[int, int]

WHOLE_OPS, SLICE_OPS = 2000, 500
"""The most ops of a graph with one linear program, and of the slices of a larger one: simplex takes a twentieth of a second for these."""
_PAIRS_A_SECOND = 5000
"""A slice of more pairs than this many for each second left is not begun: it would be modelled for nothing, 10^6 pairs for a minute."""
_SECOND_PART = 1e-3  # epsilon is chosen so that the second part of the objective is at most this share of the mean op's time
_WHOLE_LIMIT = 0.9  # a solver that stops before this share of its time limit stops for another reason
_SHORTEST, _LONGEST = 1.0, 1e7  # what a program's longest time may be: HiGHS refuses coefficients of 1e15, and drops those below 1e-9
_TOLERANCE = 1e-6  # a solver's 0 may be this far off


@dataclass(frozen=True)
class Slice:
    """Ops in a row of a topological order; times in microseconds on the fastest device."""

    times: dict[int, float]
    """Op -> its time."""
    heads: dict[int, float]
    """For ops that read from earlier slices: the longest path up to their start."""
    tails: dict[int, float]
    """For ops that later slices read, or nobody: the longest path after their end, through later slices."""
    costs: dict[Pair, float]
    """Transfer times of the pairs within the slice."""


@dataclass(frozen=True)
class FavouriteChildModel:
    """The PuLP problem, and the variable x of each pair that has one."""

    problem: Any
    x: Mapping[Pair, Any]


@dataclass(frozen=True, slots=True)
class Favourites:
    """For each op the position of its favourite child, or None. A matching: no op is the favourite child of two."""

    child: tuple[int | None, ...]
    unsolved_ops: int = 0
    """The number of ops in slices that were not solved in time: their children are nobody's favourites."""

    def notes(self) -> tuple[str, ...]:
        """Remarks on them for a person."""
        if not self.unsolved_ops:
            return ()
        return (
            f"the favourite-child LP was not solved in time for {self.unsolved_ops} of {len(self.child)} ops, "
            f"which were placed as by m_etf; raise --time_limit",
        )


def favourite_children(graph: OpGraph, cluster: Cluster, threshold: float, time_limit_seconds: float) -> Favourites:
    """The favourite children that could be found in time. An LP value up to `threshold` makes a child a candidate.

    Raises SolverError where the solver fails.
    """
    costs = pair_costs_us(graph, cluster)
    if not any(costs.values()):
        return Favourites((None,) * len(graph))
    until = time.perf_counter() + time_limit_seconds
    values: dict[Pair, float] = {}
    unsolved_ops = 0
    for part in slices(graph, cluster, costs):
        if not any(part.costs.values()):
            continue
        found = _solved_by(part, until)
        unsolved_ops += len(part.times) if found is None else 0
        values |= found or {}
    return Favourites(matching(len(graph), values, costs, threshold), unsolved_ops)


def _solved_by(part: Slice, until_seconds: float) -> dict[Pair, float] | None:
    """The value of every x of a slice; None where that takes too long."""
    if len(part.costs) > _PAIRS_A_SECOND * (until_seconds - time.perf_counter()):
        return None
    lp = model(scaled(part))
    left_seconds = until_seconds - time.perf_counter()
    if left_seconds <= 0:
        return None
    try:
        return solve(lp, left_seconds)
    except SolverTimeoutError:
        return None


def slices(graph: OpGraph, cluster: Cluster, costs: Mapping[Pair, float]) -> list[Slice]:
    """The graph as one slice, or a large one as several of about equal size in topological order."""
    speed = max(d.speed for d in cluster.devices)
    times = [op.compute_us / speed for op in graph.ops]
    count = 1 if len(graph) <= WHOLE_OPS else -(-len(graph) // SLICE_OPS)
    number = [0] * len(graph)
    for rank, v in enumerate(graph.order):
        number[v] = rank * count // len(graph)
    parts = [Slice({}, {}, {}, {}) for _ in range(count)]
    for v in range(len(graph)):
        part = parts[number[v]]
        part.times[v] = times[v]
        if any(number[u] < number[v] for u in graph.predecessors[v]):
            part.heads[v] = graph.heads_us[v] / speed
        later = [graph.tails_us[w] / speed for w in graph.successors[v] if number[w] > number[v]]
        if later or not graph.successors[v]:
            part.tails[v] = max(later, default=0.0)
    for (i, j), cost in costs.items():
        if number[i] == number[j]:
            parts[number[i]].costs[i, j] = cost
    return parts


def scaled(part: Slice) -> Slice:
    """The slice in another unit of time where its longest one is too large or small for a solver, which knows no unit: x is the same."""
    longest = max(max(times.values(), default=0.0) for times in (part.times, part.heads, part.tails, part.costs))
    if _SHORTEST <= longest <= _LONGEST:
        return part
    factor = min(max(longest, _SHORTEST), _LONGEST) / longest
    heads, tails = ({v: us * factor for v, us in times.items()} for times in (part.heads, part.tails))
    costs = {pair: us * factor for pair, us in part.costs.items()}
    return Slice({v: us * factor for v, us in part.times.items()}, heads, tails, costs)


def pair_costs_us(graph: OpGraph, cluster: Cluster) -> dict[Pair, float]:
    """Transfer time in microseconds of all that one op hands to another, the mean over all links; 0 within a colocation group."""
    k = len(cluster)
    links = [cluster.link(i, j) for i in range(k) for j in range(k) if i != j]
    fixed_us = sum(x.latency_us + x.send_us + x.receive_us for x in links) / max(1, len(links))
    us_per_byte = sum(x.us_per_byte + x.send_us_per_byte + x.receive_us_per_byte for x in links) / max(1, len(links))
    costs: dict[Pair, float] = defaultdict(float)
    for tensor in graph.tensors:
        u = graph.ops[tensor.producer].colocation
        cost = fixed_us + us_per_byte * tensor.bytes
        for w in tensor.readers:
            costs[tensor.producer, w] += cost if u is None or u != graph.ops[w].colocation else 0.0
    return dict(costs)


def loaded_pulp() -> Any:
    """PuLP. Its classes of solvers that are not here keep the error that said so: without its traceback, which would hold all that stood in
    the frames of the first import, tensors and process groups among it. Raises MissingBackendError where it is not installed."""
    try:
        import pulp
    except ModuleNotFoundError as e:
        raise MissingBackendError(f"m_sct needs pulp ({e}); pip install --force-reinstall baechi-ext, or choose another method") from e

    for error in (getattr(value, "err", None) for value in vars(pulp).values()):
        if isinstance(error, BaseException):
            error.__traceback__ = None
    return pulp


def model(part: Slice) -> FavouriteChildModel:
    """The linear program of a slice, not yet solved."""
    pulp = loaded_pulp()

    problem = pulp.LpProblem("favourite_children", pulp.LpMinimize)
    x, s, w = variables(problem, part)
    problem.setObjective(objective(x, w, part))
    rows = chain(precedence(x, s, part), at_most_one(x, end=0), at_most_one(x, end=1), step_end(s, w, part))
    for i, (coefficients, least) in enumerate(rows):
        problem.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(coefficients), pulp.LpConstraintGE, rhs=least), f"r{i}")
    return FavouriteChildModel(problem, x)


Row = tuple[dict[Any, float], float]
"""Coefficients of a constraint's variables, and what their sum must reach."""


def variables(problem: Any, part: Slice) -> tuple[dict[Pair, Any], dict[int, Any], Any]:
    """x by pair, s by op, and w, with their bounds (1) and (6)."""
    x = {(i, j): problem.add_variable(f"x_{i}_{j}", 0, 1) for (i, j), cost in part.costs.items() if cost > 0}
    s = {i: problem.add_variable(f"s_{i}", part.heads.get(i, 0)) for i in part.times}
    return x, s, problem.add_variable("w", 0)


def objective(x: Mapping[Pair, Any], w: Any, part: Slice) -> Any:
    """w + epsilon * sum c_ij x_ij."""
    pulp = loaded_pulp()

    mean_us = sum(part.times.values()) / len(part.times) or 1.0
    epsilon = _SECOND_PART * mean_us / sum(part.costs[pair] for pair in x)
    return pulp.LpAffineExpression({w: 1.0, **{variable: epsilon * part.costs[pair] for pair, variable in x.items()}})


def precedence(x: Mapping[Pair, Any], s: Mapping[int, Any], part: Slice) -> Iterable[Row]:
    """(2) s_j - s_i - c_ij x_ij >= p_i."""
    for (i, j), cost in part.costs.items():
        yield ({s[j]: 1.0, s[i]: -1.0, x[i, j]: -cost} if cost > 0 else {s[j]: 1.0, s[i]: -1.0}), part.times[i]


def step_end(s: Mapping[int, Any], w: Any, part: Slice) -> Iterable[Row]:
    """(5) w - s_i >= p_i + the longest path through later slices."""
    for i, tail_us in part.tails.items():
        yield {w: 1.0, s[i]: -1.0}, part.times[i] + tail_us


def at_most_one(x: Mapping[Pair, Any], end: int) -> Iterable[Row]:
    """(3) all but one x out of an op are 1 (end 0: one child), (4) and all but one into an op (end 1: one parent)."""
    sides: dict[int, dict[Any, float]] = defaultdict(dict)
    for pair, variable in x.items():
        sides[pair[end]][variable] = 1.0
    for side in sides.values():
        if len(side) > 1:
            yield side, len(side) - 1.0


def solve(lp: FavouriteChildModel, time_limit_seconds: float) -> dict[Pair, float]:
    """The value of every x. HiGHS solves it where it is installed, the CBC that comes with PuLP elsewhere; neither prints.

    Raises SolverTimeoutError where the solver was not done in time, SolverError where it failed or gave up before.
    """
    pulp = loaded_pulp()

    solver = lp_solver(time_limit_seconds)
    begun_seconds = time.perf_counter()
    size = f"{len(lp.x)} transfers"
    try:
        lp.problem.solve(solver)
    except (pulp.PulpSolverError, LookupError, ValueError, ArithmeticError) as e:
        raise SolverError(f"{solver.name} failed on the favourite-child LP ({size}): {e}; use m_etf, or another solver") from e
    # PuLP's `status` says Optimal also where a limit stopped the solver; `sol_status` does not.
    if lp.problem.sol_status != pulp.LpSolutionOptimal:
        seconds = time.perf_counter() - begun_seconds
        impossible = lp.problem.sol_status in (pulp.LpSolutionInfeasible, pulp.LpSolutionUnbounded)
        if not impossible and seconds >= _WHOLE_LIMIT * time_limit_seconds:
            raise SolverTimeoutError(
                f"{solver.name} did not solve the favourite-child LP ({size}) within {time_limit_seconds:g} s (it says {_answer(lp)!r}); "
                f"raise the time limit, group the graph first, or use m_etf"
            )
        raise SolverError(
            f"{solver.name} did not solve the favourite-child LP ({size}) and stopped after {seconds:.3g} of {time_limit_seconds:.3g} s "
            f"(it says {_answer(lp)!r}); use m_etf, or another solver"
        )
    return {pair: float(variable.varValue) for pair, variable in lp.x.items()}


def _answer(lp: FavouriteChildModel) -> str:
    """The reason why the solver stopped: in HiGHS's words, which are more precise, or in PuLP's."""
    pulp = loaded_pulp()

    highs: Any = getattr(lp.problem, "solverModel", None)
    if hasattr(highs, "modelStatusToString"):
        return str(highs.modelStatusToString(highs.getModelStatus()))
    return str(pulp.LpSolution.get(lp.problem.sol_status, lp.problem.sol_status))


def lp_solver(time_limit_seconds: float) -> Any:
    """HiGHS, or CBC where that is not installed; both with one thread, silent."""
    pulp = loaded_pulp()

    highs = pulp.HiGHS(msg=False, threads=1, timeLimit=time_limit_seconds)
    if highs.available():
        return highs
    with warnings.catch_warnings():
        # PuLP 4 will no longer bundle CBC, and 3 says so on every use.
        warnings.simplefilter("ignore", DeprecationWarning)
        return pulp.PULP_CBC_CMD(msg=False, threads=1, timeLimit=time_limit_seconds)


def matching(n: int, values: Mapping[Pair, float], costs: Mapping[Pair, float], threshold: float) -> tuple[int | None, ...]:
    """Each op's favourite child, from the pairs with a value up to `threshold`: smallest value first, then dearest transfer."""
    child: list[int | None] = [None] * n
    has_parent = [False] * n
    candidates = [pair for pair, value in values.items() if value <= threshold + _TOLERANCE]
    for i, j in sorted(candidates, key=lambda pair: (round(values[pair], 6), -costs[pair], pair)):
        if child[i] is None and not has_parent[j]:
            child[i], has_parent[j] = j, True
    return tuple(child)
