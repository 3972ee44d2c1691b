"""Moves of the repair's guided steps, costed at once, beside the same costs edge by edge."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.ir import Cluster, Device, Link, Op, OpGraph
from baechi_ext.place.moves import Moves
from baechi_ext.place.repair import held_at_peak, repair
from baechi_ext.place.trial import try_orders
from baechi_ext.simulate import Simulator, simulate
from tests.simulate.strategies import clusters, graphs


def extra_transfer_us(graph: OpGraph, cluster: Cluster, placement: Sequence[int], unit: Sequence[int], target: int) -> float:
    """Transfer time that moving `unit` adds, each edge on its own."""
    total = 0.0
    for v in unit:
        edges = [(t, graph.tensors[t].producer) for t in graph.inputs[v]]
        edges += [(t, w) for t in graph.outputs[v] for w in graph.tensors[t].readers]
        for t, other in edges:
            if other not in unit:
                at, size = placement[other], graph.tensors[t].bytes
                total += cluster.link(at, target).total_us(size) if at != target else 0.0
                total -= cluster.link(at, placement[v]).total_us(size) if at != placement[v] else 0.0
    return total


@given(graphs(), clusters(), st.data())
def test_moves_cost_what_their_edges_do(graph: OpGraph, cluster: Cluster, data: st.DataObject) -> None:
    k, units = len(cluster), graph.units()
    if k == 1 or not units:
        return
    placement = [0] * len(graph)
    for unit in units:
        device = data.draw(st.integers(0, k - 1))
        for v in unit:
            placement[v] = device
    timeline = simulate(graph, cluster, placement)
    source, excess, room = placement[0], 7.0, [float(data.draw(st.integers(0, 9))) for _ in range(k)]
    held, busy = held_at_peak(timeline, source), timeline.busy_us
    expected = []
    for u, unit in enumerate(units):
        size = sum(held.get(v, 0.0) for v in unit)
        if placement[unit[0]] == source and size > 0:
            for d in set(range(k)) - {source}:
                work_us = sum(graph.ops[v].compute_us for v in unit) / cluster.devices[d].speed
                later_us = max(0.0, busy[d] + work_us - busy[source])
                cost_us = max(0.0, extra_transfer_us(graph, cluster, placement, unit, d)) + later_us
                expected.append(((cost_us + 1.0) / min(size, excess), u, d, size))
    expected.sort(key=lambda move: (move[3] > room[move[2]], *move))
    found = Moves(graph, cluster, units).ranked(timeline, source, held, excess, room)
    assert [move[1:] for move in found] == [move[1:] for move in expected]
    assert [move[0] for move in found] == pytest.approx([move[0] for move in expected])


def test_a_slow_device_is_no_place_for_what_fits_on_another() -> None:
    pairs = [(f"o{i}", f"o{i + 1}", 10, "") for i in range(0, 40, 2)]
    graph = OpGraph.from_edges([Op(f"o{i}", compute_us=4.5, persistent_bytes=3) for i in range(40)], pairs)
    cluster = Cluster((Device("0", memory_bytes=60), Device("1"), Device("2", speed=0.01)), Link(0.0, 2.0))
    simulator = Simulator(graph, cluster)
    for start in ([0] * 40, [0, 1] * 20):
        found = repair(simulator, try_orders(simulator, start, [None]), seed=0)
        assert found.valid
        assert 2 not in found.placement
