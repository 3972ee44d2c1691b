"""Graphs with a million edges get plans in seconds; and what makes that quick says the same as what is plain."""

from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given

from baechi_ext.ir import Cluster, Link, Op, OpGraph
from baechi_ext.place.chunks import held_bytes, sums
from baechi_ext.place.common import PlaceOptions
from baechi_ext.place.registry import place
from baechi_ext.simulate import lower_bound_us
from tests.simulate.strategies import graphs

LARGE, MEDIUM = 1000, 250
"""Ops on each side of the edges, of which there are a million, or a sixteenth of that."""
METHODS = ("single", "m_topo", "m_etf", "auto")
CLUSTER = Cluster.uniform(4, link=Link(us_per_byte=0.0001754, latency_us=134.0))


def some_ops(n: int) -> list[Op]:
    return [Op(f"n{v}", compute_us=float(1 + v * 37 % 101), persistent_bytes=v * 53 % 4999) for v in range(n)]


def into_one(side: int) -> OpGraph:
    """Edges into one op, from ops with a tensor for each."""
    edges = ((f"n{v}", f"n{side}", 1 + (v * i) % 977, f"t{i}") for v in range(side) for i in range(side))
    return OpGraph.from_edges(some_ops(side + 1), edges)


def all_to_all(side: int) -> OpGraph:
    """Edges from so many ops to as many others."""
    edges = ((f"n{v}", f"n{side + w}", 1 + v * 977 % 9973, "") for v in range(side) for w in range(side))
    return OpGraph.from_edges(some_ops(2 * side), edges)


@lru_cache(maxsize=1)
def large(shape: Callable[[int], OpGraph], side: int) -> tuple[OpGraph, float]:
    """A graph and its lower bound."""
    graph = shape(side)
    return graph, lower_bound_us(graph, CLUSTER)


@pytest.fixture(autouse=True, scope="module")
def _released() -> Iterator[None]:
    """The last graph goes when all had it: it holds a gigabyte."""
    yield
    large.cache_clear()


@pytest.mark.parametrize(
    ("side", "method"),
    [
        *((MEDIUM, method) for method in METHODS),
        *(pytest.param(LARGE, method, marks=() if method == "auto" else pytest.mark.slow) for method in METHODS),
    ],
)
@pytest.mark.parametrize("shape", [into_one, all_to_all])
def test_up_to_a_million_edges(shape: Callable[[int], OpGraph], side: int, method: str) -> None:
    """All methods on a sixteenth of them; on all `auto`, which has tried the others."""
    graph, bound_us = large(shape, side)
    result = place(method, graph, CLUSTER, PlaceOptions(time_limit_seconds=1))
    plan, timeline = result.plan, result.timeline
    assert sum(timeline.busy_us) == graph.total_compute_us()
    assert timeline.end_us == tuple(since + op.compute_us for since, op in zip(timeline.start_us, graph.ops, strict=True))
    assert bound_us <= plan.lower_bound_us <= plan.predicted_step_us <= graph.total_compute_us() or method == "m_topo"
    columns, device = graph.columns, np.array(plan.placement)
    there_us = np.full((len(graph.tensors), len(CLUSTER)), np.inf)
    there_us[np.arange(len(there_us)), device[columns.producer]] = np.array(timeline.end_us)[columns.producer]
    for x in timeline.transfers:
        there_us[x.tensor, x.target] = x.end_us
    tensor, reader = columns.readers.owners, columns.readers.items
    assert np.all(there_us[tensor, device[reader]] <= np.array(timeline.start_us)[reader])


@given(graphs())
def test_units_and_their_bytes(graph: OpGraph) -> None:
    rank = {v: i for i, v in enumerate(graph.order)}
    whole = [*graph.groups.values(), *((v,) for v, op in enumerate(graph.ops) if op.colocation is None)]
    assert graph.units() == sorted((tuple(sorted(unit, key=rank.__getitem__)) for unit in whole), key=lambda unit: rank[unit[0]])
    sizes = [sum(graph.tensors[t].bytes for t in outputs) for outputs in graph.outputs]
    made = [0 if op.resident else size for op, size in zip(graph.ops, sizes, strict=True)]
    assert held_bytes(graph, whole) == [sum(graph.ops[v].persistent_bytes + made[v] for v in unit) for unit in whole]
    working = [op.temporary_bytes + max(op.output_bytes - size, 0) for op, size in zip(graph.ops, sizes, strict=True)]
    every = [op.persistent_bytes + here + used for op, here, used in zip(graph.ops, made, working, strict=True)]
    assert graph.columns.all_bytes().tolist() == every
    assert sums(every, whole) == [sum(every[v] for v in unit) for unit in whole]
