"""The costs of a layer's other splits: the strategy's cost with only that layer changed."""

from dataclasses import replace

import pytest

from baechi_ext.shard.analysis import layer_costs, other_configurations
from baechi_ext.shard.graph import ShardGraph
from baechi_ext.shard.machine import Machine
from baechi_ext.shard.networks import network
from baechi_ext.shard.plan import ShardPlan
from baechi_ext.shard.search import search
from baechi_ext.shard.tables import bytes_of


@pytest.mark.parametrize("overlap", [False, True])
def test_each_change_is_that_of_the_whole_strategy(overlap: bool) -> None:
    found = search(network("alexnet", batch=64), Machine(devices=8, overlap=overlap))
    tables, choice = found.tables, list(found.choice)
    others = list(other_configurations(tables, choice))
    assert sum(map(len, others)) > len(choice)
    for v, ways in enumerate(others):
        assert [way.change for way in ways[:6]] == sorted(way.change for way in ways[:6])
        for way in ways:
            c = next(i for i, row in enumerate(tables.spaces[v].tolist()) if tuple(row) == way.configuration)
            changed = [*choice[:v], c, *choice[v + 1 :]]
            assert tables.cost(changed) - found.cost == pytest.approx(way.change, rel=1e-6, abs=1e-3)
            assert bytes_of(tables, changed) - found.held_bytes == pytest.approx(way.held_change_bytes, abs=1)
            assert way.change >= -1e-6 * found.cost  # the search found the least


def test_layers_that_are_tied_change_together() -> None:
    graph, machine = network("transformer", batch=64), Machine(devices=4)
    first, second = _twins(graph)
    found = search(replace(graph, ties=((first, second),)), machine)
    spaces, choice = found.tables.spaces, list(found.choice)
    others = list(other_configurations(found.tables, choice))
    assert others[first] == others[second]
    for way in others[first]:
        c = spaces[first].tolist().index(list(way.configuration))
        changed = [c if v in (first, second) else chosen for v, chosen in enumerate(choice)]
        assert found.tables.cost(changed) - found.cost == pytest.approx(way.change, rel=1e-6, abs=1e-3)
    choice[first] = (choice[first] + 1) % len(spaces[first])  # a strategy of people may split them differently: each changes by itself then
    way = list(other_configurations(found.tables, choice))[second][0]
    changed = [spaces[v].tolist().index(list(way.configuration)) if v == second else chosen for v, chosen in enumerate(choice)]
    assert found.tables.cost(changed) - found.tables.cost(choice) == pytest.approx(way.change, rel=1e-6, abs=1e-3)


def _twins(graph: ShardGraph) -> tuple[int, int]:
    """Two layers that can be split in the same ways."""
    forms: dict[object, int] = {}
    for v, node in enumerate(graph.nodes):
        form = (node.axes, node.contiguous)
        if form in forms and len(node.axes) > 2:
            return forms[form], v
        forms[form] = v
    raise AssertionError("no two layers are alike")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_plan_says_what_its_layers_cost_and_is_read_again(overlap: bool) -> None:
    found = search(network("transformer", batch=64), Machine(devices=8, overlap=overlap))
    plan = ShardPlan.of(found, 64, "default", {})
    assert sum(layer.total_us for layer in plan.shard.values()) == pytest.approx(plan.predicted_step_us)
    assert sum(layer.held_bytes for layer in plan.shard.values()) == pytest.approx(plan.held_bytes)
    assert [cost.total for cost in layer_costs(found.tables, found.choice)] == pytest.approx(
        [layer.total_us * found.tables.machine.tera_flops * 1e6 for layer in plan.shard.values()]
    )
    assert any("hidden" in layer.costs_us for layer in plan.shard.values()) == overlap
    assert ShardPlan.from_json(plan.to_json()) == plan
