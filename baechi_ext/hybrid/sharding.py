"""Ways to split the ops of a training step: the forward graph's loops, in microseconds of this step and of a group's links."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from baechi_ext.errors import ShardError
from baechi_ext.ir.cluster import Link
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.shard.graph import Node, ShardGraph, Tensor
from baechi_ext.shard.machine import Machine
from baechi_ext.shard.tables import Tables
from baechi_ext.shard.terms import Compute

_LEAST_US_PER_BYTE = 1e-18
"""For links that take no time."""
_US = 1e-6
"""10^12 operations a second with which an operation takes a microsecond: costs are then microseconds."""


@dataclass(frozen=True)
class Sharding:
    """Nodes that can be split, and for each op of a graph the index of the node that it belongs to, its backward and update ops too.

    None: the op is not split, and every device of a group does all of it. `runnable` leaves in tables what can be run on that many
    devices; by default all.
    """

    graph: ShardGraph
    node_of: tuple[int | None, ...]
    runnable: Callable[[Tables], Tables] = lambda tables: tables

    def __post_init__(self) -> None:
        for v in self.node_of:
            if v is not None and not 0 <= v < len(self.graph.nodes):
                raise ShardError(f"an op belongs to node {v} of {len(self.graph.nodes)}; give it one that there is, or None")

    @cached_property
    def ops_of(self) -> tuple[tuple[int, ...], ...]:
        """The ops of each node, in file order."""
        found: list[list[int]] = [[] for _ in self.graph.nodes]
        for op, v in enumerate(self.node_of):
            if v is not None:
                found[v].append(op)
        return tuple(map(tuple, found))

    @cached_property
    def hosts(self) -> tuple[int | None, ...]:
        """For each node the one whose ops wait for what its devices tell each other: itself, or where it has no op (a view) the nearest
        that has, of those it reads, else of those that read it."""
        hosts: list[int | None] = [v if ops else None for v, ops in enumerate(self.ops_of)]
        edges = sorted(self.graph.edges, key=lambda e: e.target)
        for edge in edges:
            if hosts[edge.target] is None:
                hosts[edge.target] = hosts[edge.source]
        for edge in sorted(edges, key=lambda e: -e.source):
            if hosts[edge.source] is None:
                hosts[edge.source] = hosts[edge.target]
        return tuple(hosts)

    def timed(self, graph: OpGraph) -> ShardGraph:
        """The nodes, whose arithmetic takes what their ops take (`compute_us`) instead of operations.

        An update op takes time by the parts of its node's weights.
        """
        nodes = []
        for node, ops in zip(self.graph.nodes, self.ops_of, strict=True):
            update_us = sum(graph.ops[i].compute_us for i in ops if graph.ops[i].phase == "update")
            own_us = sum(graph.ops[i].compute_us for i in ops) - update_us
            others = [term for term in node.terms if not isinstance(term, Compute)]
            nodes.append(replace(node, terms=(*_times(node, own_us), *_by_words(node, update_us, node.weights), *others)))
        return replace(self.graph, nodes=tuple(nodes))


def machine_of(devices: int, link: Link, speed: float, memory_bytes: float | None = None) -> Machine:
    """A group's devices, on which an operation is a microsecond of a device of speed 1; messages take `speed` times as many."""
    return Machine(
        devices=devices,
        tera_flops=_US,
        gigabytes_per_second=1e-3 / max(link.us_per_byte * speed, _LEAST_US_PER_BYTE),
        latency_us=link.latency_us * speed,
        memory_bytes=memory_bytes,
    )


def compute_share(node: Node, configuration: Sequence[int]) -> float:
    """The part of a node's arithmetic that a device does."""
    whole = node.flop()
    return node.flop(configuration) / whole if whole else share_of(node.results, configuration)


def share_of(tensors: Sequence[Tensor], configuration: Sequence[int]) -> float:
    """The part of a node's tensors that a device has, by numbers; of several, of all together."""
    words = sum(tensor.words for tensor in tensors)
    return sum(tensor.words / parts_of(tensor, configuration) for tensor in tensors) / words if words else 1.0


def parts_of(tensor: Tensor, configuration: Sequence[int]) -> int:
    """Into how many parts a configuration splits a tensor."""
    return int(tensor.parts(np.array(configuration, np.int64)))


def _times(node: Node, us: float) -> list[Compute]:
    """The node's arithmetic, as much as takes `us` in all; of a node without any, by what it writes."""
    whole = node.flop()
    if not whole:
        return _by_words(node, us, node.results)
    return [replace(term, flop=term.flop * us / whole) for term in node.terms if isinstance(term, Compute)]


def _by_words(node: Node, us: float, tensors: Sequence[Tensor]) -> list[Compute]:
    """Arithmetic that takes `us` in all, by the tensors' numbers; every device does all of it where there are none."""
    words = sum(tensor.words for tensor in tensors)
    if not us or not words:
        return [Compute(us, ())] if us else []
    inside = [tuple(sorted({a for dimension in tensor.axes for a in dimension})) for tensor in tensors]
    shares = (us * tensor.words / words for tensor in tensors)
    return [Compute(share / prod(node.sizes[a] for a in axes), axes) for share, axes in zip(shares, inside, strict=True)]
