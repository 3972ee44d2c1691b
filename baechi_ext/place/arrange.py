"""Which part of a placement goes to which device: sequences of devices are tried where devices or links differ."""

from collections.abc import Callable, Sequence

from baechi_ext.ir.cluster import Cluster
from baechi_ext.place.common import Proposal, Task
from baechi_ext.place.trial import Priority, try_orders

_SIMULATED_OPS = 50_000
_FEWEST_TRIALS, _MOST_TRIALS = 8, 120


def arrange(task: Task, make: Callable[[Sequence[int]], Sequence[int]], priority: Priority | None = None) -> Proposal:
    """The placement `make` gives for the best sequence of devices found; its first order is `priority`.

    The search begins with the devices as they stand and exchanges two at a time while that helps in the simulator. Devices that
    differ in nothing, pinned ops included, are not exchanged: equal devices with equal links cost one call of `make`. The number of
    simulations is bounded by the graph's size, never by a clock.
    """
    priorities = () if priority is None else (priority,)
    sequence = list(range(len(task.cluster)))
    graph = task.graph
    placement = graph.pinned(make(sequence))
    pairs = _exchangeable(task.cluster, pinned=bool(graph.pins))
    left = min(_MOST_TRIALS, max(_FEWEST_TRIALS, _SIMULATED_OPS // max(1, len(graph)))) if pairs else 0
    best = try_orders(task.simulator, placement, (priority,)) if pairs else None
    improved = True
    while best is not None and improved and left > 0:
        improved = False
        for i, j in pairs[:left]:
            sequence[i], sequence[j] = sequence[j], sequence[i]
            trial = try_orders(task.simulator, graph.pinned(make(sequence)), (priority,))
            left -= 1
            if trial.key < best.key:
                best, improved = trial, True
            else:
                sequence[i], sequence[j] = sequence[j], sequence[i]
    return Proposal(placement if best is None else best.placement, priorities)


def _exchangeable(cluster: Cluster, *, pinned: bool) -> list[tuple[int, int]]:
    """Pairs of places in the sequence whose exchange can change anything: none where all devices and all links are equal."""
    k = len(cluster)
    kinds = {(device.speed, device.memory_bytes) for device in cluster.devices}
    links = {cluster.link(i, j) for i in range(k) for j in range(k) if i != j}
    return [(i, j) for i in range(k) for j in range(i + 1, k)] if pinned or len(kinds) > 1 or len(links) > 1 else []
