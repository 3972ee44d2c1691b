"""Topological chunks: runs of neighbouring ops, one per device, of equal time or equal bytes."""

from collections.abc import Sequence

from baechi_ext.ir.op_graph import OpGraph

Unit = tuple[int, ...]


def units(graph: OpGraph, order: Sequence[int] | None = None) -> list[Unit]:
    """What can be placed on its own: colocation groups, and ops without one; by their first op in `order`, or `graph.order`."""
    rank = {v: i for i, v in enumerate(graph.order if order is None else order)}
    whole = [*graph.groups.values(), *((v,) for v, op in enumerate(graph.ops) if op.colocation is None)]
    return sorted((tuple(sorted(unit, key=rank.__getitem__)) for unit in whole), key=lambda unit: rank[unit[0]])


def held_bytes(graph: OpGraph, unit: Unit) -> float:
    """Persistent bytes and all outputs of a unit: in a training step nearly all of them are held when the forward pass ends."""
    return sum(graph.ops[v].persistent_bytes + sum(graph.tensors[t].bytes for t in graph.outputs[v]) for v in unit)


def chunks(weights: Sequence[float], shares: Sequence[float], sizes: Sequence[float], rooms: Sequence[float]) -> tuple[int, ...]:
    """A device for each of a sequence of units: the one in whose share of the total weight the unit's middle falls.

    Device d gets a part of the weight in proportion to shares[d] >= 0 (not all 0). A device whose room (bytes) the sizes would
    exceed is left for the next one; the last takes all that is left.
    """
    whole = sum(weights) / sum(shares)
    found = []
    d, done, until, held = 0, 0.0, whole * shares[0], 0.0
    for weight, size in zip(weights, sizes, strict=True):
        while d < len(shares) - 1 and (done + weight / 2 > until or held + size > rooms[d]):
            d, held = d + 1, 0.0
            until = max(until, done) + whole * shares[d]
        done += weight
        held += size
        found.append(d)
    return tuple(found)


def spread(graph: OpGraph, ordered: Sequence[Unit], devices: Sequence[int]) -> tuple[int, ...]:
    """A device per unit -> a device per op."""
    placement = [0] * len(graph)
    for unit, d in zip(ordered, devices, strict=True):
        for v in unit:
            placement[v] = d
    return tuple(placement)


def depth_first_order(graph: OpGraph) -> tuple[int, ...]:
    """Op positions in a topological order that follows each branch as far as it goes before it takes up the next."""
    missing = [len(i) for i in graph.inputs]
    stack = [v for v in reversed(range(len(graph))) if missing[v] == 0]
    order: list[int] = []
    while stack:
        v = stack.pop()
        order.append(v)
        released = []
        for t in graph.outputs[v]:
            for w in graph.tensors[t].readers:
                missing[w] -= 1
                if missing[w] == 0:
                    released.append(w)
        stack += reversed(released)
    return tuple(order)
