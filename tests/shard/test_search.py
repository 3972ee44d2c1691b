"""The search against trying every strategy: orders, pruning, memory limits, and beams with their bounds."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baechi_ext.errors import ShardError
from baechi_ext.shard.elimination import choose, eliminate, plan_elimination
from baechi_ext.shard.graph import ShardGraph
from baechi_ext.shard.machine import Machine
from baechi_ext.shard.networks import network
from baechi_ext.shard.order import ORDERS, elimination_order
from baechi_ext.shard.prune import pruned
from baechi_ext.shard.search import SearchOptions, search
from baechi_ext.shard.tables import build_tables, bytes_of
from tests.shard.problems import cost_by_hand, graphs, least_cost

DEVICES = st.sampled_from((1, 2, 3, 4))
REL = 1e-9


@settings(max_examples=60, deadline=None)
@given(graph=graphs(), devices=DEVICES, original=st.booleans(), order=st.sampled_from(sorted(ORDERS)))
def test_every_order_finds_the_least_cost(graph: ShardGraph, devices: int, original: bool, order: str) -> None:
    found = search(graph, Machine(devices=devices), SearchOptions(order=order, original=original))
    assert found.cost == pytest.approx(cost_by_hand(found.tables, found.choice), rel=REL)
    assert found.cost == pytest.approx(least_cost(found.tables), rel=REL)
    assert found.status == "optimal"


@settings(max_examples=40, deadline=None)
@given(graph=graphs(), devices=DEVICES)
def test_pruning_keeps_an_optimum(graph: ShardGraph, devices: int) -> None:
    tables = build_tables(graph, Machine(devices=devices))
    fewer = pruned(tables)
    assert all(0 < a <= b for a, b in zip(fewer.sizes, tables.sizes, strict=True))
    assert least_cost(fewer) == pytest.approx(least_cost(tables), rel=REL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baechi_ext.shard.search._WORTH_PRUNING", -1.0)
        found = search(graph, Machine(devices=devices))
    assert found.cost == pytest.approx(least_cost(tables), rel=REL)


@settings(max_examples=40, deadline=None)
@given(graph=graphs(), devices=DEVICES, most=st.sampled_from((1, 4, 16)), beam=st.sampled_from((1, 3, 50)))
def test_smaller_tables_bound_the_least_cost(graph: ShardGraph, devices: int, most: int, beam: int) -> None:
    tables = build_tables(graph, Machine(devices=devices))
    plan = plan_elimination(tables, elimination_order("generate_seq", graph.neighbours, tables.sizes), most)
    done = eliminate(tables, plan)
    found = choose(tables, done, beam)
    least = least_cost(tables)
    assert done.left <= least * (1 + REL)
    assert least <= found.cost * (1 + REL)
    assert found.cost == pytest.approx(cost_by_hand(tables, found.choice), rel=REL)
    assert done.left <= found.bound * (1 + REL)
    assert found.bound <= least * (1 + REL)


@settings(max_examples=40, deadline=None)
@given(graph=graphs(most_nodes=4), devices=DEVICES, part=st.floats(0.0, 1.0))
def test_memory_limits_are_kept(graph: ShardGraph, devices: int, part: float) -> None:
    free = search(graph, Machine(devices=devices))
    tables = free.tables
    least = sum(min(bytes_of(_alone(tables, v), [c]) for c in range(tables.sizes[v])) for v in range(len(graph.nodes)))
    limit = least + part * (free.held_bytes - least) + 1e-3
    found = search(graph, Machine(devices=devices, memory_bytes=limit))
    best = least_cost(tables, limit)
    assert found.held_bytes <= limit
    assert found.lower_bound <= best * (1 + REL)
    assert best <= found.cost * (1 + REL)
    with pytest.raises(ShardError, match="no strategy fits"):
        search(graph, Machine(devices=devices, memory_bytes=least * 0.99))


def _alone(tables, v):
    node = tables.graph.nodes[v]
    return replace(tables, graph=ShardGraph("one", (node,), ()), spaces=(tables.spaces[v],), costs=(tables.costs[v],), edges=())


def test_the_guard_says_what_the_largest_table_would_take() -> None:
    transformer = network("transformer", 64)
    message = r"would be over \d+ layers and take [\d.e+]+ MiB, and 0.09766 MiB are allowed; raise --table_memory"
    with pytest.raises(ShardError, match=message):
        search(transformer, Machine(devices=8), SearchOptions(table_bytes=100 * 1024, order="breadth_first"))


def test_breadth_first_is_refused_where_it_explodes() -> None:
    with pytest.raises(ShardError, match="--order=generate_seq may need less"):
        search(network("inception3", 128), Machine(devices=8), SearchOptions(order="breadth_first"))


def test_a_beam_comes_near_with_small_tables() -> None:
    transformer = network("transformer", 64, cost_model="original")
    machine = Machine(devices=8, word_bytes=8)
    exact = search(transformer, machine, SearchOptions(original=True))
    beam = search(transformer, machine, SearchOptions(original=True, table_bytes=20_000, beam=20))
    assert 8 * beam.elimination.largest <= 20_000 < 8 * exact.elimination.largest
    assert beam.lower_bound <= exact.cost * (1 + REL) <= beam.cost * (1 + 2 * REL)
    assert beam.cost < 1.1 * exact.cost


@pytest.mark.parametrize("devices", [1, 7, 13])
def test_any_number_of_devices(devices: int) -> None:
    for name in ("alexnet", "rnnlm", "inception3"):
        found = search(network(name, 128), Machine(devices=devices))
        assert all(_product(split) <= devices for split in found.strategy)


def _product(split: tuple[int, ...]) -> int:
    total = 1
    for parts in split:
        total *= parts
    return total


def test_one_device_communicates_nothing() -> None:
    found = search(network("resnet101", 32), Machine(devices=1))
    assert sum(found.tables.edge_costs(found.choice)) == 0.0
    assert all(set(split) == {1} for split in found.strategy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SearchOptions(order="alphabetical"), "unknown order 'alphabetical'; choose one of generate_seq, min_fill"),
        (SearchOptions(beam=0), "a beam of 0 states"),
    ],
)
def test_bad_options(options: SearchOptions, message: str) -> None:
    with pytest.raises(ShardError, match=message):
        search(network("alexnet", 32), Machine(devices=4), options)


def test_parts_of_images_help_small_batches() -> None:
    machine = Machine(devices=8, gigabytes_per_second=200)
    whole, parted = (search(network("inception3", 2, splits_images=s), machine) for s in (False, True))
    assert parted.cost < 0.97 * whole.cost
    axes = [[axis.name for axis in node.axes] for node in parted.tables.graph.nodes]
    splits = [dict(zip(names, row, strict=True)) for names, row in zip(axes, parted.strategy, strict=True)]
    assert any(s.get("width", 1) > 1 for s in splits)
    with pytest.raises(ShardError, match="the original cost model splits no images"):
        network("inception3", 2, cost_model="original", splits_images=True)


def test_a_dense_graph_is_refused_and_a_beam_proves_its_optimum() -> None:
    dense = network("densenet121", 32)
    with pytest.raises(ShardError, match="the table for .* would be over 2. layers"):
        search(dense, Machine(devices=4))
    found = search(dense, Machine(devices=2), SearchOptions(beam=4, table_bytes=1 << 20))
    assert 8 * found.elimination.largest <= 1 << 20
    assert not found.elimination.exact
    assert found.lower_bound <= found.cost <= 1.02 * found.lower_bound
