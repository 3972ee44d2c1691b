"""Fitting: plans for limits that leave few, orders among them; the same for the same seed; and what ends it."""

import random

import pytest

from baechi_ext.ir import Cluster, Device, Link, Op, OpGraph
from baechi_ext.place.chunks import depth_first_order, least_memory_order, ranks
from baechi_ext.place.common import PlaceOptions, SearchProgress
from baechi_ext.place.effort import Effort
from baechi_ext.place.fitting import fit
from baechi_ext.place.registry import place
from baechi_ext.place.repair import trials_by_bytes
from baechi_ext.place.trial import Trial
from baechi_ext.simulate import Simulator, simulate
from tests import oracle
from tests.build import graph_of


def random_graph(n: int, seed: int) -> OpGraph:
    rng = random.Random(seed)
    ops = [
        Op(f"o{v}", compute_us=rng.randrange(1, 9), persistent_bytes=rng.randrange(4), temporary_bytes=rng.choice((0, 0, 3)))
        for v in range(n)
    ]
    edges = [(f"o{v}", f"o{w}", 1 + v % 7, "") for v in range(n) for w in range(v + 1, min(n, v + 5)) if rng.random() < 0.5]
    return OpGraph.from_edges(ops, edges)


def smallest_limit(graph: OpGraph) -> float:
    """The smallest limit of two equal devices that any placement keeps in any order, by trying all."""
    unlimited = Cluster((Device("0"), Device("1")), Link(0.5, 1))
    orders = list(oracle.orders(graph))
    peaks = []
    for placement in oracle.placements(graph, 2):
        for order in orders:
            step = oracle.simulate(graph, unlimited, placement, order)
            peaks.append(max(oracle.peak_bytes(graph, unlimited, placement, step)))
    return min(peaks)


@pytest.mark.parametrize("seed", range(4))
def test_the_tightest_limits_of_all_placements_and_orders_are_kept(seed: int) -> None:
    graph = random_graph(5, seed)
    limit = smallest_limit(graph)
    cluster = Cluster((Device("0", limit), Device("1", limit)), Link(0.5, 1))
    for method in ("m_etf", "heft", "auto"):
        plan = place(method, graph, cluster, PlaceOptions(time_limit_seconds=1)).plan
        assert oracle.violations(graph, cluster, plan.placement, plan.priority) == []


def test_it_finds_a_plan_from_one_that_is_far_off() -> None:
    """Limits of a plan found beforehand; the search begins with everything on one device."""
    graph = random_graph(60, 1)
    loose = Simulator(graph, Cluster.uniform(3, link=Link(0.5, 1)))
    planted = min(trials_by_bytes(loose), key=lambda trial: max(trial.timeline.peak_memory_bytes))
    cluster = Cluster.uniform(3, memory_bytes=max(planted.timeline.peak_memory_bytes), link=Link(0.5, 1))
    start = Trial((0,) * 60, None, Simulator(graph, cluster))
    found = [fit(start, 3, Effort(simulated_ops=6e6)) for _ in range(2)]
    assert oracle.violations(graph, cluster, found[0].placement, found[0].priority) == []
    assert (found[0].placement, found[0].priority) == (found[1].placement, found[1].priority)


def test_on_one_device_it_finds_an_order() -> None:
    """Each of eight sources has to be read before the next one runs."""
    ops = [Op(f"s{i}", compute_us=10) for i in range(8)] + [Op(f"r{i}", compute_us=1) for i in range(8)]
    graph = OpGraph.from_edges(ops, [(f"s{i}", f"r{i}", 100, "") for i in range(8)])
    start = Trial((0,) * 16, tuple(map(float, range(16))), Simulator(graph, Cluster.uniform(1, memory_bytes=100)))
    assert start.excess_bytes == (700,)
    assert fit(start, 0, Effort(simulated_ops=1e6)).valid


def test_what_fits_nowhere_ends_with_the_nearest() -> None:
    graph = graph_of({"a": 1, "b": 1, "c": 1}, persistent_bytes={"a": 6, "b": 6, "c": 6})
    start = Trial((0, 0, 0), None, Simulator(graph, Cluster.uniform(2, memory_bytes=10)))
    found = fit(start, 0, Effort(simulated_ops=1e5))
    assert sorted(found.excess_bytes) == [0, 2]
    assert fit(start, 0, Effort(seconds=0)) is start


def test_it_can_be_interrupted_and_says_how_it_goes() -> None:
    ops = [Op(f"o{i}", compute_us=1, persistent_bytes=6) for i in range(30)]
    seen: list[SearchProgress] = []

    def interrupt(progress: SearchProgress) -> None:
        seen.append(progress)
        raise KeyboardInterrupt

    cluster = Cluster.uniform(4, memory_bytes=46)  # 180 bytes into 184, and each device holds multiples of 6
    with pytest.raises(KeyboardInterrupt):
        place("auto", OpGraph.from_edges(ops, []), cluster, PlaceOptions(time_limit_seconds=600, watch=interrupt))
    assert seen[0].excess_bytes > 0


def test_the_least_memory_order_reads_what_is_held_first() -> None:
    """After s, each branch is finished before the next begins: its large tensor is freed at once."""
    edges = [("s", "a", 1), ("s", "b", 1), ("a", "c", 9), ("b", "d", 9), ("c", "e", 2), ("d", "e", 2)]
    graph = graph_of(dict.fromkeys("sabcde", 1), *edges)
    order = least_memory_order(graph)
    assert [graph.ops[v].id for v in order] == ["s", "a", "c", "b", "d", "e"]
    assert simulate(graph, Cluster.uniform(1), (0,) * 6, ranks(order)).peak_memory_bytes == (13,)
    for seed in range(5):
        other = random_graph(40, seed)
        rank = ranks(least_memory_order(other))
        assert sorted(rank) == sorted(ranks(depth_first_order(other)))
        assert all(rank[u] < rank[v] for v in range(40) for u in other.predecessors[v])
