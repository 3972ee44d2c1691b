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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.chunks import ranks

if TYPE_CHECKING:
    from baechi_ext.place.list_state_kernel import Groups
    from baechi_ext.simulate.arrays import Problem

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
) -> list[Schedule]:
    """The schedules from either end of the step, for each reluctance, and all ops on the fastest device.

    Where memory is limited, one more reluctance keeps as much as possible together. `excess_bytes` says by how much a schedule
    exceeds each device's limit in truth: the scheduler knows memory only roughly, and not at all what a schedule turned round holds.
    One that exceeds any is tried again with limits lowered by that. Schedules take long in a large graph with so many ops ready
    that they wait for one another's transfers: once one has, only the largest reluctance follows, by which devices look at fewer ops;
    the longest are left out.
    """
    alone = Schedule(graph.pinned((cluster.fastest,) * len(graph)), graph.order)
    if len(cluster) == 1:
        return [alone]
    factors = RELUCTANCES if len(graph) <= FEW_OPS else RELUCTANCES[:1]
    if any(d.memory_bytes is not None for d in cluster.devices):
        factors = (*factors, STAY)
    run = runner(graph, cluster, favourite_child)
    found: list[Schedule] = []
    for turn in (False, True):
        for reluctance in factors:
            if reluctance < RELUCTANCES[-1] and any(schedule.long for schedule in found):
                continue
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


def runner(graph: OpGraph, cluster: Cluster, favourite_child: FavouriteChild | None) -> Runner:
    """The scheduler for a graph; calling it loads compiled code."""
    from baechi_ext.place.list_arrays import arrays, run_compiled, turned_arrays

    there = arrays(graph, cluster, favourite_child)
    back: list[tuple[Problem, Groups]] = []

    def run(reluctance: float, turn: bool, lowered_bytes: Sequence[float] | None) -> Schedule:
        if turn and not back:
            back.append(turned_arrays(graph, *there))
        placement, started, long = run_compiled(*(back[0] if turn else there), reluctance, lowered_bytes)
        return Schedule(placement, started[::-1] if turn else started, long)

    return run
