"""Cost tables of a graph on a machine: a vector a node, over its configurations, and a matrix an edge.

Every divisor of an axis is a split, powers of two or not, and every product of splits up to the number of devices is a configuration
(Elango, IPDPS 2021, section II; the devices left over hold copies, or nothing).

An edge sees of a configuration only how it splits the edge's tensor, so its matrix has a row for each such split of the source, a column
for each of the target, and labels that say which row or column a configuration is. Nodes and edges that are alike share their tables.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isqrt
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from baechi_ext.errors import ShardError
from baechi_ext.shard.graph import Axis, Edge, Node, ShardGraph, Strategy, Tensor
from baechi_ext.shard.machine import Costs, Machine
from baechi_ext.shard.terms import Shares, Term

T = TypeVar("T")
Labels = NDArray[np.int64]
Configurations = NDArray[np.int64]
"""A row a configuration, a column an axis: into how many parts it is split."""


@dataclass(frozen=True, eq=False)
class Classes:
    """Classes of configurations that are alike: `of[c]` is the class of configuration c, `first[k]` one of class k."""

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
    """The costs of moving a tensor: `values[source.of[c], target.of[d]]` where its writer has configuration c and its reader d."""

    source: Classes
    target: Classes
    values: Costs

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
        """The number of configurations that each node has."""
        return tuple(map(len, self.spaces))

    def cost(self, choice: Iterable[int]) -> float:
        """The cost of a strategy in operations of a device; `choice[v]` is the index of node v's configuration."""
        chosen = list(choice)
        nodes = sum(float(costs[c]) for costs, c in zip(self.costs, chosen, strict=True))
        return nodes + sum(self.edge_costs(chosen))

    def edge_costs(self, choice: Iterable[int]) -> list[float]:
        """The cost of each edge in a strategy."""
        chosen = list(choice)
        return [self.edge_cost(e, chosen) for e in range(len(self.edges))]

    def edge_cost(self, e: int, choice: Sequence[int]) -> float:
        """The cost of edge e in a strategy."""
        edge, table = self.graph.edges[e], self.edges[e]
        return float(table.values[table.source.of[choice[edge.source]], table.target.of[choice[edge.target]]])

    @cached_property
    def around(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of each node's edges."""
        found: list[list[int]] = [[] for _ in self.graph.nodes]
        for e, edge in enumerate(self.graph.edges):
            found[edge.source].append(e)
            found[edge.target].append(e)
        return tuple(map(tuple, found))

    def edge_row(self, e: int, v: int, choice: Sequence[int]) -> Costs:
        """The cost of edge e for each configuration of its end v, where the other end has the one of `choice`."""
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
    """The terms of node v with their costs over its configurations; `node_costs` adds them up."""
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


class Once:
    """Makes things once by what they are made of, so that what is alike is shared."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Any] = {}

    def __call__(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = make()
        known: T = self._known[key]
        return known


@dataclass
class _Builder:
    machine: Machine
    original: bool
    _made: Once = field(default_factory=Once)

    def space(self, node: Node) -> Configurations:
        return self._made(("space", node.axes, node.contiguous), lambda: configurations(node, self.machine.devices))

    def costs(self, node: Node) -> Costs:
        key = ("costs", node.axes, node.contiguous, node.terms)
        return self._made(key, lambda: _node_costs(node, self.space(node), self.machine))

    def classes(self, node: Node, tensor: Tensor) -> tuple[Classes, NDArray[np.int64]]:
        """Configurations by how they split a tensor, and these splits."""

        def told_apart() -> tuple[Classes, NDArray[np.int64]]:
            space = self.space(node)
            splits = [space[:, axes].prod(axis=1) for axes in tensor.axes]
            classes = Classes.by(splits)
            return classes, np.column_stack(splits)[classes.first]

        return self._made(("classes", node.axes, node.contiguous, tensor.axes), told_apart)

    def edge(self, graph: ShardGraph, edge: Edge) -> EdgeTable:
        writer, reader = graph.nodes[edge.source], graph.nodes[edge.target]
        written, read = writer.outputs[edge.output], reader.inputs[edge.input]

        def table() -> EdgeTable:
            source, rows = self.classes(writer, written)
            target, columns = self.classes(reader, read)
            moved = _moved_originally if self.original else _moved
            words = moved(np.array(written.shape, float), rows, columns)
            devices = np.maximum(rows.prod(axis=1)[:, None], columns.prod(axis=1))
            return EdgeTable(source, target, self.machine.exchange(words, devices, messages=2.0))

        return self._made(("edge", written, read.axes, writer.axes, writer.contiguous, reader.axes, reader.contiguous), table)


def _common(shape: Costs, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> Costs:
    """The elements of the tensor that a device has of both parts, if these are as near to each other as can be."""
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
    """The elements that the reader needs and lacks and, backward, those that the writer needs of the gradient and lacks.

    Devices that a configuration leaves over hold copies: to read more finely what was written takes no transfer forward.
    """
    common = _common(shape, rows, columns)
    read, written = (shape / columns).prod(axis=1), (shape / rows).prod(axis=1)
    return (read - common).clip(min=0.0) + (written[:, None] - common).clip(min=0.0)


def divisors(n: int, limit: int) -> list[int]:
    """The divisors of `n` that are at most `limit`, ascending."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return [d for d in sorted({*small, *(n // d for d in small)}) if d <= limit]


def splits(axis: Axis, limit: int) -> list[int]:
    """Into how many parts an axis can be split, each at least its `smallest` long."""
    if not axis.splits:
        return [1]
    return [d for d in divisors(axis.size, limit) if axis.size / d >= axis.smallest] or [1]


def configurations(node: Node, devices: int) -> Configurations:
    """All configurations of a node on at most this many devices, in lexical order; never none."""
    rows = np.ones((1, 0), np.int64)
    used = np.ones(1, np.int64)
    for axis in node.axes:
        choices = np.array(splits(axis, devices), np.int64)
        product = used[:, None] * choices
        row, choice = np.nonzero(product <= devices)
        rows = np.column_stack((rows[row], choices[choice]))
        used = product[row, choice]
    return rows[_contiguous(rows, node.sizes)] if node.contiguous else rows


def _contiguous(rows: Configurations, sizes: tuple[int, ...]) -> NDArray[np.bool_]:
    """The rows that split memory into whole pieces: axes split to the last, then one partly split, then axes not split."""
    whole = rows == np.array(sizes)
    free = np.ones(len(rows), bool)
    valid = np.ones(len(rows), bool)
    for axis in range(rows.shape[1]):
        valid &= free | (rows[:, axis] == 1)
        free &= whole[:, axis]
    return valid
