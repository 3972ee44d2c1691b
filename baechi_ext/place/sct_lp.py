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
    (3) sum_j x_ij >= (number of pairs with a c_ij > 0 out of i) - 1    -> at_most_one_child
    (4) sum_i x_ij >= (number of pairs with a c_ij > 0 into j) - 1      -> at_most_one_parent
    (5) s_i + p_i <= w for every op that nobody reads                   -> step_end

All tensors from i to j make one pair. Ops of one colocation group share a device whatever happens: c_ij = 0. The optimum is no
lower bound for the schedule: there, several children may share their parent's device.
"""

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from baechi_ext.errors import SolverError
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph

Pair = tuple[int, int]

_SECOND_PART = 1e-3
"""epsilon is chosen so that the second part of the objective is at most this share of the mean op's time."""
_TOLERANCE = 1e-6
"""A solver's 0 may be this far off."""


@dataclass(frozen=True)
class FavouriteChildModel:
    """The PuLP problem, and the variable x of each pair that has one."""

    problem: Any
    x: Mapping[Pair, Any]


def favourite_children(graph: OpGraph, cluster: Cluster, threshold: float, time_limit_seconds: float) -> tuple[int | None, ...]:
    """For each op the position of its favourite child, or None. A matching: no op is the favourite child of two.

    An LP value up to `threshold` makes a child a candidate. Raises SolverError where the solver fails or runs out of time.
    """
    costs = pair_costs_us(graph, cluster)
    if not any(costs.values()):
        return (None,) * len(graph)
    values = solve(model(graph, cluster, costs), time_limit_seconds)
    return matching(len(graph), values, costs, threshold)


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


def model(graph: OpGraph, cluster: Cluster, costs: Mapping[Pair, float]) -> FavouriteChildModel:
    """The linear program, not yet solved."""
    import pulp

    speed = max(d.speed for d in cluster.devices)
    times = [op.compute_us / speed for op in graph.ops]
    problem = pulp.LpProblem("favourite_children", pulp.LpMinimize)
    x, s, w = variables(problem, len(graph), costs)
    problem.setObjective(objective(x, w, costs, times))
    rows = chain(precedence(x, s, times, costs), at_most_one_child(x), at_most_one_parent(x), step_end(s, w, times, graph))
    for i, (coefficients, least) in enumerate(rows):
        problem.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(coefficients), pulp.LpConstraintGE, rhs=least), f"r{i}")
    return FavouriteChildModel(problem, x)


Row = tuple[dict[Any, float], float]
"""Coefficients of a constraint's variables, and what their sum must reach."""


def variables(problem: Any, n: int, costs: Mapping[Pair, float]) -> tuple[dict[Pair, Any], list[Any], Any]:
    """x by pair, s by op, and w, with their bounds (1)."""
    x = {(i, j): problem.add_variable(f"x_{i}_{j}", 0, 1) for (i, j), cost in costs.items() if cost > 0}
    return x, [problem.add_variable(f"s_{i}", 0) for i in range(n)], problem.add_variable("w", 0)


def objective(x: Mapping[Pair, Any], w: Any, costs: Mapping[Pair, float], times: Sequence[float]) -> Any:
    """w + epsilon * sum c_ij x_ij."""
    import pulp

    mean_us = sum(times) / len(times) or 1.0
    epsilon = _SECOND_PART * mean_us / sum(costs[pair] for pair in x)
    return pulp.LpAffineExpression({w: 1.0, **{variable: epsilon * costs[pair] for pair, variable in x.items()}})


def precedence(x: Mapping[Pair, Any], s: Sequence[Any], times: Sequence[float], costs: Mapping[Pair, float]) -> Iterable[Row]:
    """(2) s_j - s_i - c_ij x_ij >= p_i."""
    for (i, j), cost in costs.items():
        yield ({s[j]: 1.0, s[i]: -1.0, x[i, j]: -cost} if cost > 0 else {s[j]: 1.0, s[i]: -1.0}), times[i]


def at_most_one_child(x: Mapping[Pair, Any]) -> Iterable[Row]:
    """(3) all but one x out of an op are 1."""
    yield from _all_but_one(x, end=0)


def at_most_one_parent(x: Mapping[Pair, Any]) -> Iterable[Row]:
    """(4) all but one x into an op are 1."""
    yield from _all_but_one(x, end=1)


def step_end(s: Sequence[Any], w: Any, times: Sequence[float], graph: OpGraph) -> Iterable[Row]:
    """(5) w - s_i >= p_i."""
    for i, outputs in enumerate(graph.outputs):
        if not outputs:
            yield {w: 1.0, s[i]: -1.0}, times[i]


def _all_but_one(x: Mapping[Pair, Any], end: int) -> Iterable[Row]:
    sides: dict[int, dict[Any, float]] = defaultdict(dict)
    for pair, variable in x.items():
        sides[pair[end]][variable] = 1.0
    for side in sides.values():
        if len(side) > 1:
            yield side, len(side) - 1.0


def solve(lp: FavouriteChildModel, time_limit_seconds: float) -> dict[Pair, float]:
    """The value of every x. HiGHS solves it where it is installed, the CBC that comes with PuLP elsewhere; neither prints.

    Raises SolverError where the solver stopped without a proven optimum.
    """
    import pulp

    solver = _solver(time_limit_seconds)
    size = f"{len(lp.x)} transfers"
    try:
        lp.problem.solve(solver)
    except (pulp.PulpSolverError, LookupError, ValueError, ArithmeticError) as e:
        raise SolverError(f"{solver.name} failed on the favourite-child LP ({size}): {e}; use m_etf, or another solver") from e
    # PuLP's `status` says Optimal also where a limit stopped the solver; `sol_status` does not.
    if lp.problem.sol_status != pulp.LpSolutionOptimal:
        found = pulp.LpSolution.get(lp.problem.sol_status, str(lp.problem.sol_status))
        raise SolverError(
            f"{solver.name} did not solve the favourite-child LP ({size}) within {time_limit_seconds:g} s "
            f"(it says {found!r}, not {pulp.LpSolution[pulp.LpSolutionOptimal]!r}); "
            f"raise the time limit, group the graph first, or use m_etf"
        )
    return {pair: float(variable.varValue) for pair, variable in lp.x.items()}


def _solver(time_limit_seconds: float) -> Any:
    import pulp

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
