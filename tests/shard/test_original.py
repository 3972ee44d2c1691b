"""The original's cost model, number by number: its cost tables by their checksums, and the minimum costs that it finds."""

import json
from pathlib import Path

import numpy as np
import pytest

from baechi_ext.shard.graph import ShardGraph
from baechi_ext.shard.machine import Machine
from baechi_ext.shard.networks import network
from baechi_ext.shard.search import SearchOptions, search
from baechi_ext.shard.tables import build_tables
from tests.shard.problems import full

REFERENCE = json.loads((Path(__file__).parent / "reference.json").read_text())
GRAPHS = REFERENCE["graphs"]
PUBLISHED = [(name, int(p)) for name, graph in GRAPHS.items() for p in graph["minimum_cost"]]
EVERY = [(name, p) for name in GRAPHS for p in (2, 4, 8, 16, 32, 64)]


def original(name: str) -> ShardGraph:
    return network(name, GRAPHS[name]["batch"], cost_model="original")


def machine(devices: int) -> Machine:
    return Machine(devices=devices, word_bytes=8)


@pytest.mark.parametrize("name", GRAPHS)
def test_tables_have_the_originals_checksums(name: str) -> None:
    tables = build_tables(original(name), machine(8), original=True)
    rows = REFERENCE["checksums"]
    assert tables.sizes == tuple(rows[i][0] for i in GRAPHS[name]["nodes"])
    found = [(c.sum(), c.min(), c.max()) for c in tables.costs]
    np.testing.assert_allclose(found, [rows[i][1:] for i in GRAPHS[name]["nodes"]], rtol=1e-9)

    edges = {(e.source, e.target): full(t) for e, t in zip(tables.graph.edges, tables.edges, strict=True)}
    assert sorted(edges) == sorted((s, t) for s, t, _ in GRAPHS[name]["edges"])
    found = [(edges[s, t].size, edges[s, t].sum(), edges[s, t].max()) for s, t, _ in GRAPHS[name]["edges"]]
    np.testing.assert_allclose(found, [rows[i] for _, _, i in GRAPHS[name]["edges"]], rtol=1e-9)


@pytest.mark.parametrize(("name", "devices"), PUBLISHED)
def test_minimum_costs(name: str, devices: int) -> None:
    found = search(original(name), machine(devices), SearchOptions(original=True))
    assert found.status == "optimal"
    assert found.cost == pytest.approx(GRAPHS[name]["minimum_cost"][str(devices)], rel=1e-6)


@pytest.mark.parametrize(("name", "devices"), EVERY)
def test_another_order_finds_the_same(name: str, devices: int) -> None:
    one, other = (search(original(name), machine(devices), SearchOptions(original=True, order=o)) for o in ("generate_seq", "min_table"))
    assert one.cost == pytest.approx(other.cost, rel=1e-9)
    assert one.status == other.status == "optimal"


def test_strategies_of_the_paper() -> None:
    """Table II, for 32 devices: AlexNet's convolutions by batch, the last also by channels, and its linear layers by their features."""
    found = search(original("alexnet"), machine(32), SearchOptions(original=True))
    names = {node.name: split for node, split in zip(found.tables.graph.nodes, found.strategy, strict=True)}
    for conv in ("conv_0", "conv_2", "conv_4"):
        assert names[conv] == (32, 1, 1, 1, 1, 1, 1)
    assert names["conv_6"] == (16, 2, 1, 1, 1, 1, 1)
    assert [names[f"linear_{i}"] for i in (10, 11, 12)] == [(1, 4, 8), (1, 8, 4), (1, 4, 8)]
    assert names["cross_entropy_13"] == (1, 4)


def test_repeated_blocks_share_their_tables() -> None:
    tables = build_tables(original("resnet101"), machine(16), original=True)
    assert len({id(t.values) for t in tables.edges}) < len(tables.edges) / 4
    assert len({id(c) for c in tables.costs}) < len(tables.costs) / 4
