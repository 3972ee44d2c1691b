"""Cost tables of a graph on a machine: a vector a node, over its configurations, and a matrix an edge.

Every divisor of an axis is a split, powers of two or not, and every product of splits up to the number of devices is a configuration
(Elango, IPDPS 2021, section II; the devices left over hold copies, or nothing).

An edge sees of a configuration only how it splits the edge's tensor, so its matrix has a row for each such split of the source, a column
for each of the target, and labels that say which row or column a configuration is. Nodes and edges that are alike share their tables.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from baechi_ext.errors import ShardError
from baechi_ext.shard.graph import Axis, Node, ShardGraph, Strategy, Tensor
from baechi_ext.shard.machine import Costs, Machine
from baechi_ext.shard.terms import Shares, Term

Labels = NDArray[np.int64]
Configurations = NDArray[np.int64]
"""A row a configuration, a column an axis: into how many parts it is split."""
Form = tuple[tuple[Axis, ...], bool]
"""All that the configurations of a node depend on: its axes, and whether these are contiguous."""
_VIEWS = ("unstack", "ravel", "unravel", "view")
"""Ops that write what they read, seen otherwise, and hold nothing."""


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
    moved = _moved_originally if original else _moved
    spaces: dict[Form, Configurations] = {}
    costs: dict[tuple[Form, tuple[Term, ...]], Costs] = {}
    for node in graph.nodes:
        form = node.axes, node.contiguous
        if form not in spaces:
            spaces[form] = configurations(node, machine.devices)
        if (form, node.terms) not in costs:
            costs[form, node.terms] = _node_costs(node, spaces[form], machine)

    @cache
    def classes(form: Form, tensor_axes: tuple[tuple[int, ...], ...]) -> tuple[Classes, NDArray[np.int64]]:
        """Configurations by how they split a tensor, and these splits."""
        splits = [spaces[form][:, axes].prod(axis=1) for axes in tensor_axes]
        found = Classes.by(splits)
        return found, np.column_stack(splits)[found.first]

    @cache
    def edge(written: Tensor, read_axes: tuple[tuple[int, ...], ...], writer: Form, reader: Form) -> EdgeTable:
        (source, rows), (target, columns) = classes(writer, written.axes), classes(reader, read_axes)
        words = moved(np.array(written.shape, float), rows, columns)
        devices = np.maximum(rows.prod(axis=1)[:, None], columns.prod(axis=1))
        return EdgeTable(source, target, machine.exchange(words, devices, messages=2.0))

    forms = [(node.axes, node.contiguous) for node in graph.nodes]
    edges = []
    for e in graph.edges:
        written, read = graph.nodes[e.source].outputs[e.output], graph.nodes[e.target].inputs[e.input]
        edges.append(edge(written, read.axes, forms[e.source], forms[e.target]))
    own = tuple(costs[form, node.terms] for form, node in zip(forms, graph.nodes, strict=True))
    return Tables(graph, machine, tuple(spaces[form] for form in forms), own, tuple(edges))


def node_bytes(node: Node, space: Configurations, machine: Machine) -> Costs:
    """Bytes that a node holds on a device, for each configuration: parameters, their gradients and optimizer state, and results, kept for
    the backward pass. Devices that a configuration leaves over hold copies."""
    weights = sum((t.words / t.parts(space) for t in node.weights), np.zeros(len(space)))
    outputs = sum((t.words / t.parts(space) for t in node.results if node.op not in _VIEWS), np.zeros(len(space)))
    return machine.word_bytes * ((2.0 + machine.optimizer_words) * weights + outputs)


def bytes_of(tables: Tables, choice: Iterable[int]) -> float:
    """The bytes that a strategy holds on each device; `choice[v]` is the index of node v's configuration."""
    triples = zip(tables.graph.nodes, tables.spaces, choice, strict=True)
    return sum(float(node_bytes(node, space[c : c + 1], tables.machine)[0]) for node, space, c in triples)


def term_costs(tables: Tables, v: int) -> list[tuple[Term, Costs]]:
    """The terms of node v with their costs over its configurations; `_node_costs` adds them up."""
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


def configurations(node: Node, devices: int) -> Configurations:
    """All configurations of a node on at most this many devices, in lexical order; never none."""
    rows = np.ones((1, 0), np.int64)
    used = np.ones(1, np.int64)
    for axis in node.axes:
        parts = [d for d in divisors(axis.size, devices if axis.splits else 1) if axis.size / d >= axis.smallest]
        choices = np.array(parts or [1], np.int64)
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
