"""m-ETF and m-SCT (Baechi, SoCC 2020, sections 3.2 and 3.3): earliest task first under memory limits; and with devices that stay awake
for favourite children, found by a linear program. And HEFT (`earliest_finish`).

Where Baechi's `_reserve` variants place a colocation group, they keep free for it, until all its ops have finished, what the neediest
of them may need: the largest temporary bytes and the largest output, beside the persistent bytes of all.
"""

from collections.abc import Sequence
from dataclasses import replace

from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.common import PlanResult, Proposal, Task, conclude
from baechi_ext.place.earliest_finish import earliest_finishes
from baechi_ext.place.earliest_start import earliest_starts
from baechi_ext.place.list_scheduler import FavouriteChild, Schedule, schedules
from baechi_ext.place.trial import Trial

_SHARE_OF_FIRST = 0.5  # the part of the time limit after which no schedule without favourite children begins where there are some
_MOST_FINISHED_OPS = 5000  # up to here an earliest-finish schedule takes no longer than the others


def m_etf(task: Task) -> PlanResult:
    """The best of a few earliest-task-first schedules (`_proposals`) in the simulator."""
    clock = _Clock(task)
    return clock.noted(conclude(task, _proposals(task, clock)))


def m_sct(task: Task) -> PlanResult:
    """The best of a few schedules that keep favourite children on their parents' devices, and of m_etf's.

    Waiting for a child pays where the program, which knows no devices, is right about it; where it is not, the step may be twice m_etf's.
    After an op a device waits for its favourite child where no other device could start that earlier, and runs meanwhile only ops
    that could start everywhere. On one device there is no transfer to save and no program to solve. What the program's solver does not
    solve in time has no favourite children; the result's notes say so.
    Raises SolverError, too, where the solver failed.
    """
    clock, first = _Clock(task), _Clock(task, _SHARE_OF_FIRST)
    proposals = _proposals(task, first)
    child, notes = _favourites(task)
    if child is not None:
        proposals += _proposals(task, clock, child)
    return clock.noted(first.noted(replace(conclude(task, proposals), notes=notes)))


def m_etf_reserve(task: Task) -> PlanResult:
    """The best of m_etf's schedules for the graph with its reserves (`reserving`), judged without them."""
    clock = _Clock(task)
    return clock.noted(conclude(task, _proposed(schedules(reserving(task.graph), task.cluster, left_seconds=clock))))


def m_sct_reserve(task: Task) -> PlanResult:
    """The best of m_sct's schedules for the graph with its reserves (`reserving`), judged without them.

    Raises SolverError, too, where the solver failed; the notes say where it ran out of time.
    """
    child, notes = _favourites(task)
    clock = _Clock(task)
    found = schedules(reserving(task.graph), task.cluster, child, left_seconds=clock)
    return clock.noted(replace(conclude(task, _proposed(found)), notes=notes))


class _Clock:
    """The seconds that schedules may still take, at each call; it remembers that there were none."""

    def __init__(self, task: Task, share: float = 1.0) -> None:
        self.task, self.share = task, share
        self.passed = False

    def __call__(self) -> float:
        left_seconds = self.task.left_seconds(self.share)
        self.passed = self.passed or left_seconds <= 0
        return left_seconds

    def noted(self, result: PlanResult) -> PlanResult:
        """The result, which says so where the time limit left out schedules."""
        if not self.passed or result.untried:
            return result
        what = f"schedules of {self.task.method}"
        return replace(result, untried=(what,), notes=(*result.notes, f"the time limit left out {what}; raise --time_limit"))


def _proposals(task: Task, clock: _Clock, favourite_child: FavouriteChild | None = None) -> list[Proposal]:
    """Proposals of the list scheduler's schedules, each also with lower limits where it exceeds them, and of the rule to the letter.

    Where speeds differ m_etf, which has no favourite children, also tries earliest finishes: the earliest start may be on a slow device.
    """

    def excess_bytes(schedule: Schedule) -> tuple[float, ...]:
        return Trial(schedule.placement, schedule.priority, task.simulator).excess_bytes

    graph, cluster = task.graph, task.cluster
    found = schedules(graph, cluster, favourite_child, excess_bytes, clock)
    if clock() > 0:
        found += earliest_starts(graph, cluster, favourite_child)
    unequal = len({device.speed for device in cluster.devices}) > 1
    if unequal and clock() > 0 and favourite_child is None and len(graph) <= _MOST_FINISHED_OPS:
        found += earliest_finishes(graph, cluster)
    return _proposed(found)


def _proposed(found: Sequence[Schedule]) -> list[Proposal]:
    return [Proposal(schedule.placement, (schedule.priority,)) for schedule in found]


def _favourites(task: Task) -> tuple[FavouriteChild | None, tuple[str, ...]]:
    """The ops' favourite children, None on one device, and remarks on them."""
    if len(task.cluster) == 1:
        return None, ()
    from baechi_ext.place.sct_lp import favourite_children

    seconds = min(task.options.time_limit_seconds, task.left_seconds())
    favourites = favourite_children(task.graph, task.cluster, task.options.sct_threshold, seconds)
    return favourites.child, favourites.notes()


def reserving(graph: OpGraph) -> OpGraph:
    """The graph to be scheduled in place of `graph`: the same ops, and the reserve of each group as one more tensor.

    It goes from the group's first op in topological order to its last, so that it is held from the start of one to the end of the
    other. The ops' own temporary bytes are left out, as they are taken from the reserve; outputs are counted besides, since they may
    stay after the group's ops. Nothing is reserved for an op without a group: it runs when it is placed.
    """
    ops = list(graph.ops)
    edges = [
        (graph.ops[tensor.producer].id, graph.ops[w].id, tensor.bytes, tensor.name) for tensor in graph.tensors for w in tensor.readers
    ]
    for members in graph.groups.values():
        if len(members) == 1:
            continue
        held = [sum(graph.tensors[t].bytes for t in graph.outputs[v]) for v in members]
        working = [ops[v].temporary_bytes + max(0, ops[v].output_bytes - out) for v, out in zip(members, held, strict=True)]
        first, last = min(members, key=graph.rank.__getitem__), max(members, key=graph.rank.__getitem__)
        edges.append((ops[first].id, ops[last].id, max(working) + max(held), _new_name(graph, first)))
        for v in members:
            ops[v] = replace(ops[v], temporary_bytes=0, output_bytes=0)
    return OpGraph.from_edges(ops, edges, name=graph.name)


def _new_name(graph: OpGraph, producer: int) -> str:
    taken = {graph.tensors[t].name for t in graph.outputs[producer]}
    name = "reserve"
    while name in taken:
        name += "'"
    return name


def heft(task: Task) -> PlanResult:
    """The schedule of HEFT (`earliest_finish`), judged by the simulator like every other; the better one where there are two."""
    return conclude(task, [Proposal(s.placement, (s.priority,)) for s in earliest_finishes(task.graph, task.cluster)])
