"""Small random shard graphs, and the best of all their strategies by trying each."""

from itertools import product

import numpy as np
from hypothesis import strategies as st

from baechi_ext.shard.graph import Axis, Edge, Node, ShardGraph, Tensor
from baechi_ext.shard.tables import EdgeTable, Tables, bytes_of
from baechi_ext.shard.terms import AllReduce, Compute, Exchange

LENGTHS = (1, 2, 3, 4, 6)


@st.composite
def graphs(draw: st.DrawFn, most_nodes: int = 5) -> ShardGraph:
    """A graph of a few nodes over up to three short axes, with any edges between them, parallel ones, too."""
    count = draw(st.integers(1, most_nodes))
    nodes = tuple(draw(nodes_named(f"n{i}")) for i in range(count))
    pairs = [(u, v) for v in range(count) for u in range(v)]
    chosen = draw(st.lists(st.sampled_from(pairs), max_size=7)) if pairs else []
    return ShardGraph("random", nodes, tuple(Edge(u, v, draw(st.integers(0, 1)), draw(st.integers(0, 1))) for u, v in chosen))


@st.composite
def nodes_named(draw: st.DrawFn, name: str) -> Node:
    """A node with two inputs and two outputs of two dimensions each, each split as some of its axes are."""
    axes = tuple(Axis(f"a{i}", draw(st.sampled_from(LENGTHS)), draw(st.booleans())) for i in range(draw(st.integers(1, 3))))
    every = tuple(range(len(axes)))
    subset = st.lists(st.sampled_from(every), max_size=2, unique=True).map(tuple)

    def tensor() -> Tensor:
        return Tensor((draw(st.sampled_from((12, 24))), draw(st.sampled_from((12, 36)))), (draw(subset), draw(subset)))

    terms = (
        Compute(draw(st.sampled_from((0.0, 1e3, 1e5))), every),
        AllReduce(draw(st.sampled_from((1.0, 7.0))), draw(subset), draw(subset), "sum"),
        Exchange(3.0, draw(subset), draw(subset), "rim"),
    )
    return Node(name, "test", axes, (tensor(), tensor()), (tensor(), tensor()), terms, (tensor(),))


def least_cost(tables: Tables, limit: float = float("inf")) -> float:
    """The least cost of all strategies that hold at most this many bytes; infinity where there is none."""
    best = float("inf")
    for choice in product(*map(range, tables.sizes)):
        if limit == float("inf") or bytes_of(tables, choice) <= limit:
            best = min(best, cost_by_hand(tables, choice))
    return best


def full(table: EdgeTable) -> np.ndarray:
    """The matrix over all pairs of configurations."""
    return np.asarray(table.values[table.source.of[:, None], table.target.of])


def cost_by_hand(tables: Tables, choice: tuple[int, ...]) -> float:
    """A strategy's cost, from the full matrices."""
    cost = sum(float(costs[c]) for costs, c in zip(tables.costs, choice, strict=True))
    for edge, table in zip(tables.graph.edges, tables.edges, strict=True):
        cost += float(full(table)[choice[edge.source], choice[edge.target]])
    return cost
