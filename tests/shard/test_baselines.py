"""Expert strategies are what their names say, the walk only gets better, and none beats the search."""

import pytest

from baechi_ext.shard.baselines import data_parallel, experts, megatron, one_weird_trick, random_walk
from baechi_ext.shard.machine import Machine
from baechi_ext.shard.networks import NETWORKS, network
from baechi_ext.shard.search import search
from baechi_ext.shard.tables import Tables, build_tables, bytes_of


def tables_of(name: str, devices: int, *, cost_model: str = "default") -> Tables:
    return build_tables(network(name, 64, cost_model=cost_model), Machine(devices=devices))


def splits(tables: Tables, choice: tuple[int, ...]) -> dict[str, dict[str, int]]:
    named = {}
    for node, row in zip(tables.graph.nodes, tables.strategy(choice), strict=True):
        named[node.name] = {axis.name: parts for axis, parts in zip(node.axes, row, strict=True) if parts > 1}
    return named


@pytest.mark.parametrize("name", NETWORKS)
def test_data_parallelism_splits_the_batch_alone(name: str) -> None:
    tables = tables_of(name, 8)
    found = splits(tables, data_parallel(tables).choice)
    assert all(layer == {"batch": 8} for layer in found.values())


def test_the_original_space_lacks_wide_data_parallelism() -> None:
    tables = tables_of("resnet101", 64, cost_model="original")
    assert max(layer["batch"] for layer in splits(tables, data_parallel(tables).choice).values()) == 16


def test_one_weird_trick_splits_features_of_linear_layers() -> None:
    tables = tables_of("alexnet", 8)
    found = splits(tables, one_weird_trick(tables).choice)
    assert {name: s for name, s in found.items() if s != {"batch": 8}} == {
        name: {"units": 8} for name in ("linear_10", "linear_11", "linear_12", "cross_entropy_13")
    }


def test_megatron_splits_heads_and_hidden_features() -> None:
    tables = tables_of("transformer", 8)
    baseline = megatron(tables)
    found = splits(tables, baseline.choice)
    parts = int(baseline.note.split()[0])
    batch = {"batch": 8 // parts} if parts < 8 else {}
    einsums = {name: s for name, s in found.items() if name.startswith("einsum")}
    assert all(any(s.get(axis) == parts for axis in ("heads", "hidden", "vocabulary")) for s in einsums.values())
    assert all(s == batch for name, s in found.items() if name.startswith("norm"))


@pytest.mark.parametrize("name", ["alexnet", "rnnlm", "inception3", "transformer"])
def test_nothing_beats_the_search(name: str) -> None:
    found = search(network(name, 64), Machine(devices=8))
    known = experts(found.tables)
    best = min(known, key=lambda b: b.cost)
    walk = random_walk(found.tables, best, seconds=60, most_proposals=2000)
    assert found.cost * (1 - 1e-9) <= walk.cost <= best.cost
    assert walk.cost == pytest.approx(found.tables.cost(walk.choice))
    assert all(b.cost == pytest.approx(found.tables.cost(b.choice)) for b in known)
    assert random_walk(found.tables, best, seconds=60, most_proposals=2000).choice == walk.choice


def test_a_walk_finds_a_small_optimum() -> None:
    found = search(network("alexnet", 64), Machine(devices=4))
    walk = random_walk(found.tables, data_parallel(found.tables), seconds=60, most_proposals=20_000)
    assert walk.cost == pytest.approx(found.cost, rel=0.01)


def test_one_device_leaves_nothing_to_choose() -> None:
    found = search(network("alexnet", 64), Machine(devices=1))
    assert {b.cost for b in experts(found.tables)} == {found.cost}


def test_what_does_not_fit_says_so_and_no_walk_leaves_the_limit() -> None:
    free = search(network("alexnet", 64), Machine(devices=8))
    limit = 0.9 * bytes_of(free.tables, data_parallel(free.tables).choice)
    tables = build_tables(network("alexnet", 64), Machine(devices=8, memory_bytes=limit))
    known = experts(tables)
    assert [b.fits for b in known] == [bytes_of(tables, b.choice) <= limit for b in known]
    assert not known[0].fits
    assert known[0].note == "does not fit"
    start = min((b for b in known if b.fits), key=lambda b: b.cost)
    assert bytes_of(tables, random_walk(tables, start, seconds=60, most_proposals=5000).choice) <= limit
