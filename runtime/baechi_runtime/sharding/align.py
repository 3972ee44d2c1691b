"""Which of the ways to lay a strategy out moves least: a split of two is over one mesh dimension or another, best its neighbour's."""

import operator
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from math import prod

from torch import fx
from torch.distributed.tensor import Placement

from baechi_ext.errors import ShardError
from baechi_ext.shard.tables import configurations
from baechi_runtime.sharding.binding import Bound, bind
from baechi_runtime.sharding.captured import CapturedGraph
from baechi_runtime.sharding.layout import Layout, Placements
from baechi_runtime.sharding.rules import arguments

_SWEEPS = 3


def lay_out(captured: CapturedGraph, strategy: Sequence[Sequence[int] | None], mesh: Sequence[int]) -> dict[str, Layout]:
    """A layout for every node, by name: first in the graph's order, each next to what it reads, then again with all neighbours known.
    None: the configuration of a node is what moves least, too.

    Raises ShardError for a configuration that the mesh, or DTensor, can't express.
    """
    bound = bind(captured)
    options: dict[str, list[Layout]] = {}
    for node, configuration in zip(captured.graph.nodes, strategy, strict=True):
        wanted = configurations(node, prod(mesh)).tolist() if configuration is None else [configuration]
        ways = [way for c in wanted for way in bound[node.name].assignments(c, mesh)]
        if configuration is not None and not ways:
            split = {axis.name: parts for axis, parts in zip(node.axes, configuration, strict=True) if parts > 1}
            shape = " x ".join(map(str, mesh))
            raise ShardError(f"{node.name} split by {split} can't be run on a mesh of {shape}; search with --executable")
        options[node.name] = [bound[node.name].layout(way) for way in ways]
    return _nearest(bound, options, mesh)


def _nearest(bound: dict[str, Bound], options: dict[str, list[Layout]], mesh: Sequence[int]) -> dict[str, Layout]:
    reads: dict[str, list[tuple[str, int, int, float]]] = defaultdict(list)
    readers: dict[str, list[tuple[str, int, int, float]]] = defaultdict(list)
    for name, b in bound.items():
        for position, argument in enumerate(arguments(b.call)):
            source, output = origin(argument)
            if source.name in options and output < len(bound[source.name].written):
                words = float(b.read[position].words)
                reads[name].append((source.name, output, position, words))
                readers[source.name].append((name, output, position, words))
    chosen: dict[str, Layout] = {}

    def cost(name: str, layout: Layout) -> float:
        before = sum(w * _moved(chosen[s].outputs[o], layout.arguments[i].placements, mesh) for s, o, i, w in reads[name] if s in chosen)
        return before + sum(
            w * _moved(layout.outputs[o], chosen[t].arguments[i].placements, mesh) for t, o, i, w in readers[name] if t in chosen
        )

    for _ in range(_SWEEPS):
        for name, layouts in options.items():
            chosen[name] = min(layouts, key=partial(cost, name))
    return chosen


def origin(value: fx.Node) -> tuple[fx.Node, int]:
    """The call that computes a value, and which of its results that is."""
    if value.target is operator.getitem and isinstance(value.args[0], fx.Node) and isinstance(value.args[1], int):
        return value.args[0], value.args[1]
    return value, 0


def _moved(written: Placements, read: Placements, mesh: Sequence[int]) -> float:
    """About what part of a tensor moves, forward and backward."""
    part = 1.0 / prod(size for size, placement in zip(mesh, read, strict=True) if placement.is_shard())
    return part * sum(_change(w, r) for w, r in zip(written, read, strict=True))


def _change(written: Placement, read: Placement) -> float:
    if written == read or written.is_partial():
        return 0.0  # a sum has to be added up whoever reads it
    return 1.0 if written.is_replicate() else 2.0
