"""The decision process: what is decided, what moves gain, and what is observed, checked against the plain simulator."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baechi_ext.ir import Cluster, Link, OpGraph
from baechi_ext.place.placeto.decisions import Decisions
from baechi_ext.place.placeto.environment import MEMORY_PENALTY, Environment, Rules
from baechi_ext.place.placeto.environment_kernel import FEATURES
from baechi_ext.place.traversal import TRAVERSALS, traversal
from baechi_ext.place.trial import longest_placed_path_order
from baechi_ext.simulate import simulate
from tests.build import cluster_of, graph_of
from tests.simulate.strategies import clusters, graphs

FORK = graph_of({"a": 1, "b": 10, "c": 10, "d": 1}, ("a", "b", 4), ("a", "c", 4), ("b", "d", 2), ("c", "d", 2))


def observed(environment: Environment, name: str) -> list[list[float]]:
    """A feature, by episode and device."""
    return environment.observe()[:, :, FEATURES.index(name)].tolist()


# Decisions


@given(graphs(), st.sampled_from(sorted(TRAVERSALS)))
def test_decisions_are_the_groups_in_the_order_of_their_first_ops(graph: OpGraph, name: str) -> None:
    order = traversal(graph, name)
    decisions = Decisions.of(graph, cluster_of(2), order)
    assert sorted(v for unit in decisions.units for v in unit) == list(range(len(graph)))
    ranks = [min(order.index(v) for v in unit) for unit in decisions.units]
    assert ranks == sorted(ranks)
    for u, unit in enumerate(decisions.units):
        assert all(decisions.unit_of[v] == u for v in unit)
        assert len(unit) == 1 or len({graph.ops[v].colocation for v in unit} - {None}) == 1


def test_what_nothing_binds_in_pairs_is_decided_in_runs() -> None:
    """A star, whose centre nobody in particular reads, with every third leaf on one of two devices: what is pinned stays apart."""
    leaves = [f"leaf{i:03}" for i in range(300)]
    pins = {leaf: i // 3 % 2 for i, leaf in enumerate(leaves) if i % 3 == 0}
    graph = graph_of(dict.fromkeys(["centre", *leaves], 1.0), *(("centre", leaf, 4) for leaf in leaves), pin=pins)
    for order in (None, graph.order[::-1]):
        decisions = Decisions.of(graph, cluster_of(2), order, most=70)
        assert sorted(v for unit in decisions.units for v in unit) == list(range(301))
        assert 60 <= len(decisions) <= 70
        assert all(len({graph.pins.get(v) for v in unit}) == 1 for unit in decisions.units)



@given(graphs())
def test_above_is_reachability(graph: OpGraph) -> None:
    decisions = Decisions.of(graph, cluster_of(2))
    reaches = [set() for _ in graph.ops]
    for v in graph.order:
        for a in graph.predecessors[v]:
            reaches[v] |= reaches[a] | {a}
    for u, unit in enumerate(decisions.units):
        known = {int(decisions.unit_of[a]) for v in unit for a in reaches[v]} - {u}
        assert set(np.flatnonzero(decisions.above[u]).tolist()) == known


def test_large_graphs_are_decided_in_clusters() -> None:
    chain = graph_of({f"n{i}": 1 for i in range(60)}, *((f"n{i}", f"n{i + 1}", 100) for i in range(59)))
    decisions = Decisions.of(chain, cluster_of(2), most=20)
    assert 4 <= len(decisions) <= 20
    assert sorted(v for unit in decisions.units for v in unit) == list(range(60))
    assert decisions.placement(range(len(decisions)))[decisions.units[3][0]] == 3


# Rewards


@settings(max_examples=60)
@given(graph=graphs(), cluster=clusters(), rules=st.builds(Rules, st.integers(1, 2), st.booleans()), data=st.data())
def test_rewards_add_up_to_the_improvement(graph: OpGraph, cluster: Cluster, rules: Rules, data: st.DataObject) -> None:
    decisions = Decisions.of(graph, cluster)
    environment = Environment(decisions, 2, rules)
    device = st.integers(0, len(cluster) - 1)
    plans = data.draw(st.lists(st.lists(device, min_size=len(decisions), max_size=len(decisions)), min_size=2, max_size=2))
    environment.reset(plans)
    first, total = environment.costs.copy(), np.zeros(2)
    while not environment.done:
        environment.observe()
        actions = [data.draw(device), data.draw(device)]
        for plan, action in zip(plans, actions, strict=True):
            plan[environment.current] = action
        rewards = environment.step(np.array(actions))
        total += rewards
    assert environment.time == rules.visits * len(decisions)
    assert total == pytest.approx(first - environment.costs, abs=1e-9 * max(1.0, first.max()))
    for b, plan in enumerate(plans):
        placement = decisions.placement(plan)
        order = longest_placed_path_order(graph, cluster, placement) if rules.longest_path_first else None
        assert environment.makespans_us[b] == simulate(graph, cluster, placement, order).makespan_us


def test_episodes_keep_to_pins() -> None:
    """b and d are pinned, each to another device: they have no turn, are where they are pinned from the start on, and count as visited."""
    graph = FORK.replace_ops([replace(op, pin={"b": 1, "d": 2}.get(op.id)) for op in FORK.ops])
    cluster = cluster_of(3)
    decisions = Decisions.of(graph, cluster)
    environment = Environment(decisions, 1, Rules(visits=2))
    plan = [{1: 1, 3: 2}.get(v, 0) for (v,) in decisions.units]
    environment.reset([0] * len(decisions))
    turns = []
    while not environment.done:
        assert environment.devices.tolist() == [plan]
        order = longest_placed_path_order(graph, cluster, decisions.placement(plan))
        assert environment.makespans_us[0] == simulate(graph, cluster, decisions.placement(plan), order).makespan_us
        assert all(environment.visited[decisions.pins >= 0])
        turns.append(environment.current)
        plan[environment.current] = 2
        environment.step(np.array([2]))
    assert turns == [u for u, (v,) in enumerate(decisions.units) if v in (0, 2)] * 2


def test_where_all_is_pinned_nothing_moves() -> None:
    graph = FORK.replace_ops([replace(op, pin=1) for op in FORK.ops])
    environment = Environment(Decisions.of(graph, cluster_of(2)), 2)
    environment.reset([0] * len(graph))
    while not environment.done:
        environment.step(np.array([0, 0]))
    assert environment.devices.tolist() == [[1] * len(graph)] * 2
    assert environment.simulated == 2


def test_large_graphs_over_parts_of_a_batch_are_decided_in_clusters_too() -> None:
    """All eight parts of each op together would be few enough, but then no part could go to a device of its own."""
    ops = {f"o{i}@{k}": k for k in range(8) for i in range(20)}
    edges = [(f"o{i}@{k}", f"o{i + 1}@{k}", 9) for k in range(8) for i in range(19)]
    graph = graph_of(dict.fromkeys(ops, 1), *edges, part=ops)
    decisions = Decisions.of(graph, cluster_of(2), most=60)
    assert 20 < len(decisions) <= 60
    assert all(len({graph.ops[v].part for v in unit}) == 1 for unit in decisions.units)


def test_clusters_of_a_large_graph_are_apart_from_what_is_pinned() -> None:
    graph = graph_of({f"o{i}": 1 for i in range(40)}, *((f"o{i}", f"o{i + 1}", 9) for i in range(39)), pin={"o3": 1, "o4": 1, "o20": 0})
    decisions = Decisions.of(graph, cluster_of(2), most=20)
    assert len(decisions) <= 20
    assert sorted(v for unit in decisions.units for v in unit) == list(range(40))
    for unit, pin in zip(decisions.units, decisions.pins, strict=True):
        assert {graph.ops[v].pin for v in unit} == {None if pin < 0 else pin}


def test_the_best_plan_of_an_episode_is_kept() -> None:
    """b away is worth it, and then everything away is not; the first episode never moves."""
    environment = Environment(Decisions.of(FORK, cluster_of(2)), 2)
    environment.reset([0, 0, 0, 0])
    for actions in ([0, 0], [0, 1], [0, 1], [0, 1]):
        environment.step(np.array(actions))
    away = simulate(FORK, cluster_of(2), (0, 1, 0, 0)).makespan_us
    assert environment.best() == {(0, 0, 0, 0): (0.0, 22.0), (0, 1, 0, 0): (0.0, away)}
    assert away < 22


def test_improvements_say_when_they_were_seen() -> None:
    """Begun with two plans of 22; the third that is simulated has b on another device, and is not seen for the first time again."""
    environment = Environment(Decisions.of(FORK, cluster_of(2)), 2)
    for _ in range(2):
        environment.reset([0, 0, 0, 0])
        for actions in ([0, 0], [0, 1], [0, 0], [0, 0]):
            environment.step(np.array(actions))
    assert environment.improvements == [(2, 22.0), (3, simulate(FORK, cluster_of(2), (0, 1, 0, 0)).makespan_us)]
    assert environment.simulated == 6


def test_plans_that_do_not_fit_improve_nothing() -> None:
    graph = graph_of({"a": 10, "b": 10}, ("a", "b", 0), persistent_bytes={"a": 4, "b": 4})
    environment = Environment(Decisions.of(graph, cluster_of(2, latency_us=15, memory_bytes=4)), 1)
    environment.reset([0, 0])
    assert environment.improvements == []
    environment.step(np.array([1]))
    assert environment.improvements == [(2, 35.0)]


def test_memory_beyond_the_limit_costs() -> None:
    """Three of 4 bytes on a device of 8 are half a limit too much; the best plan is one that fits, although it is slower."""
    graph = graph_of({"a": 10, "b": 10, "c": 10}, ("a", "b", 0), ("b", "c", 0), persistent_bytes={"a": 4, "b": 4, "c": 4})
    environment = Environment(Decisions.of(graph, cluster_of(2, latency_us=15, memory_bytes=8)), 1)
    environment.reset([0, 0, 0])
    assert environment.costs.tolist() == [1 + MEMORY_PENALTY * 0.5]
    assert environment.step(np.array([1])).tolist() == [MEMORY_PENALTY * 0.5 - 0.5]
    assert list(environment.best().values()) == [(0.0, 45.0)]


def test_what_changes_nothing_is_not_simulated() -> None:
    environment = Environment(Decisions.of(FORK, cluster_of(2)), 3)
    environment.reset([0, 0, 0, 0])
    environment.step(np.array([0, 1, 0]))
    assert environment.simulated == 3 + 1


# What is observed


def test_features_by_hand() -> None:
    """a is on device 0, b and d on 1, c on 2; it is b's turn; one microsecond a byte. Decisions take 22 / 4 on average."""
    cluster = cluster_of(3)
    environment = Environment(Decisions.of(FORK, cluster), 1)
    environment.reset([0, 1, 2, 1])
    environment.step(np.array([0]))
    timeline = simulate(FORK, cluster, (0, 1, 2, 1))
    assert timeline.start_us == (0, 5, 9, 21)
    mean = 22 / 4
    assert observed(environment, "here") == [[0, 1, 0]]
    assert observed(environment, "speed") == [[0, 0, 0]]
    assert observed(environment, "run") == [pytest.approx([np.log1p(10 / mean)] * 3)]
    assert observed(environment, "load") == [pytest.approx([1 / (22 / 3), 1 / (22 / 3), 10 / (22 / 3)])]
    assert observed(environment, "visited_load") == [pytest.approx([1 / (22 / 3), 0, 0])]
    assert observed(environment, "parallel_load") == [pytest.approx([0, 0, 10 / (22 / 3)])]
    # a's tensor is on device 2 for c anyway, and ready at 1 on device 0; elsewhere 4 bytes later.
    assert observed(environment, "in_transfers") == [pytest.approx([0, np.log1p(4 / mean), 0])]
    assert observed(environment, "out_transfers") == [pytest.approx([np.log1p(2 / mean), 0, np.log1p(2 / mean)])]
    assert observed(environment, "ready") == [pytest.approx([0, np.log1p(4 / mean), np.log1p(4 / mean)])]
    # On device 2 c runs from 9 to 19, b would from 5 to 15.
    assert observed(environment, "overlap") == [pytest.approx([0, 0, np.log1p(6 / mean)])]
    assert observed(environment, "finish") == [pytest.approx([0, np.log1p(4 / mean), np.log1p(10 / mean)])]
    assert observed(environment, "inputs_here") == [pytest.approx([1, 0, 0])]
    assert observed(environment, "outputs_here") == [pytest.approx([0, 1, 0])]
    assert observed(environment, "slack") == [pytest.approx([np.log1p(6 / mean)] * 3)]
    assert observed(environment, "visited") == [[0, 0, 0]]
    assert observed(environment, "devices") == [pytest.approx([1 / 3] * 3)]
    assert observed(environment, "memory_with") == observed(environment, "peak") == [[0, 0, 0]]


def test_memory_features() -> None:
    graph = graph_of({"a": 1, "b": 1}, ("a", "b", 2), persistent_bytes={"a": 2, "b": 3})
    environment = Environment(Decisions.of(graph, cluster_of(2, memory_bytes=10)), 1)
    environment.reset([0, 1])
    assert observed(environment, "memory_with") == [pytest.approx([0.4, 0.7])]
    assert observed(environment, "peak") == [pytest.approx([0.4, 0.5])]


@settings(max_examples=40)
@given(graph=graphs(), cluster=clusters(), factor=st.sampled_from([0.25, 1024.0]))
def test_features_have_no_units(graph: OpGraph, cluster: Cluster, factor: float) -> None:
    """The same in other units of time, but for costs of nothing at all."""
    def scaled(link: Link) -> Link:
        return replace(link, **{f.name: getattr(link, f.name) * factor for f in fields(link)})

    slower = graph.replace_ops([replace(op, compute_us=op.compute_us * factor, issue_us=op.issue_us * factor) for op in graph.ops])
    links = {pair: scaled(link) for pair, link in cluster.pairs.items()}
    other = replace(cluster, default=scaled(cluster.default), pairs=links)
    if graph.total_compute_us() == 0:
        return
    seen = []
    for g, c in ((graph, cluster), (slower, other)):
        environment = Environment(Decisions.of(g, c), 1)
        environment.reset([0] * len(environment.decisions))
        rows = []
        while not environment.done:
            rows.append(environment.observe().copy())
            environment.step(np.array([environment.time % len(c)]))
        seen.append(np.stack(rows))
    np.testing.assert_allclose(seen[0], seen[1], rtol=1e-5, atol=1e-6)
