"""A proven lower bound on the simulated step of every valid plan.

Written h for an op's head (it cannot start before), q for its tail (so much has to follow its end), p for its compute time, all at
the greatest speed of any device that can hold the op. The bound is the largest of these:

1. Chains. The ops of a path never overlap and transfers may all be avoided: h + p + q of each op.
2. Work. All devices together do at most the sum of their speeds. The ops with h >= a and q >= b are done between a and the
   end less b; so a + work / speed + b for all a and b. The largest of these is the optimum of one machine of that speed that may
   interrupt its ops (Jackson's preemptive schedule; Carlier, EJOR 1982, prop. 1), found in O(n log n).
3. Cells. A cell is a set of ops that share a device, first of all a colocation group. They run one after another: the same optimum with
   the cell's ops alone, on the fastest device that can hold their persistent bytes and, beside them, the neediest op.
4. Crowds. Of j * k + 1 cells, j + 1 share one of the k devices: the least work of any j + 1 of them, and the least persistent bytes.
5. Folded heads. All ancestors of an op end before it starts: they are work as in 2 and, cell by cell, as in 3, with no tails. The
   same backwards gives tails.
6. Assumed limits. Suppose that the step ends within a limit. An edge u -> v whose ends are on two devices takes p_u, what sending takes,
   the transfer, what receiving takes (v, or an op before it there, pays) and p_v; if h_u + all that + q_v is above the limit, u
   and v share a device, and their cells are one. With these cells, 1 to 5 may exceed the limit, or a cell may fit on no
   device; then no step ends within the limit. (Destructive improvement; Klein and Scholl, EJOR 1999.) This is how memory that
   forces a graph apart, and transfers that keep it together, raise the bound.
7. Near relatives. Suppose that v starts at s. An ancestor u that is not on v's device is followed, on each path to v, by a transfer to
   another device: the time from its end to s is at least that of the path's ops up to a transfer's end and, once the path has come to
   v's device, all after it; so the least of these over the path's edges, and the most of that over paths. The ancestors for which h + p +
   that is beyond s precede v on one device, each followed by its path: the optimum of that machine, as in 2, is at most s. The least
   s that contradicts none of it is a head of v. Backwards it is a tail. (After Papadimitriou and Yannakakis, SIAM J. Computing 19, 1990,
   and Al-Mouhamed, IEEE Trans. Software Engineering 16, 1990.) Any part of the ancestors and paths will do: the latest are looked at.
8. Shared out. Of the same ancestors, those with h >= a for which that time is at least f are done between a and s: by v's device all the
   time, and by others until f before s. So their work is at most (s - a) times the greatest speed, and (s - a - f) times what all
   others have beside that, if that is above 0; for all a and f.

The simulator's times are sums of floats. Each addition is off by at most half a last digit, so a sum of n terms by n times that; the
bound is lowered by more than this, and what is compared with a limit must exceed it by more.
"""

from itertools import chain

import numpy as np

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.simulate.bound_kernel import Relaxed, bound

_FOLD_OPS, _DEEP_OPS = 2_000, 200
_THOROUGH_FOLD_OPS, _THOROUGH_DEEP_OPS = 8_000, 1_000
_MOST_PAIRS = 64


def lower_bound_us(graph: OpGraph, cluster: Cluster, *, thorough: bool = False) -> float:
    """No valid plan for `graph` on `cluster` simulates faster than this, in microseconds.

    Heads are folded (5) in graphs of up to 2,000 ops, and under each limit (6) again up to 200; with `thorough` up to 8,000 and
    1,000, which may take seconds. Near relatives (7, 8) count in graphs of up to 10,000. Where no plan is valid, a number
    that means nothing.
    """
    if not graph.ops:
        return 0.0
    relaxed = _relaxed(graph, cluster)
    fold_ops, deep_ops = (_THOROUGH_FOLD_OPS, _THOROUGH_DEEP_OPS) if thorough else (_FOLD_OPS, _DEEP_OPS)
    return float(bound(relaxed, fold_ops, deep_ops) * (1.0 - relaxed.rounding))


def _relaxed(graph: OpGraph, cluster: Cluster) -> Relaxed:
    n, k = len(graph), len(cluster)
    order = np.array(graph.order, np.int64)
    columns = graph.columns
    read, target = columns.readers.owners, columns.readers.items
    source, compute = columns.producer[read], columns.compute_us
    speed, memory = _kinds(cluster)
    by_target, by_source = np.argsort(target, kind="stable"), np.argsort(source, kind="stable")
    size, nothing = columns.tensor_bytes[read], np.zeros(len(read))
    lag = _crossing_us(cluster, nothing, nothing, size, received=False)
    return Relaxed(
        compute_us=compute,
        persistent_bytes=columns.persistent_bytes,
        live_bytes=graph.columns.charged_bytes(),
        cell=_cells(graph, one=k == 1),
        order=order,
        before=source[by_target],
        before_from=_offsets(target, n),
        before_lag_us=lag[by_target],
        after=target[by_source],
        after_from=_offsets(source, n),
        after_lag_us=lag[by_source],
        source=source,
        target=target,
        crossing_us=_crossing_us(cluster, compute[source], compute[target], size),
        kind_speed=speed,
        kind_bytes=memory,
        total_speed=float(sum(d.speed for d in cluster.devices)),
        num_devices=k,
        rounding=8.0 * (n + len(graph.tensors) + 2) * np.finfo(np.float64).eps,
    )


def _cells(graph: OpGraph, *, one: bool) -> np.ndarray:
    """Colocation groups, what is pinned to one device, and single ops, numbered; all in one cell where there is one device."""
    if one:
        return np.zeros(len(graph), np.int64)
    if not graph.groups and not graph.pins:
        return np.arange(len(graph))
    number: dict[object, int] = {}
    keys = [("pin", op.pin) if op.pin is not None else v if op.colocation is None else op.colocation for v, op in enumerate(graph.ops)]
    return np.array([number.setdefault(key, len(number)) for key in keys])


def _offsets(ends: np.ndarray, n: int) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(np.bincount(ends, minlength=n)))).astype(np.int64)


def _kinds(cluster: Cluster) -> tuple[np.ndarray, np.ndarray]:
    """(speeds, bytes) of the devices that no other exceeds in both, fastest first."""
    best: list[tuple[float, float]] = []
    kinds = zip((d.speed for d in cluster.devices), cluster.rooms, strict=True)
    for speed, memory in sorted(kinds, key=lambda kind: (-kind[0], -kind[1])):
        if not best or memory > best[-1][1]:
            best.append((speed, memory))
    return np.array([speed for speed, _ in best], np.float64), np.array([memory for _, memory in best])


def _crossing_us(cluster: Cluster, before_us: np.ndarray, after_us: np.ndarray, size: np.ndarray, *, received: bool = True) -> np.ndarray:
    """For each edge, the least time from its source's start to its target's end over all pairs of different devices.

    Unless `received`, without what receiving takes from the target's device.
    """
    table, k = cluster.link_table(), len(cluster)
    pairs = set()
    for i in range(k):
        for j in chain(range(i), range(i + 1, k)):
            link = table[i][j]
            fixed = link.latency_us + link.send_us + link.receive_us * received
            per_byte = link.us_per_byte + link.send_us_per_byte + link.receive_us_per_byte * received
            pairs.add((1 / cluster.devices[i].speed, 1 / cluster.devices[j].speed, fixed, per_byte))
    if len(pairs) > _MOST_PAIRS:
        pairs = {tuple(map(min, zip(*pairs, strict=True)))}
    least = np.full(len(size), np.inf)
    for here, there, fixed, per_byte in sorted(pairs):
        np.minimum(least, before_us * here + after_us * there + fixed + size * per_byte, out=least)
    return least
