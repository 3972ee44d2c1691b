"""Cost tables of a graph on a machine: a vector a node, over its configurations, and a matrix an edge.

An edge sees of a configuration only how it splits the edge's tensor, so its matrix has a row for each such split of the source, a column
for each of the target, and labels that say which row or column a configuration is. Nodes and edges that are alike share their tables.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from baechi_ext.errors import ShardError
from baechi_ext.shard.graph import Edge, Node, ShardGraph, Strategy, Tensor
from baechi_ext.shard.machine import Costs, Machine
from baechi_ext.shard.space import Configurations, configurations
from baechi_ext.shard.terms import Shares, Term

Labels = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Classes:
    """What is alike about configurations: `of[c]` is the class of configuration c, `first[k]` one of class k."""

    of: Labels
    first: Labels

    def __len__(self) -> int:
        return len(self.first)

    @classmethod
    def by(cls, keys: Iterable[NDArray[np.int64]]) -> "Classes":
        """Configurations are alike that agree in all keys."""
        code: NDArray[np.int64] | None = None
        for key in keys:
            least = int(key.min())
            code = key - least if code is None else code * (int(key.max()) - least + 1) + (key - least)
            if code.max() > 2**31:
                code = np.unique(code, return_inverse=True)[1]
        if code is None:
            raise ShardError("configurations can't be told apart by nothing")
        _, first, of = np.unique(code, return_index=True, return_inverse=True)
        return cls(of, first)


@dataclass(frozen=True, eq=False)
class EdgeTable:
    """What moving a tensor costs: `values[source.of[c], target.of[d]]` where its writer has configuration c and its reader d."""

    source: Classes
    target: Classes
    values: Costs

    def full(self) -> Costs:
        """The matrix over all pairs of configurations."""
        return self.values[self.source.of[:, None], self.target.of]


@dataclass(frozen=True, eq=False)
class Tables:
    """All tables of a graph: `spaces[v]`, `costs[v]` and `edges[e]` are those of node v and of edge e."""

    graph: ShardGraph
    machine: Machine
    spaces: tuple[Configurations, ...]
    costs: tuple[Costs, ...]
    edges: tuple[EdgeTable, ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many configurations each node has."""
        return tuple(map(len, self.spaces))

    def cost(self, choice: Iterable[int]) -> float:
        """What a strategy costs in operations of a device; `choice[v]` is the index of node v's configuration."""
        chosen = list(choice)
        nodes = sum(float(costs[c]) for costs, c in zip(self.costs, chosen, strict=True))
        return nodes + sum(self.edge_costs(chosen))

    def edge_costs(self, choice: Iterable[int]) -> list[float]:
        """What each edge costs in a strategy."""
        chosen = list(choice)
        pairs = zip(self.graph.edges, self.edges, strict=True)
        return [float(t.values[t.source.of[chosen[e.source]], t.target.of[chosen[e.target]]]) for e, t in pairs]

    @cached_property
    def around(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of each node's edges."""
        found: list[list[int]] = [[] for _ in self.graph.nodes]
        for e, edge in enumerate(self.graph.edges):
            found[edge.source].append(e)
            found[edge.target].append(e)
        return tuple(map(tuple, found))

    def edge_row(self, e: int, v: int, choice: Sequence[int]) -> Costs:
        """What edge e costs for each configuration of its end v, where the other end has the one of `choice`."""
        edge, table = self.graph.edges[e], self.edges[e]
        if v == edge.source:
            return table.values[table.source.of, table.target.of[choice[edge.target]]]
        return table.values[table.source.of[choice[edge.source]], table.target.of]

    def strategy(self, choice: Iterable[int]) -> list[tuple[int, ...]]:
        """The configurations of these indices."""
        return [tuple(map(int, space[c])) for space, c in zip(self.spaces, choice, strict=True)]

    def choice(self, strategy: Strategy) -> list[int]:
        """The indices of these configurations. Raises ShardError for one that is not in its node's space."""
        found = []
        for node, space, configuration in zip(self.graph.nodes, self.spaces, strategy, strict=True):
            rows = np.flatnonzero((space == np.array(configuration)).all(axis=1))
            if not len(rows):
                raise ShardError(f"{node.name} can't be split as {tuple(configuration)} on {self.machine.devices} devices")
            found.append(int(rows[0]))
        return found


def build_tables(graph: ShardGraph, machine: Machine, *, original: bool = False) -> Tables:
    """The graph's tables. `original`: tensors move as the original release counts it (see `_moved_originally`)."""
    builder = _Builder(machine, original)
    spaces = tuple(map(builder.space, graph.nodes))
    costs = tuple(map(builder.costs, graph.nodes))
    edges = tuple(builder.edge(graph, edge) for edge in graph.edges)
    return Tables(graph, machine, spaces, costs, edges)


def term_costs(tables: Tables, v: int) -> list[tuple[Term, Costs]]:
    """What each term of node v costs over its configurations; `node_costs` adds them up."""
    node = tables.graph.nodes[v]
    shares = Shares(node.sizes, tables.spaces[v], tables.machine)
    return [(term, term.cost(shares)) for term in node.terms]


def _node_costs(node: Node, space: Configurations, machine: Machine) -> Costs:
    """The sum of a node's terms; what `hides` counts, with overlap, only as far as it takes longer than the layer computes backward."""
    shares = Shares(node.sizes, space, machine)
    total, hidden, backward = (np.zeros(len(space)) for _ in range(3))
    for term in node.terms:
        cost = term.cost(shares)
        if machine.overlap and term.hides:
            hidden += cost
            continue
        total += cost
        if term.kind == "compute":
            backward += cost * (2.0 / 3.0)
    return total + np.maximum(hidden - backward, 0.0)


@dataclass
class _Builder:
    machine: Machine
    original: bool
    _spaces: dict[object, Configurations] = field(default_factory=dict)
    _costs: dict[object, Costs] = field(default_factory=dict)
    _classes: dict[object, tuple[Classes, NDArray[np.int64]]] = field(default_factory=dict)
    _edges: dict[object, EdgeTable] = field(default_factory=dict)

    def space(self, node: Node) -> Configurations:
        key = (node.axes, node.contiguous)
        if key not in self._spaces:
            self._spaces[key] = configurations(node, self.machine.devices)
        return self._spaces[key]

    def costs(self, node: Node) -> Costs:
        key = (node.axes, node.contiguous, node.terms)
        if key not in self._costs:
            self._costs[key] = _node_costs(node, self.space(node), self.machine)
        return self._costs[key]

    def classes(self, node: Node, tensor: Tensor) -> tuple[Classes, NDArray[np.int64]]:
        """Configurations by how they split a tensor, and these splits."""
        key = (node.axes, node.contiguous, tensor.axes)
        if key not in self._classes:
            space = self.space(node)
            splits = [space[:, axes].prod(axis=1) for axes in tensor.axes]
            classes = Classes.by(splits)
            self._classes[key] = classes, np.column_stack(splits)[classes.first]
        return self._classes[key]

    def edge(self, graph: ShardGraph, edge: Edge) -> EdgeTable:
        writer, reader = graph.nodes[edge.source], graph.nodes[edge.target]
        written, read = writer.outputs[edge.output], reader.inputs[edge.input]
        key = (written, read.axes, writer.axes, writer.contiguous, reader.axes, reader.contiguous)
        if key not in self._edges:
            source, rows = self.classes(writer, written)
            target, columns = self.classes(reader, read)
            moved = _moved_originally if self.original else _moved
            words = moved(np.array(written.shape, float), rows, columns)
            devices = np.maximum(rows.prod(axis=1)[:, None], columns.prod(axis=1))
            self._edges[key] = EdgeTable(source, target, self.machine.exchange(words, devices, messages=2.0))
        return self._edges[key]


def _common(shape: Costs, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> Costs:
    """How much of the tensor a device has of both parts, if these are as near to each other as can be."""
    common = np.ones((len(rows), len(columns)))
    for i, size in enumerate(shape):
        common *= np.minimum((size / rows[:, i])[:, None], size / columns[:, i])
    return common


def _moved_originally(shape: Costs, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> Costs:
    """Twice what the reader needs and does not have; a device has nothing where the reader's are more than the writer's."""
    common = _common(shape, rows, columns)
    common[rows.prod(axis=1)[:, None] < columns.prod(axis=1)] = 0.0
    needed = (shape / columns).prod(axis=1)
    return 2.0 * (needed - common).clip(min=0.0)


def _moved(shape: Costs, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> Costs:
    """What the reader needs and does not have, forward, and, backward, what the writer needs of the gradient and does not have.

    Devices that a configuration leaves over hold copies: to read more finely what was written takes no transfer forward.
    """
    common = _common(shape, rows, columns)
    read, written = (shape / columns).prod(axis=1), (shape / rows).prod(axis=1)
    return (read - common).clip(min=0.0) + (written[:, None] - common).clip(min=0.0)
