"""Baechi's adjustment methods: ops are placed one by one, as if there were no colocation groups, and then each group gets one device.

A group goes to one of the devices that its ops were given: which one, the method says. The result is a proposal like every other: the
simulator judges it, and it is repaired where it does not fit.
"""

from collections.abc import Sequence
from random import Random

from baechi_ext.errors import OptionError
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph

NOOP = "noop"
ADJUSTMENTS: dict[str, tuple[str]] = {
    NOOP: ("groups bind while ops are placed",),
    "random": ("else ops are placed one by one, and a group goes where one of its ops is, drawn at random",),
    "memory": ("where its largest op is",),
    "time": ("where its longest op is",),
    "frequent": ("where most of its ops are",),
    "memory_sum": ("where most of its bytes are",),
    "time_sum": ("where most of its time is",),
}
"""Name -> (help,)."""


def adjust(
    graph: OpGraph, cluster: Cluster, placement: Sequence[int], method: str, *, with_memory_limit: bool = False, seed: int = 0
) -> tuple[int, ...]:
    """The placement with each colocation group of `graph` on one device, groups in file order.

    With `with_memory_limit` a device whose memory the persistent bytes and outputs of what is on it would exceed is passed over for
    the method's next choice, and where all are full the group goes to the device with the most room; ops that move give back what
    they held. Raises OptionError for an unknown method.
    """
    if method not in ADJUSTMENTS:
        raise OptionError(f"unknown adjustment method {method!r}; choose one of {', '.join(ADJUSTMENTS)}")
    adjusted = list(placement)
    if method == NOOP:
        return tuple(adjusted)
    draw, weights = Random(seed), _weights(graph, method)
    room = cluster.rooms
    held: list[float] = graph.columns.held_bytes().tolist()
    for v, d in enumerate(placement):
        room[d] -= held[v]
    for members in graph.groups.values():
        for v in members:
            room[adjusted[v]] += held[v]
        choices = _choices(weights, members, [placement[v] for v in members], method, draw)
        d = choices[0]
        size = sum(held[v] for v in members)
        if with_memory_limit:
            everywhere = sorted(range(len(room)), key=lambda d: -room[d])
            d = next((d for d in (*choices, *everywhere) if size <= room[d]), everywhere[0])
        room[d] -= size
        for v in members:
            adjusted[v] = d
    return tuple(adjusted)


def _choices(weights: Sequence[float], members: Sequence[int], devices: Sequence[int], method: str, draw: Random) -> list[int]:
    """The devices of a group's ops, the method's first choice first; of equals the one whose first op comes first."""
    if method == "random":
        shuffled = draw.sample(list(devices), len(devices))
        return list(dict.fromkeys(shuffled))
    totals: dict[int, float] = {}
    for d, v in zip(devices, members, strict=True):
        weight = weights[v]
        before = totals.get(d, 0.0)
        totals[d] = max(before, weight) if method in _BY_ONE_OP else before + weight
    return sorted(totals, key=lambda d: -totals[d])


def _weights(graph: OpGraph, method: str) -> list[float]:
    if "memory" in method:
        sizes: list[float] = graph.columns.all_bytes().tolist()
        return sizes
    return [op.compute_us if "time" in method else 1.0 for op in graph.ops]


_BY_ONE_OP = ("memory", "time")  # the weight of a device is that of the heaviest op there, not the sum
