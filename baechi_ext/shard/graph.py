"""The graphs that are sharded: nodes with iteration spaces, and tensors between them as projections of those spaces.

A node computes over an iteration space, an axis a loop (Elango, IPDPS 2021, section II). A configuration says into how many parts each
axis is split; the parts are one device's each. Nothing here knows a network or a framework: whoever can name a node's loops, which of
them run over each dimension of its tensors, and what it computes and communicates (`terms`), can have it sharded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from baechi_ext.errors import ShardError
from baechi_ext.ir.dot import quoted
from baechi_ext.shard.terms import Compute, Term

MOST_ITERATIONS = 999_999_999
"""No loop runs more often, and no machine has more devices: their divisors are found one by one, and products fit into 64 bits."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A loop of a node: its name, how often it runs, and whether its iterations may be shared out; `smallest` is the least share."""

    name: str
    size: int
    splits: bool = True
    smallest: int = 1


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that a node reads or writes. Dimension i is split as the axes `axes[i]` are (several: their product; none: not at all).

    `words` is how many numbers it holds.
    """

    shape: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]

    @property
    def words(self) -> int:
        return prod(self.shape)

    def parts(self, splits: NDArray[np.int64]) -> NDArray[np.int64]:
        """Into how many parts each configuration splits it: a row a configuration, a column an axis."""
        parts: NDArray[np.int64] = splits[..., [a for axes in self.axes for a in axes]].prod(axis=-1)
        return parts


@dataclass(frozen=True, slots=True)
class Node:
    """A layer: iteration space, tensors, costs. `contiguous`: axes after a partly split one can't be split (a reshape).

    `weights` are parameters, which the node holds and which no edge brings; the last `passed` outputs are parameters that it only reads,
    and that go on from it to others.
    """

    name: str
    op: str
    axes: tuple[Axis, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    terms: tuple[Term, ...] = ()
    weights: tuple[Tensor, ...] = ()
    contiguous: bool = False
    passed: int = 0

    def __post_init__(self) -> None:
        for tensor in (*self.inputs, *self.outputs, *self.weights):
            if len(tensor.shape) != len(tensor.axes) or any(not 0 <= a < len(self.axes) for dim in tensor.axes for a in dim):
                raise ShardError(f"{self.name}: {tensor} does not fit {len(self.axes)} axes; give each dimension the axes that split it")
        if any(axis.size < 1 or axis.smallest < 1 for axis in self.axes):
            raise ShardError(f"{self.name}: axes {[(a.name, a.size) for a in self.axes]} have to be 1 or longer")
        if any(axis.size > MOST_ITERATIONS for axis in self.axes):
            raise ShardError(f"{self.name}: axes {[(a.name, a.size) for a in self.axes]} are longer than {MOST_ITERATIONS}, the limit")
        if len({axis.name for axis in self.axes}) < len(self.axes):
            raise ShardError(f"{self.name}: two axes of one name among {[axis.name for axis in self.axes]}; name each its own")

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def results(self) -> tuple[Tensor, ...]:
        """The outputs that it computes."""
        return self.outputs[: len(self.outputs) - self.passed]

    def flop(self, configuration: Sequence[int] | None = None) -> float:
        """Operations of a device in a configuration; by default of one that has everything."""
        lengths = self.sizes if configuration is None else [s / p for s, p in zip(self.sizes, configuration, strict=True)]
        return sum(term.flop * prod(lengths[a] for a in term.axes) for term in self.terms if isinstance(term, Compute))

    def splits(self, configuration: Sequence[int]) -> dict[str, int]:
        """Into how many parts the axes are split that are, by name."""
        return {axis.name: parts for axis, parts in zip(self.axes, configuration, strict=True) if parts > 1}

    def axis(self, name: str) -> int | None:
        """The index of the axis of that name; None where there is none."""
        return next((i for i, axis in enumerate(self.axes) if axis.name == name), None)


@dataclass(frozen=True, slots=True)
class Edge:
    """The tensor that node `source` writes as its output `output`, and node `target` reads as its input `input`."""

    source: int
    target: int
    output: int = 0
    input: int = 0


@dataclass(frozen=True)
class ShardGraph:
    """Nodes, and the tensors between them. Edges go from lower to higher indices: nodes are in an order they can run in.

    `ties`: nodes of the same axes, but for names, that are to be split alike.
    """

    name: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    ties: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ShardError(f"graph {self.name} has no nodes; there is nothing to shard")
        names = {node.name for node in self.nodes}
        if len(names) < len(self.nodes):
            raise ShardError(f"graph {self.name} has {len(self.nodes)} nodes of {len(names)} names; give each its own")
        for tie in self.ties:
            if len({tuple((a.size, a.splits, a.smallest) for a in self.nodes[v].axes) for v in tie}) > 1:
                tied = ", ".join(self.nodes[v].name for v in tie)
                raise ShardError(f"graph {self.name}: {tied} have other axes; they can't be split alike")
        for edge in self.edges:
            if not 0 <= edge.source < edge.target < len(self.nodes):
                wrong = f"an edge from node {edge.source} to {edge.target} of {len(self.nodes)}"
                raise ShardError(f"graph {self.name}: {wrong}; list nodes in an order they can run in")
            source, target = self.nodes[edge.source], self.nodes[edge.target]
            if edge.output >= len(source.outputs) or edge.input >= len(target.inputs):
                raise ShardError(f"{source.name} -> {target.name}: no such tensor (output {edge.output}, input {edge.input})")
            written, read = source.outputs[edge.output].shape, target.inputs[edge.input].shape
            if len(written) != len(read):
                raise ShardError(f"{source.name} -> {target.name}: {written} is written and {read} read; insert a reshape")

    @cached_property
    def neighbours(self) -> tuple[frozenset[int], ...]:
        """For each node, those it shares a tensor with."""
        found: list[set[int]] = [set() for _ in self.nodes]
        for edge in self.edges:
            found[edge.source].add(edge.target)
            found[edge.target].add(edge.source)
        return tuple(frozenset(f) for f in found)


Strategy = Sequence[tuple[int, ...]]
"""A configuration for each node, in the graph's order."""


def dot(graph: ShardGraph) -> str:
    """The graph in Graphviz's language: nodes with their iteration spaces, and the shapes of the tensors between them."""
    lines = [f"digraph {quoted(graph.name)} {{", "  node [shape=box];"]
    for i, node in enumerate(graph.nodes):
        loops = ", ".join(f"{axis.name} {axis.size}" for axis in node.axes)
        label = quoted(f"{node.name}\n{loops}")
        lines.append(f"  {i} [label={label}];")
    for edge in graph.edges:
        shape = " x ".join(map(str, graph.nodes[edge.source].outputs[edge.output].shape))
        lines.append(f'  {edge.source} -> {edge.target} [label="{shape}"];')
    return "\n".join([*lines, "}", ""])
