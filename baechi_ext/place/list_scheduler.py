"""The list scheduler that m_etf and m_sct share: an event-driven simulation that decides, while time passes, where ops run.

At every instant each idle device proposes, among the ops whose inputs could be there by now, the one with the longest path to
the end; of all proposals the one that could have started earliest is committed (Baechi, SoCC 2020, section 3; ETF is Hwang et
al., SIAM Journal on Computing 18, 1989). What goes beyond that:

- what is pinned has its device from the start;
- the first op of a colocation group takes all members to its device, and their persistent bytes are reserved there at once;
- a transfer to a device that was only just chosen is entered where it would have run: from the producer's end on, as soon as both
  channels are free;
- a device may take an op from a better-situated device only after waiting `reluctance` times the extra transfer time, and a slow
  device only where it ends the op earlier than a faster one is expected to. Greedy starts look at no later transfer, yet with
  backward ops tied to their forward ops most transfers are paid again on the way back;
- the same scheduler also runs from the end of the step, with all edges turned round: then the backward ops, the larger part of a
  training step, choose the devices (forward-backward scheduling: Li and Willis, European J. Operational Research 56, 1992).

Which direction and reluctance suit a graph is seen only in the simulator, so `schedules` returns one schedule for each, and the
one that stays on the fastest device: where transfers are dear no greedy start pays.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.columns import sums_by
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.chunks import ranks
from baechi_ext.place.list_kernel import run
from baechi_ext.place.list_state_kernel import GROUPED_OP, Groups, make_state
from baechi_ext.simulate.arrays import Problem, make_problem

RELUCTANCES = (0.0, 1.0, 4.0)
FEW_OPS = 300_000
"""Larger graphs have schedules of the first reluctance alone."""
STAY = 1e6
"""The reluctance of a device that takes an op from another only where that has no room left: it saves the bytes of copies."""

FavouriteChild = Sequence[int | None]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A device per op, and the ops in the order in which the list scheduler started them."""

    placement: tuple[int, ...]
    started: tuple[int, ...]
    long: bool = False
    """Making it took so long, for the graph's size, that few others should follow."""

    @property
    def priority(self) -> tuple[float, ...]:
        """Each op's rank in the order of starts."""
        return ranks(self.started)


def schedules(
    graph: OpGraph,
    cluster: Cluster,
    favourite_child: FavouriteChild | None = None,
    excess_bytes: Callable[[Schedule], Sequence[float]] | None = None,
    left_seconds: Callable[[], float] = lambda: math.inf,
) -> list[Schedule]:
    """The schedules from either end of the step, for each reluctance, and all ops on the fastest device.

    Where memory is limited, one more reluctance keeps as much as possible together. `excess_bytes` says by how much a schedule
    exceeds each device's limit in truth: the scheduler knows memory only roughly, and not at all what a schedule turned round holds.
    One that exceeds any is tried again with limits lowered by that. Schedules take long in a large graph with so many ops ready
    that they wait for one another's transfers: once one has, only the largest reluctance follows, by which devices look at fewer ops;
    the longest are left out. Where `left_seconds` says that there is no time left, none but the first begins, and that ends early.
    """
    alone = Schedule(graph.pinned((cluster.fastest,) * len(graph)), graph.order)
    if len(cluster) == 1:
        return [alone]
    factors = RELUCTANCES if len(graph) <= FEW_OPS else RELUCTANCES[:1]
    if any(d.memory_bytes is not None for d in cluster.devices):
        factors = (*factors, STAY)
    run = runner(graph, cluster, favourite_child, left_seconds)
    found: list[Schedule] = []
    for turn in (False, True):
        for reluctance in factors:
            if reluctance < RELUCTANCES[-1] and any(schedule.long for schedule in found):
                continue
            if (turn or found) and left_seconds() <= 0:
                return [*found, alone]
            schedule = run(reluctance, turn, None)
            if not _is_complete(schedule):
                break
            found.append(schedule)
            excess = () if excess_bytes is None else excess_bytes(schedule)
            if any(excess):
                found += filter(_is_complete, [run(reluctance, turn, excess)])
    return [*found, alone]


def _is_complete(schedule: Schedule) -> bool:
    return len(schedule.started) == len(schedule.placement)


Runner = Callable[[float, bool, Sequence[float] | None], Schedule]
"""(reluctance, whether from the end of the step, by how many bytes each limit is lowered) -> the schedule, in the step's direction."""


def runner(
    graph: OpGraph, cluster: Cluster, favourite_child: FavouriteChild | None, left_seconds: Callable[[], float] = lambda: math.inf
) -> Runner:
    """The scheduler for a graph."""
    there = arrays(graph, cluster, favourite_child)
    back: list[tuple[Problem, Groups]] = []

    def run(reluctance: float, turn: bool, lowered_bytes: Sequence[float] | None) -> Schedule:
        if turn and not back:
            back.append(turned_arrays(graph, *there))
        most_looks = min(_MOST_LOOKS, _LOOKS_A_SECOND * max(0.0, left_seconds()))
        schedule = run_compiled(*(back[0] if turn else there), reluctance, lowered_bytes, most_looks)
        return replace(schedule, started=schedule.started[::-1]) if turn else schedule

    return run


_MOST_LOOKS, _LOOKS_EACH = 40_000_000, 32
"""The most ops and inputs that a run may look at: so many, and so many more for each op and list entry. The first take seconds."""
_LOOKS_A_SECOND = 10_000_000  # half of them on the machine that this was tried on
_FEWEST_LONG_LOOKS = 4_000_000  # with fewer no run takes long
_FIRST_SHARE, _BEHIND = 0.25, 4
"""After this share of the looks a run is given up that by then has started not even a fourth of its share of the ops."""


def run_compiled(
    problem: Problem, groups: Groups, reluctance: float, lowered_bytes: Sequence[float] | None, most_looks: float
) -> Schedule:
    """The schedule with limits lower by `lowered_bytes`; not of all ops where it takes `most_looks` more than are usual."""
    n = len(groups.ops)
    usual_looks = _LOOKS_EACH * (n + len(problem.lists))
    most_looks += usual_looks
    state = make_state(problem, reluctance)
    if lowered_bytes is not None:
        state.devices["room"] -= lowered_bytes
    state.totals["judged_looks"], state.totals["most_looks"] = _FIRST_SHARE * most_looks, most_looks
    alone = groups.ops["members_to"] - groups.ops["members_from"] == 1
    state.totals["queues"], state.totals["usual_looks"] = alone.all(), max(_FEWEST_LONG_LOOKS, usual_looks)
    state.totals["enough"] = _FIRST_SHARE * n / _BEHIND
    run(problem, groups, state)
    started = int(state.totals["started"][0])
    long = bool(max(_FEWEST_LONG_LOOKS, usual_looks) < state.totals["looks"][0])
    return Schedule(tuple(state.ops["device"].tolist()), tuple(state.ops["started"][:started].tolist()), long)


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
    ops["tail_us"][:-1] = np.array(graph.heads_us) + ops["compute_us"][:-1]
    has_child = groups.ops["favourite_child"] >= 0
    back["favourite_child"] = -1
    back["favourite_child"][groups.ops["favourite_child"][has_child]] = np.flatnonzero(has_child)
    return turned, groups._replace(ops=back)


def _by(key: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(ends, all): all[ends[i] : ends[i + 1]] are the positions of i in `key`."""
    ends = np.zeros(n + 1, np.int32)
    np.cumsum(np.bincount(key, minlength=n), out=ends[1:])
    return ends, np.argsort(key, kind="stable").astype(np.int32)
