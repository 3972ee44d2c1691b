"""The plans that every method has to beat: one device, topological chunks of equal time or bytes, ops dealt in turn or by lot; and the one
that a person chose by expert hints, in the model or a file.

Chunks of bytes are m-TOPO (Baechi, SoCC 2020, section 3.1), whatever that costs in time.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from baechi_ext.errors import InfeasibleError
from baechi_ext.ir.hints import require_hints, with_experts
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.chunks import Unit, best_split, chunks, depth_first_order, held_bytes, ranks, spread, sums
from baechi_ext.place.common import PlanResult, Proposal, Task, arrange, conclude

Split = Callable[[Sequence[float], Sequence[float], Sequence[float], Sequence[float]], tuple[int, ...]]
"""Weights, devices' shares, sizes and rooms -> a device per unit: `best_split` or `chunks`."""


def single(task: Task) -> PlanResult:
    """Every op that is not pinned on one device: of those that hold them all the one with the shortest step, of equals the first.

    Raises InfeasibleError, with the bytes needed and available, where no device does.
    """
    graph, cluster = task.graph, task.cluster
    pinned = sorted(set(graph.pins.values()))

    def kind(d: int) -> tuple[object, ...]:
        """Equal for devices of which only the first is simulated: links count only to and from those that ops are pinned to."""
        links = [(cluster.link(d, p), cluster.link(p, d)) for p in pinned]
        return cluster.devices[d].speed, cluster.devices[d].memory_bytes, d if d in pinned else -1, *links

    kinds = {kind(d): d for d in reversed(range(len(cluster)))}
    proposals = [Proposal((d,) * len(graph)) for d in sorted(kinds.values())]
    return _as_they_are(task, proposals, "a method that spreads the graph over several devices")


def expert(task: Task) -> PlanResult:
    """Each op on the device of its hint, modulo their number; ops without a hint follow their group and neighbours.

    Only the order is chosen here: ops that nothing connects with a hint go to the first device, and a placement that does not fit
    is not repaired. Raises OptionError, too, for a graph without any hint.
    """
    require_hints(task.graph)
    hinted = with_experts(task.graph, [op.expert for op in task.graph.ops])
    placement = [(op.expert or 0) % len(task.cluster) for op in hinted.ops]
    return _as_they_are(task, [Proposal(placement)], "a method that looks at memory (the expert's placement is taken as it is)")


def _as_they_are(task: Task, proposals: Sequence[Proposal], instead: str) -> PlanResult:
    """The plan of the best proposal, none repaired; the error says, too, what to use instead."""
    try:
        return conclude(task, proposals, repairs=False)
    except InfeasibleError as e:
        if e.status == "infeasible":
            raise
        raise InfeasibleError(f"{e}, or {instead}", e.status) from e


def random(task: Task) -> PlanResult:
    """Each colocation group, and each op without one, on a device drawn from those that have room for it.

    A device twice as fast is drawn twice as often; the lots follow from the seed.
    """
    draw = Random(task.options.seed)
    speeds = [d.speed for d in task.cluster.devices]
    placement = _deal(task, lambda among: draw.choices(among, [speeds[d] for d in among])[0])
    return conclude(task, [Proposal(placement)])


def round_robin(task: Task) -> PlanResult:
    """Colocation groups, and ops without one, dealt in topological order: each device with room for one in its turn.

    A device twice as fast has two turns.
    """

    def deal(sequence: Sequence[int]) -> tuple[int, ...]:
        turns = [0] * len(sequence)
        place = {d: i for i, d in enumerate(sequence)}

        def next_in_turn(among: Sequence[int]) -> int:
            d = min(among, key=lambda d: ((turns[d] + 1) / task.cluster.devices[d].speed, place[d]))
            turns[d] += 1
            return d

        return _deal(task, next_in_turn)

    return conclude(task, [arrange(task, deal)])


def _deal(task: Task, choose: Callable[[Sequence[int]], int]) -> tuple[int, ...]:
    """A device for every op: what `choose` takes among those with room for its unit, or the one with the most room."""
    graph = task.graph
    room = task.cluster.rooms
    ordered = graph.units(task.order)
    devices = []
    for size in held_bytes(graph, ordered):
        among = [d for d, free in enumerate(room) if size <= free]
        d = choose(among) if among else max(range(len(room)), key=lambda d: (room[d], -d))
        room[d] -= size
        devices.append(d)
    return spread(graph, ordered, devices)


def contiguous(task: Task) -> PlanResult:
    """Chunks of a topological order that take equal time, one per device; colocation groups stay whole, with their first op.

    Tried in breadth-first and in depth-first order, or in the one that the options name; with the split whose slowest chunk is the
    fastest and with chunks in proportion to the devices' speeds, and with chunks that end early where parameters and outputs fill a
    device.
    """
    graph, cluster = task.graph, task.cluster
    unlimited = (float("inf"),) * len(cluster)
    limits = tuple(cluster.rooms)
    proposals = []
    times_us = [op.compute_us for op in graph.ops]
    for order in (task.order,) if task.options.traversal_order else (graph.order, depth_first_order(graph)):
        units = graph.units(order)
        line = _Line(task, units, sums(times_us, units), held_bytes(graph, units))
        for rooms in dict.fromkeys((unlimited, limits)):
            cuts = (partial(line.cut, split, rooms) for split in (best_split, chunks))
            proposals += [arrange(task, cut, ranks(order)) for cut in cuts]
    return conclude(task, proposals)


@dataclass(frozen=True)
class _Line:
    """The units of a graph in topological order, with their microseconds and the bytes that they hold."""

    task: Task
    units: Sequence[Unit]
    times_us: Sequence[float]
    sizes: Sequence[float]

    def cut(self, split: Split, rooms: Sequence[float], sequence: Sequence[int]) -> tuple[int, ...]:
        """The chunks that `split` makes of the units, the first for the first device of the sequence; a device holds at most its room."""
        speeds = [self.task.cluster.devices[d].speed for d in sequence]
        devices = split(self.times_us, speeds, self.sizes, [rooms[d] for d in sequence])
        return spread(self.task.graph, self.units, [sequence[i] for i in devices])


def m_topo(task: Task) -> PlanResult:
    """Fills one device after the other, in topological order, each up to the cap; never goes back.

    The cap of all devices is total bytes / number of devices + the bytes of the largest op, as in Baechi; unlike there no device
    is filled beyond its own limit by choice, and what is left over goes to the device with the most room.
    """
    cap = memory_cap_bytes(task.graph, len(task.cluster))
    return _filled(task, [min(cap, room) for room in task.cluster.rooms])


def m_topo_nonuniform(task: Task) -> PlanResult:
    """Fills one device after the other, in topological order, each up to its own memory limit; never goes back.

    As few devices as possible are used: a device without a limit takes all that is left. What is left over at the end goes to
    the device with the most room.
    """
    return _filled(task, task.cluster.rooms)


def _filled(task: Task, caps: Sequence[float]) -> PlanResult:
    return conclude(task, [arrange(task, partial(fill, task.graph, task.order, caps), ranks(task.order))])


def fill(graph: OpGraph, order: Sequence[int], caps: Sequence[float], sequence: Sequence[int] | None = None) -> tuple[int, ...]:
    """The placement that fills one device after the other up to its cap (bytes), in `sequence`, and never goes back.

    `order` are the op positions as they are visited.
    The first op of a colocation group takes all members along. What is left over goes to the device with the most room.
    """
    sequence = range(len(caps)) if sequence is None else sequence
    used = [0.0] * len(caps)
    current = 0
    ordered = graph.units(order)
    devices = []
    for size in sums(graph.columns.all_bytes().tolist(), ordered):
        while current < len(caps) and used[sequence[current]] + size > caps[sequence[current]]:
            current += 1
        d = sequence[current] if current < len(caps) else max(range(len(caps)), key=lambda d: (caps[d] - used[d], -d))
        used[d] += size
        devices.append(d)
    return spread(graph, ordered, devices)


def memory_cap_bytes(graph: OpGraph, num_devices: int) -> float:
    """The bytes of ops that one device takes before the next one's turn comes: an equal share and the largest op."""
    sizes: list[float] = graph.columns.all_bytes().tolist()
    return math.floor(sum(sizes) / num_devices) + max(sizes, default=0)
