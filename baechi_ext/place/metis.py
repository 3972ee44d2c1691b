"""METIS (Karypis and Kumar, SIAM J. Scientific Computing 20, 1998): the least transfer time between balanced parts."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from baechi_ext.errors import MissingBackendError
from baechi_ext.place.common import PlanResult, Task
from baechi_ext.place.network import Network, best_partition


def metis(task: Task) -> PlanResult:
    """A part for each device by multilevel recursive bisection: time, and where memory is limited bytes, in balance.

    It knows no precedence: what it cuts little of need not run at the same time. Raises MissingBackendError, too, where pymetis is not
    installed.
    """
    try:
        import pymetis
    except ImportError as e:
        raise MissingBackendError(
            "metis needs pymetis, which is not installed; pip install pymetis, or choose another --placement_method"
        ) from e
    return best_partition(task, partial(_partition, pymetis))


def _partition(pymetis: Any, network: Network) -> list[int]:
    """A part for each vertex: recursive bisection, one call of METIS a step; asked for more than two parts it may stop at an empty one."""
    found = [0] * len(network.weights)
    pending = [(list(range(len(found))), list(range(len(network.shares))))]
    while pending:
        vertices, parts = pending.pop()
        if len(parts) == 1 or not vertices:
            for v in vertices:
                found[v] = parts[0]
            continue
        middle = len(parts) // 2
        shares = [sum(network.shares[p] for p in half) for half in (parts[:middle], parts[middle:])]
        side = _bisect(pymetis, network, vertices, [share / sum(shares) if sum(shares) else 0.5 for share in shares])
        for half, which in ((parts[:middle], 0), (parts[middle:], 1)):
            pending.append(([v for v, s in zip(vertices, side, strict=True) if s == which], half))
    return found


def _bisect(pymetis: Any, network: Network, vertices: Sequence[int], shares: Sequence[float]) -> Sequence[int]:
    """0 or 1 for each vertex."""
    number = {v: i for i, v in enumerate(vertices)}
    rows = [[(number[w], weight) for w, weight in network.edges[v].items() if w in number] for v in vertices]
    weights = [network.weights[v] for v in vertices]
    if not any(rows) or not min(shares):  # METIS divides by the shares
        return _largest_first(weights, shares)
    found: Sequence[int] = pymetis.part_graph(
        2,
        pymetis.CSRAdjacency(adj_starts=[0, *accumulate(map(len, rows))], adjacent=[w for row in rows for w, _ in row]),
        vweights=weights,
        eweights=[weight for row in rows for _, weight in row],
        tpwgts=[shares[0], 1 - shares[0]],
        recursive=True,
        options=pymetis.Options(seed=network.seed),
    ).vertex_part
    return found


def _largest_first(weights: Sequence[int], shares: Sequence[float]) -> list[int]:
    """Sides for vertices that nothing connects: the heaviest first, each to the side that is then filled least; none to no share."""
    filled = [0.0, 0.0]
    side = [0] * len(weights)
    for v in sorted(range(len(weights)), key=lambda v: (-weights[v], v)):
        side[v] = min((0, 1), key=lambda s: (filled[s] + weights[v]) / shares[s] if shares[s] else float("inf"))
        filled[side[v]] += weights[v]
    return side
