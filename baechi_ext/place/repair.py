"""Repair of a placement that exceeds memory limits: whole colocation groups and single ops move to where they fit.

Guided steps come first: from the device that exceeds most, the units whose move costs the least transfer and load per byte that it frees
at the instant of the peak. Each is judged by the simulator, and is kept only where it lowers the bytes over the limits. Where those fail,
compiled search (`fitting`, seeded) goes on. The number of simulations is bounded by the graph's size, so that the same input gives the same
plan; in a large graph a search bounds the seconds, too.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from baechi_ext.place.chunks import chunks, depth_first_order, held_bytes, least_memory_order, ranks, spread
from baechi_ext.place.effort import Effort, clock_seconds
from baechi_ext.place.trial import Trial, draining_order, try_orders
from baechi_ext.simulate import Simulator, Timeline

if TYPE_CHECKING:
    from baechi_ext.place.moves import Moves

REPAIRED_OPS, BRIEFLY_REPAIRED_OPS = 2_000_000, 50_000
_FITTED_OPS = 20_000_000  # the most ops that a repair, and a search for a plan that fits, may simulate
_FEWEST_STEPS, _MOST_STEPS = 16, 10_000
_STEPS_PER_MOVE = 50  # the most steps for each unit and device that it could move to: few units leave little to try
_SINGLE_MOVES = 12


def repair(simulator: Simulator, start: Trial, seed: int, effort: Effort = Effort(REPAIRED_OPS)) -> Trial:  # noqa: B008 - frozen
    """The best trial found from `start`: valid, or else with the fewest bytes over the limits."""
    guided = _Guided(simulator, start, effort)
    best = guided.run()
    if best.valid or guided.steps <= 0 or len(simulator.cluster) == 1:
        return best
    from baechi_ext.place.fitting import fit

    return fit(best, seed, Effort(guided.steps * len(simulator.graph), guided.left_seconds()))


def fitted(simulator: Simulator, nearest: Trial, seed: int) -> Trial:
    """A plan that fits, whatever its step takes, or the one with the fewest bytes over the limits; never worse than `nearest`.

    Placements by bytes are repaired one after the other; where that fails a longer search begins at the best.
    """
    best = nearest
    for start in trials_by_bytes(simulator):
        best = min([best, repair(simulator, start, seed)], key=lambda trial: trial.key)
        if best.valid:
            return best
    from baechi_ext.place.fitting import fit

    return fit(best, seed, Effort(_FITTED_OPS))


class _Guided:
    """The guided steps of one repair: the best trial so far and the steps left."""

    def __init__(self, simulator: Simulator, start: Trial, effort: Effort) -> None:
        self.simulator = simulator
        self.graph = simulator.graph
        self.best = start
        self.units = [unit for unit in self.graph.units() if unit[0] not in self.graph.pins]
        self.orders = (draining_order(simulator),)
        moves = len(self.units) * (len(simulator.cluster) - 1)
        self.steps = min(_MOST_STEPS, _STEPS_PER_MOVE * moves, max(_FEWEST_STEPS, effort.simulated_ops // max(1, len(self.graph))))
        self._until_seconds = clock_seconds() + effort.seconds

    def run(self) -> Trial:
        while len(self.simulator.cluster) > 1 and not self.best.valid and min(self.steps, self.left_seconds()) > 0 and self._guided_step():
            pass
        return self.best

    def left_seconds(self) -> float:
        return self._until_seconds - clock_seconds()

    def _try(self, moves: Sequence[tuple[int, int]]) -> bool:
        """Keeps the plan with each (unit, device) moved, and returns True, if fewer bytes are then over the limits."""
        self.steps -= 1
        placement = list(self.best.placement)
        for u, d in moves:
            for v in self.units[u]:
                placement[v] = d
        trial = try_orders(self.simulator, placement, self.orders)
        if sum(trial.excess_bytes) < sum(self.best.excess_bytes):
            self.best = trial
            return True
        return False

    def _guided_step(self) -> bool:
        """Frees the device that exceeds most: by many units at once, else by one of the best few; False where none helps."""
        excess = self.best.excess_bytes
        source = max(range(len(excess)), key=lambda d: (excess[d], -d))
        room = [room - peak for room, peak in zip(self.simulator.cluster.rooms, self.best.peak_memory_bytes, strict=True)]
        held = held_at_peak(self.best.timeline, source)
        moves = self._moves.ranked(self.best.timeline, source, held, excess[source], room)
        batch: dict[int, int] = {}
        freed = 0.0
        for _, u, d, size in moves:
            if u not in batch and size <= room[d] and freed < excess[source]:
                batch[u] = d
                room[d] -= size
                freed += size
        if len(batch) > 1 and self._try(list(batch.items())):
            return True
        return any(self.steps > 0 and self._try([(u, d)]) for _, u, d, _ in moves[:_SINGLE_MOVES])

    @cached_property
    def _moves(self) -> "Moves":
        from baechi_ext.place.moves import Moves

        return Moves(self.graph, self.simulator.cluster, self.units)


def held_at_peak(timeline: Timeline, device: int) -> dict[int, float]:
    """For each op, the bytes on `device` that its move elsewhere would free at the instant of that device's peak.

    Persistent bytes and live outputs count for the op, a received copy for the op there that reads it last.
    """
    from baechi_ext.simulate.peak import COPY, WORKING, holdings  # loads numpy

    graph, end, placement = timeline.graph, timeline.end_us, timeline.placement
    held: dict[int, float] = {v: op.persistent_bytes for v, op in enumerate(graph.ops) if placement[v] == device}
    for kind, item, size in holdings(timeline).of(device).at_peak()[1]:
        v = item if kind == WORKING else graph.tensors[item].producer
        if kind == COPY:
            v = max((w for w in graph.tensors[item].readers if placement[w] == device), key=lambda w: (end[w], w))
        held[v] += size
    return held


def trials_by_bytes(simulator: Simulator) -> Iterator[Trial]:
    """Trials made to fit, at any cost in time: chunks of bytes in topological orders, run in these orders, then the largest unit first."""
    graph, cluster = simulator.graph, simulator.cluster
    known = [d.memory_bytes for d in cluster.devices if d.memory_bytes is not None]
    largest = max(known, default=1) or 1
    rooms = [largest if d.memory_bytes is None else d.memory_bytes for d in cluster.devices]
    shares = rooms if any(rooms) else [1.0] * len(rooms)
    draining = draining_order(simulator)
    for order in (graph.order, depth_first_order(graph), least_memory_order(graph)):
        ordered = graph.units(order)
        sizes = held_bytes(graph, ordered)
        placement = spread(graph, ordered, chunks(sizes, shares, sizes, [float("inf")] * len(rooms)))
        yield try_orders(simulator, placement, [draining, ranks(order)])
    whole = graph.units()
    sizes_of = dict(zip(whole, held_bytes(graph, whole), strict=True))
    largest_first = sorted(sizes_of, key=lambda unit: (-sizes_of[unit], unit))
    left = list(rooms)
    devices = []
    for unit in largest_first:
        d = max(range(len(left)), key=lambda d: (left[d], -d))
        left[d] -= sizes_of[unit]
        devices.append(d)
    yield try_orders(simulator, spread(graph, largest_first, devices), [draining, ranks(least_memory_order(graph))])
