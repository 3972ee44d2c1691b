"""The plans that every method has to beat: one device, topological chunks of equal time, ops dealt in turn or by lot."""

from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from baechi_ext.errors import InfeasibleError
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.arrange import arrange
from baechi_ext.place.chunks import Unit, all_held_bytes, best_split, chunks, depth_first_order, ranks, spread, sums, units
from baechi_ext.place.common import PlaceOptions, PlanResult, Proposal, Task, begin, conclude

Split = Callable[[Sequence[float], Sequence[float], Sequence[float], Sequence[float]], tuple[int, ...]]
"""Weights, devices' shares, sizes and rooms -> a device per unit: `best_split` or `chunks`."""


def single(graph: OpGraph, cluster: Cluster, options: PlaceOptions) -> PlanResult:
    """Every op that is not pinned on one device: the fastest that holds them all, of equals the first.

    Raises InfeasibleError, with the bytes needed and available, where no device does.
    """
    task = begin("single", graph, cluster, options)
    # Of equal devices only the first is simulated.
    pinned = set(graph.pins.values())
    kinds = {(x.speed, x.memory_bytes, d if d in pinned else -1): d for d, x in reversed(list(enumerate(cluster.devices)))}
    try:
        return conclude(task, [Proposal((d,) * len(graph)) for d in sorted(kinds.values())], repairs=False)
    except InfeasibleError as e:
        if e.status == "infeasible":
            raise
        raise InfeasibleError(f"{e}, or a method that spreads the graph over several devices", e.status) from e


def random(graph: OpGraph, cluster: Cluster, options: PlaceOptions) -> PlanResult:
    """Each colocation group, and each op without one, on a device drawn from those that have room for it.

    A device twice as fast is drawn twice as often; the lots follow from the seed. Raises InfeasibleError where no valid plan was
    found.
    """
    task = begin("random", graph, cluster, options)
    draw = Random(options.seed)
    speeds = [d.speed for d in cluster.devices]
    placement = _deal(task, lambda among: draw.choices(among, [speeds[d] for d in among])[0])
    return conclude(task, [Proposal(placement)])


def round_robin(graph: OpGraph, cluster: Cluster, options: PlaceOptions) -> PlanResult:
    """Colocation groups, and ops without one, dealt in topological order: each device with room for one in its turn.

    A device twice as fast has two turns. Raises InfeasibleError where no valid plan was found.
    """
    task = begin("round_robin", graph, cluster, options)

    def deal(sequence: Sequence[int]) -> tuple[int, ...]:
        turns = [0] * len(cluster)
        place = {d: i for i, d in enumerate(sequence)}

        def next_in_turn(among: Sequence[int]) -> int:
            d = min(among, key=lambda d: ((turns[d] + 1) / cluster.devices[d].speed, place[d]))
            turns[d] += 1
            return d

        return _deal(task, next_in_turn)

    return conclude(task, [arrange(task, deal)])


def _deal(task: Task, choose: Callable[[Sequence[int]], int]) -> tuple[int, ...]:
    """A device for every op: what `choose` takes among those with room for its unit, or the one with the most room."""
    graph = task.graph
    room = [float("inf") if d.memory_bytes is None else float(d.memory_bytes) for d in task.cluster.devices]
    ordered = units(graph, task.order)
    devices = []
    for size in all_held_bytes(graph, ordered):
        among = [d for d, free in enumerate(room) if size <= free]
        d = choose(among) if among else max(range(len(room)), key=lambda d: (room[d], -d))
        room[d] -= size
        devices.append(d)
    return spread(graph, ordered, devices)


def contiguous(graph: OpGraph, cluster: Cluster, options: PlaceOptions) -> PlanResult:
    """Chunks of a topological order that take equal time, one per device; colocation groups stay whole, with their first op.

    Tried in breadth-first and in depth-first order, or in the one that the options name; with the split whose slowest chunk is the
    fastest and with chunks in proportion to the devices' speeds, and with chunks that end early where parameters and outputs fill a
    device.
    Raises InfeasibleError where no valid plan was found.
    """
    task = begin("contiguous", graph, cluster, options)
    unlimited = (float("inf"),) * len(cluster)
    limits = tuple(float("inf") if d.memory_bytes is None else float(d.memory_bytes) for d in cluster.devices)
    proposals = []
    for order in (task.order,) if options.traversal_order else (graph.order, depth_first_order(graph)):
        cut = _Cut(graph, cluster, units(graph, order))
        for rooms in dict.fromkeys((unlimited, limits)):
            proposals += [arrange(task, partial(cut.placement, split, rooms), ranks(order)) for split in (best_split, chunks)]
    return conclude(task, proposals)


class _Cut:
    """A sequence of units, to be cut into one chunk per device."""

    def __init__(self, graph: OpGraph, cluster: Cluster, ordered: Sequence[Unit]) -> None:
        self.graph = graph
        self.ordered = ordered
        self.speeds = [d.speed for d in cluster.devices]
        self.times = sums([op.compute_us for op in graph.ops], ordered)
        self.sizes = all_held_bytes(graph, ordered)

    def placement(self, split: Split, rooms: Sequence[float], sequence: Sequence[int]) -> tuple[int, ...]:
        """The chunks that `split` makes, the first for the first device of the sequence; a device holds at most its room."""
        speeds, room_of = [self.speeds[d] for d in sequence], [rooms[d] for d in sequence]
        return spread(self.graph, self.ordered, [sequence[i] for i in split(self.times, speeds, self.sizes, room_of)])
