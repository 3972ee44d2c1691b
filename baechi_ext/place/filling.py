"""Filling devices with ops in an order, one after the other: what m_topo and m_topo_nonuniform share."""

import math
from collections.abc import Sequence

from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.chunks import spread, sums, units


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
    ordered = units(graph, order)
    devices = []
    for size in sums(graph.columns.all_bytes().tolist(), ordered):
        while current < len(caps) and used[sequence[current]] + size > caps[sequence[current]]:
            current += 1
        d = sequence[current] if current < len(caps) else max(range(len(caps)), key=lambda d: (caps[d] - used[d], -d))
        used[d] += size
        devices.append(d)
    return spread(graph, ordered, devices)


def memory_cap_bytes(graph: OpGraph, num_devices: int) -> float:
    """How many bytes of ops one device takes before the next one's turn comes: an equal share and the largest op."""
    sizes = graph.columns.all_bytes().tolist()
    return math.floor(sum(sizes) / num_devices) + max(sizes, default=0)


def op_bytes(graph: OpGraph, v: int) -> float:
    """All bytes that op v ever allocates, as if it never freed any."""
    op = graph.ops[v]
    return op.persistent_bytes + op.temporary_bytes + max(op.output_bytes, sum(graph.tensors[t].bytes for t in graph.outputs[v]))
