"""m-TOPO (Baechi, SoCC 2020, section 3.1): topological chunks of equal memory, or as large as each device, whatever that costs in time."""

import math
from collections.abc import Sequence
from functools import partial

from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.arrange import arrange
from baechi_ext.place.chunks import ranks, spread, sums
from baechi_ext.place.common import PlanResult, Task, conclude


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


def fill(
    graph: OpGraph, order: Sequence[int], caps: Sequence[float], sequence: Sequence[int] | None = None
) -> tuple[int, ...]:
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
