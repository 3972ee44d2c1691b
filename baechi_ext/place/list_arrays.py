"""The compiled list scheduler's arrays, in the direction of the step and turned round. Loading this loads numba."""

from collections.abc import Sequence
from itertools import count

import numpy as np

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.columns import sums_by
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.list_kernel import run, tails_us
from baechi_ext.place.list_state_kernel import GROUPED_OP, Groups, make_state
from baechi_ext.simulate.arrays import Problem, make_problem

_MOST_LOOKS, _LOOKS_EACH = 40_000_000, 32
"""The most ops and inputs that a run may look at: so many, and so many more for each op and list entry. The first take seconds."""
_FEWEST_LONG_LOOKS = 4_000_000
"""With fewer no run takes long."""
_FIRST_SHARE, _BEHIND = 0.25, 4
"""After this share of the looks a run is given up that by then has started not even a fourth of its share of the ops."""


def run_compiled(
    problem: Problem, groups: Groups, reluctance: float, lowered_bytes: Sequence[float] | None
) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """The device of each op, the ops in the order of their starts, and whether that took long; not all ops where it takes too many looks.

    Limits are lower by `lowered_bytes`.
    """
    n = len(groups.ops)
    usual_looks = _LOOKS_EACH * (n + len(problem.lists))
    most_looks = _MOST_LOOKS + usual_looks
    state = make_state(problem, reluctance)
    if lowered_bytes is not None:
        state.devices["room"] -= lowered_bytes
    state.totals["judged_looks"], state.totals["most_looks"] = _FIRST_SHARE * most_looks, most_looks
    alone = groups.ops["members_to"] - groups.ops["members_from"] == 1
    state.totals["queues"], state.totals["usual_looks"] = alone.all(), max(_FEWEST_LONG_LOOKS, usual_looks)
    state.totals["enough"] = _FIRST_SHARE * n / _BEHIND
    run(problem, groups, state)
    started = int(state.totals["started"][0])
    long = max(_FEWEST_LONG_LOOKS, usual_looks) < state.totals["looks"][0]
    return tuple(state.ops["device"].tolist()), tuple(state.ops["started"][:started].tolist()), bool(long)


def arrays(graph: OpGraph, cluster: Cluster, favourite_child: Sequence[int | None] | None) -> tuple[Problem, Groups]:
    """The arguments of the compiled scheduler."""
    problem = make_problem(graph, cluster)
    own = {name: g for g, name in enumerate(graph.groups)}
    alone = count(len(own))
    group = np.array([next(alone) if op.colocation is None else own[op.colocation] for op in graph.ops], np.int32)
    ends, members = _by(group, next(alone))
    ops = np.zeros(len(graph), GROUPED_OP)
    ops["members_from"], ops["members_to"] = ends[:-1][group], ends[1:][group]
    ops["group_us"] = np.bincount(group, problem.ops["compute_us"][:-1])[group]
    ops["group_bytes"] = np.bincount(group, problem.ops["persistent_bytes"][:-1])[group]
    ops["output_bytes"] = graph.columns.made_bytes()
    ops["favourite_child"] = -1 if favourite_child is None else [-1 if child is None else child for child in favourite_child]
    return problem, Groups(ops, members)


def turned_arrays(graph: OpGraph, problem: Problem, groups: Groups) -> tuple[Problem, Groups]:
    """The same ops with every edge and link in the other direction, each (tensor, reader) a tensor of its own."""
    n = len(graph)
    fan = np.diff(problem.tensors["readers_from"])
    reader = np.repeat(problem.tensors["producer"][:-1], fan)
    producer = problem.lists[problem.tensors["readers_from"][0] :]
    tensors = np.zeros(len(producer) + 1, problem.tensors.dtype)
    for size in ("bytes", "home_bytes"):
        tensors[size][:-1] = np.repeat(problem.tensors[size][:-1], fan)
    tensors["producer"][:-1] = producer
    tensors["readers_from"] = 2 * len(producer) + np.arange(len(tensors))
    ops = problem.ops.copy()
    ends, inputs = _by(reader, n)
    ops["inputs_from"] = ends
    ends, outputs = _by(producer, n)
    ops["outputs_from"] = len(inputs) + ends
    lists = np.concatenate([inputs, outputs, reader]).astype(problem.lists.dtype)  # no other type: kernels would be compiled for both
    turned = problem._replace(ops=ops, tensors=tensors, lists=lists, links=np.ascontiguousarray(problem.links.T))
    back = groups.ops.copy()
    back["output_bytes"] = sums_by(tensors["producer"][:-1], tensors["home_bytes"][:-1], n)
    columns = graph.columns
    ops["working_bytes"][:-1] = columns.temporary_bytes + np.maximum(0.0, columns.output_bytes - back["output_bytes"])
    tails = np.zeros(n)
    tails_us(turned, np.array(graph.order[::-1], np.int32), tails)
    ops["tail_us"][:-1] = tails
    has_child = groups.ops["favourite_child"] >= 0
    back["favourite_child"] = -1
    back["favourite_child"][groups.ops["favourite_child"][has_child]] = np.flatnonzero(has_child)
    return turned, groups._replace(ops=back)


def _by(key: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(ends, all): all[ends[i] : ends[i + 1]] are the positions of i in `key`."""
    ends = np.zeros(n + 1, np.int32)
    np.cumsum(np.bincount(key, minlength=n), out=ends[1:])
    return ends, np.argsort(key, kind="stable").astype(np.int32)
