"""The lower bound: each of its reasons by hand, and never above the best plan there is."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baechi_ext.ir import Cluster, Device, Link, OpGraph
from baechi_ext.simulate import lower_bound_us, relaxation, simulate
from tests import oracle
from tests.build import cluster_of, graph_of, with_memory
from tests.simulate.strategies import cases, clusters, graphs

ABC = {"a": 3, "b": 4, "c": 5}
FAN = graph_of(
    {"a": 4, **{f"m{i}": 6 for i in range(4)}, "z": 2},
    *[("a", f"m{i}", 0) for i in range(4)],
    *[(f"m{i}", "z", 0) for i in range(4)],
)
"""a, then four ops of 6 on two devices, then z."""
HOURGLASS = graph_of(
    {"a0": 4, "a1": 4, "a2": 4, "a3": 4, "mid": 1, "b": 9},
    *[(f"a{i}", "mid", 0) for i in range(4)],
    ("mid", "b", 0),
)
HEAVY_PAIR = graph_of(
    {"x": 5, "g0": 3, "g1": 3, "g2": 3, "y": 6},
    *[("x", f"g{i}", 0) for i in range(3)],
    ("g2", "y", 0),
    colocation={f"g{i}": "g" for i in range(3)},
)
TOO_BIG_TOGETHER = graph_of({"a": 2, "b": 3}, ("a", "b", 7), persistent_bytes={"a": 6, "b": 6})
DEAR_EDGES = graph_of({"a": 4, "b": 4, "c": 4}, ("a", "b", 90), ("a", "c", 90))
DIAMONDS = graph_of(
    {f"{name}{i}": us for i in range(10) for name, us in ABC.items()},
    *[(f"{name}{i}", f"c{i}", 10) for i in range(10) for name in "ab"],
    *[(f"c{i}", f"{name}{i + 1}", 10) for i in range(9) for name in "ab"],
)
"""Ten times: ops of 3 and of 4 that run beside one another only if a transfer of 10 is waited for, and one of 5 that reads both."""

CASES = {
    "empty": (graph_of({}), cluster_of(2), 0),
    "path a, b": (graph_of({"a": 3, "b": 4, "c": 1}, ("a", "b", 9)), cluster_of(2), 7),
    "all over two devices": (graph_of(ABC | {"d": 4}), cluster_of(2), 8),
    "all over speed 4": (graph_of({"a": 3, "b": 4, "c": 5}), cluster_of(2, speeds=(1.0, 3.0)), 3),
    "path on fast devices": (graph_of(ABC, ("a", "b", 9)), cluster_of(9, speeds=(2.0,) * 9), 3.5),
    "group a, c": (graph_of(ABC, colocation={"a": "g", "c": "g"}), cluster_of(2), 8),
    "head, work of all devices, tail": (FAN, cluster_of(2), 18),
    "ancestors are work": (HOURGLASS, cluster_of(2), 18),
    "head of a group, its work, the tail": (HEAVY_PAIR, cluster_of(3), 14 + 6 - 6),
    "three ops of 4 on two devices": (graph_of({"a": 4, "b": 4, "c": 4}), cluster_of(2), 8),
    "memory forces a transfer": (TOO_BIG_TOGETHER, cluster_of(2, memory_bytes=10), 2 + 7 + 3),
    "transfers keep all together": (DEAR_EDGES, cluster_of(3), 12),
    "what is not sent runs one after another": (DIAMONDS, cluster_of(2), 10 * 12),
    "the fast device is too small": (
        graph_of({"a": 6, "b": 2}, ("a", "b", 0), persistent_bytes={"a": 5}),
        Cluster((Device("fast", 4, 3.0), Device("large", None, 1.0))),
        6 + 2 / 3,
    ),
    "sending and receiving take time": (
        TOO_BIG_TOGETHER,
        Cluster.uniform(2, memory_bytes=10, link=Link(us_per_byte=1, send_us=3, receive_us=2)),
        2 + 3 + 7 + 2 + 3,
    ),
    "one device": (graph_of(ABC), cluster_of(1), 12),
}


@pytest.mark.parametrize("case", CASES)
def test_by_hand(case: str) -> None:
    graph, cluster, bound = CASES[case]
    assert lower_bound_us(graph, cluster) == pytest.approx(bound, rel=1e-9)
    assert lower_bound_us(graph, cluster) <= bound


@given(cases(), st.integers(0, 2**32))
def test_no_plan_is_faster(case: tuple[OpGraph, Cluster], seed: int) -> None:
    graph, cluster = case
    draw = random.Random(seed)
    device_of = {name: draw.randrange(len(cluster)) for name in graph.groups}
    placement = [draw.randrange(len(cluster)) if op.colocation is None else device_of[op.colocation] for op in graph.ops]
    priority = [draw.random() for _ in graph.ops] if draw.random() < 0.5 else None
    assert lower_bound_us(graph, cluster) <= simulate(graph, cluster, placement, priority).makespan_us


@settings(max_examples=60)
@given(graphs(max_ops=4), clusters(max_devices=3), st.sampled_from([None, 6, 12, 20]))
def test_never_above_the_optimum(graph: OpGraph, cluster: Cluster, memory_bytes: int | None) -> None:
    cluster = with_memory(cluster, memory_bytes)
    best = oracle.optimum(graph, cluster, with_orders=True)
    if best.placement is not None:
        assert lower_bound_us(graph, cluster) <= best.makespan_us
        assert lower_bound_us(graph, cluster, thorough=True) <= best.makespan_us


def test_rounding_of_tiny_costs_beside_huge_ones() -> None:
    """The simulator's clock does not see 1e-9 us after 1e12 us; nor may the bound."""
    graph = graph_of({"a": 1e12, **{f"t{i}": 1e-9 for i in range(50)}}, *[("a", f"t{i}", 0) for i in range(50)])
    for n in (1, 2):
        assert 1e12 * (1 - 1e-9) < lower_bound_us(graph, cluster_of(n)) <= simulate(graph, cluster_of(n), (0,) * 51).makespan_us


@pytest.mark.parametrize("seed", range(3))
def test_no_less_than_the_plain_bounds(seed: int) -> None:
    """Also beyond the sizes that are looked at closely."""
    rng = random.Random(seed)
    n = (150, 900, 2500)[seed]
    names = [f"o{i}" for i in range(n)]
    edges = [(names[rng.randrange(max(0, i - 20), i)], names[i], 3) for i in range(1, n) for _ in range(2)]
    graph = graph_of({name: rng.uniform(1, 9) for name in names}, *edges)
    longest, total = max(graph.tails_us), graph.total_compute_us()
    for k in (1, 2, 9):
        plain = max(total / k, longest)
        bound = lower_bound_us(graph, cluster_of(k))
        assert plain * (1 - 1e-9) <= bound <= simulate(graph, cluster_of(k), [i % k for i in range(n)]).makespan_us


def test_whole_numbers_as_speeds_need_no_code_of_their_own() -> None:
    """Kernels compile anew for arrays of another type, which took seconds."""
    graph = graph_of({"a": 2, "b": 4})
    for cluster in (Cluster((Device("0", speed=2), Device("1", speed=1))), Cluster((Device("0", speed=2.0), Device("1", speed=1.0)))):
        record = relaxation._relaxed(graph, cluster)
        assert record.kind_speed.dtype == np.float64
        assert isinstance(record.total_speed, float)
