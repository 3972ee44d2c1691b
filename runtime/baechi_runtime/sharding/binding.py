"""The shard graph's nodes as calls that a mesh of processes can run: which of a node's tensors each argument is, which configurations can
be run, the best strategy of these, and which of the ways to lay it out moves least: a split of two is over one mesh dimension or another,
best its neighbour's."""

import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import numpy as np
from torch import Tensor as Values
from torch import fx
from torch.distributed.tensor import Partial, Placement

from baechi_ext.errors import ShardError
from baechi_ext.shard.graph import Node, Strategy, Tensor
from baechi_ext.shard.prune import restricted
from baechi_ext.shard.search import Found, SearchOptions, search_tables
from baechi_ext.shard.tables import Tables, bytes_of, configurations
from baechi_runtime.sharding.captured import CapturedGraph
from baechi_runtime.sharding.layout import Argument, Assignment, Layout, Placements, mesh_shape, placements
from baechi_runtime.sharding.rules import arguments, rule_of, splittable


@dataclass(frozen=True)
class Bound:
    """A call, its node, and the node's tensor for each of the call's arguments and results."""

    call: fx.Node
    node: Node
    read: tuple[Tensor, ...]
    written: tuple[Tensor, ...]

    def assignments(self, configuration: Sequence[int], mesh: Sequence[int]) -> list[Assignment]:
        """All ways to lay a configuration out that can be run; none where it can't."""
        free = splittable(self.call, self.read, self.written)
        if any(parts > 1 and axis not in free for axis, parts in enumerate(configuration)):
            return []
        return assignments(replace(self.node, inputs=self.read, outputs=self.written), configuration, mesh)

    def layout(self, assignment: Assignment) -> Layout:
        read = tuple(Argument.of(tensor, assignment) for tensor in self.read)
        return Layout(assignment, read, tuple(placements(tensor, assignment, Partial()) for tensor in self.written))


def assignments(node: Node, configuration: Sequence[int], mesh: Sequence[int]) -> list[Assignment]:
    """All ways to lay a configuration out on a mesh; none where the mesh, or DTensor, can't express it.

    DTensor splits a dimension of a tensor over mesh dimensions from the outermost on. So where several axes split one dimension, those of
    the outer axis have to come first, and an inner axis can only be split where the outer one is split to the last.
    """
    if any(not _whole_pieces(node, tensor, configuration) for tensor in _tensors(node)):
        return []
    return [a for a in _products(tuple(configuration), tuple(mesh)) if all(_in_order(t, a) for t in _tensors(node))]


def _tensors(node: Node) -> tuple[Tensor, ...]:
    return (*node.inputs, *node.outputs, *node.weights)


def _products(rest: tuple[int, ...], mesh: tuple[int, ...]) -> Iterator[Assignment]:
    if not mesh:
        if all(parts == 1 for parts in rest):
            yield ()
        return
    for axis in (*range(len(rest)), None):
        if axis is None:
            left = rest
        elif rest[axis] % mesh[0]:
            continue
        else:
            left = (*rest[:axis], rest[axis] // mesh[0], *rest[axis + 1 :])
        yield from ((axis, *others) for others in _products(left, mesh[1:]))


def _whole_pieces(node: Node, tensor: Tensor, configuration: Sequence[int]) -> bool:
    for size, axes in zip(tensor.shape, tensor.axes, strict=True):
        parts, free = 1, True
        for axis in axes:
            if configuration[axis] > 1 and not free:
                return False
            free &= configuration[axis] == node.axes[axis].size
            parts *= configuration[axis]
        if size % parts:
            return False
    split = [axis for axes in tensor.axes for axis in axes if configuration[axis] > 1]
    return len(split) == len(set(split))


def _in_order(tensor: Tensor, assignment: Assignment) -> bool:
    used = ([axes.index(axis) for axis in assignment if axis in axes] for axes in tensor.axes)
    return all(places == sorted(places) for places in used)


def bind(captured: CapturedGraph) -> dict[str, Bound]:
    """Bind each node of the shard graph, by name, to its call in the forward graph. Raises ShardError for a node that is no call."""
    calls = {call.name: call for call in captured.forward.nodes}
    graph = captured.graph
    missing = [node.name for node in graph.nodes if node.name not in calls]
    if missing:
        raise ShardError(f"{missing[0]} of shard graph {graph.name} is not a call of {captured.forward.name}; derive it from this model")
    return {node.name: _bound(calls[node.name], node, captured) for node in graph.nodes}


def executable(tables: Tables, bound: dict[str, Bound], mesh: Sequence[int] | None = None) -> Tables:
    """The tables with only those configurations that can be run on a mesh, by default that of the prime factors; the one that splits
    nothing always can."""
    mesh = mesh or mesh_shape(tables.machine.devices)
    known: dict[object, np.ndarray] = {}
    kept = []
    for node, space in zip(tables.graph.nodes, tables.spaces, strict=True):
        b = bound[node.name]
        free = splittable(b.call, b.read, b.written)
        key = (node.axes, node.contiguous, node.terms, b.read, b.written, node.weights, node.inputs, node.outputs, frozenset(free))
        if key not in known:
            known[key] = np.array([i for i, row in enumerate(space) if b.assignments(row.tolist(), mesh)], np.int64)
        kept.append(known[key])
    return restricted(tables, kept)


@dataclass(frozen=True)
class Searched:
    """The best strategy of all, the best of those that can be run, and the tables of these. `measured`: the best of these by measured
    costs, where calls were measured in all ways."""

    free: Found
    found: Found
    measured: Found | None = None

    @property
    def tables(self) -> Tables:
        """The tables of what can be run."""
        return self.found.tables

    def of(self, strategy: Strategy) -> Found:
        """A strategy that can be run as if it had been found, in the tables of measured costs where there are some."""
        found = self.measured or self.found
        choice = tuple(found.tables.choice(strategy))
        return replace(found, choice=choice, cost=found.tables.cost(choice), held_bytes=bytes_of(found.tables, choice))

    def line(self) -> str:
        """Say what it costs to keep to strategies that can be run."""
        gap = self.found.cost / self.free.cost - 1 if self.free.cost else 0.0
        sizes = f"{sum(self.tables.sizes)} of {sum(self.free.tables.sizes)} configurations"
        return f"{gap:.2%} above the best without that limit ({sizes} can be run)"


def among_runnable(
    free: Found, captured: CapturedGraph, mesh: Sequence[int] | None = None, options: SearchOptions | None = None
) -> Searched:
    """A search's answer, and the best of the strategies that a mesh can run, by default that of the prime factors. Raises ShardError where
    tables would be too large."""
    return Searched(free, search_tables(executable(free.tables, bind(captured), mesh), options))


def _bound(call: fx.Node, node: Node, captured: CapturedGraph) -> Bound:
    results = call.meta["val"] if isinstance(call.meta["val"], list | tuple) else [call.meta["val"]]
    written = node.outputs[: sum(isinstance(value, Values) for value in results)]
    return Bound(call, node, _read(call, written[0], list(captured.reads[node.name])), written)


def _read(call: fx.Node, result: Tensor, reads: list[tuple[str, Tensor]]) -> tuple[Tensor, ...]:
    """The tensors in the order of the call's arguments; what the node does not mention is read along with the result, or whole."""
    rule = rule_of(call)
    found = []
    for argument in arguments(call):
        shape = tuple(getattr(argument.meta.get("val"), "shape", ()))
        at = next((i for i, (name, _) in enumerate(reads) if name == argument.name), None)
        if at is not None:
            found.append(reads.pop(at)[1])
        elif rule is not None and rule.aligned:
            found.append(_broadcast(result, shape))
        else:
            found.append(Tensor(shape, ((),) * len(shape)))
    return tuple(found)


def _broadcast(result: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of that shape that is read element by element with the result."""
    skipped = len(result.shape) - len(shape)
    axes = (result.axes[skipped + i] if size == result.shape[skipped + i] else () for i, size in enumerate(shape))
    return Tensor(shape, tuple(axes))


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
            split = node.splits(configuration)
            shape = " x ".join(map(str, mesh))
            raise ShardError(f"{node.name} split by {split} can't be run on a mesh of {shape}; search with --executable")
        options[node.name] = [bound[node.name].layout(way) for way in ways]
    return _nearest(bound, options, mesh)


def _nearest(bound: dict[str, Bound], options: dict[str, list[Layout]], mesh: Sequence[int]) -> dict[str, Layout]:
    near: dict[str, list[tuple[str, int, str, int, float]]] = defaultdict(list)
    """For each call the tensors that it reads, and those that are read from it: source, its output, reader, its argument, words."""
    for name, b in bound.items():
        for position, argument in enumerate(arguments(b.call)):
            source, output = origin(argument)
            if source.name in options and output < len(bound[source.name].written):
                for end in (name, source.name):
                    near[end].append((source.name, output, name, position, float(b.read[position].words)))
    chosen: dict[str, Layout] = {}

    def cost(name: str, layout: Layout) -> float:
        chosen[name] = layout
        ends = ((chosen[s].outputs[o], chosen[t].arguments[i].placements, w) for s, o, t, i, w in near[name] if {s, t} <= chosen.keys())
        return sum(words * _moved(written, read, mesh) for written, read, words in ends)

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
