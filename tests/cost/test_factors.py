"""Costs changed on purpose."""

import pytest

from baechi_ext.cost import scale_links, vary_costs
from baechi_ext.ir import Cluster, Device, Link
from tests.build import graph_of

DEVICES = (Device("a"), Device("b", 10, 2.0), Device("c"))
CLUSTER = Cluster(DEVICES, Link(2.0, 3.0, send_us=1.0, receive_us_per_byte=4.0), {("a", "b"): Link(5.0, 7.0)}, True)


def test_every_link_is_scaled() -> None:
    scaled = scale_links(CLUSTER, 2.0)
    assert scaled.default == Link(4.0, 6.0, send_us=2.0, receive_us_per_byte=8.0)
    assert scaled.pairs == {("a", "b"): Link(10.0, 14.0)}
    assert (scaled.devices, scaled.parallel_transfers) == (DEVICES, True)
    assert scale_links(CLUSTER, 1.0) == CLUSTER


@pytest.mark.parametrize(("factor", "low", "high"), [(1.5, 1.0, 1.5), (0.5, 0.5, 1.0)])
def test_every_cost_is_varied_by_itself(factor: float, low: float, high: float) -> None:
    graph = graph_of({"x": 10, "y": 10, "z": 0}, ("x", "y", 5), persistent_bytes={"x": 7})
    varied, cluster = vary_costs(graph, CLUSTER, factor, seed=3)
    factors = [op.compute_us / 10 for op in varied.ops[:2]]
    assert all(low <= f <= high for f in factors)
    assert factors[0] != factors[1]
    assert (varied.ops[2].compute_us, varied.ops[0].persistent_bytes) == (0, 7)
    assert varied.fingerprint == graph.fingerprint
    assert varied.tensors == graph.tensors
    ratios = set()
    for i in range(3):
        for j in range(3):
            if i != j:
                link, base = cluster.link(i, j), CLUSTER.link(i, j)
                ratio = link.latency_us / base.latency_us
                assert low <= ratio <= high
                assert link.us_per_byte == pytest.approx(base.us_per_byte * ratio)
                ratios.add(ratio)
    assert len(ratios) == 6
    assert (cluster.devices, cluster.parallel_transfers) == (DEVICES, True)


def test_the_seed_decides() -> None:
    graph = graph_of({"x": 10, "y": 10})
    assert vary_costs(graph, CLUSTER, 2.0, 1) == vary_costs(graph, CLUSTER, 2.0, 1)
    assert vary_costs(graph, CLUSTER, 2.0, 1) != vary_costs(graph, CLUSTER, 2.0, 2)
    assert vary_costs(graph, CLUSTER, 1.0, 1)[0] == graph
