"""The embedding and the policy: they see the graph and not its numbering, devices and not their number."""

import numpy as np
import pytest
import torch

from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.place.placeto.decisions import OP_FEATURES, Decisions, View
from baechi_ext.place.placeto.embedding import embed
from baechi_ext.place.placeto.embedding import tensors as as_tensors
from baechi_ext.place.placeto.environment import Environment, Rules
from baechi_ext.place.placeto.learning import observed, run_episodes
from baechi_ext.place.placeto.policy import Policy, PolicyConfig
from baechi_ext.place.traversal import traversal
from tests.build import cluster_of, graph_of
from tests.place.placeto.graphs import distinct, shuffled, towers

CONFIG = PolicyConfig(rounds=3)


def by_name(graph: OpGraph, cluster: Cluster) -> Decisions:
    return Decisions.of(graph, cluster, traversal(graph, "lexico_topo"))


def embedding_of(graph: OpGraph) -> torch.Tensor:
    """By op."""
    view = View(by_name(graph, cluster_of(3)))
    return embed(Policy.fresh(CONFIG, seed=5).parameters, view, *as_tensors([view.op_features]), CONFIG.size)


# What is seen of a graph


def test_op_features_by_hand() -> None:
    """a (1 us, 4 bytes out) and b (3 us) on equal devices; one microsecond a byte; the mean op takes 2."""
    view = View(Decisions.of(graph_of({"a": 1, "b": 3}, ("a", "b", 4), persistent_bytes={"b": 2}), cluster_of(2)))
    columns = dict(zip(OP_FEATURES, view.op_features.T.tolist(), strict=True))
    assert columns == {
        "run": pytest.approx([np.log1p(0.5), np.log1p(1.5)]),
        "output": pytest.approx([np.log1p(2), 0]),
        "memory": pytest.approx([np.log1p(4 / 3), np.log1p(2 / 3)]),
        "from_start": pytest.approx([0, 1 / 4]),
        "to_end": pytest.approx([3 / 4, 0]),
    }
    source, target, feature = view.edges
    assert (source.tolist(), target.tolist(), feature.tolist()) == ([0], [1], [[pytest.approx(np.log1p(2))]])


def test_relations_are_means() -> None:
    view = View(Decisions.of(graph_of(dict.fromkeys("abcd", 1), ("a", "b", 1), ("a", "c", 1), ("b", "d", 1), ("c", "d", 1)), cluster_of(2)))
    above, below, parallel = view.relations.tolist()
    third = pytest.approx(1 / 3)
    assert above == [[0, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [third, third, third, 0]]
    assert below == [[0, third, third, third], [0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0]]
    assert parallel == [[0, 0, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]


# The embedding


def test_embeddings_do_not_depend_on_the_numbering() -> None:
    graph = distinct()
    other = shuffled(graph)
    assert graph.index != other.index
    a, b = embedding_of(graph), embedding_of(other)
    order = [other.index[op.id] for op in graph.ops]
    torch.testing.assert_close(a, b[order], rtol=1e-4, atol=1e-5)
    assert len(np.unique(a.detach().numpy().round(5), axis=0)) > len(graph) / 2


def test_embeddings_look_as_many_edges_far_as_there_are_rounds() -> None:
    """In a chain of ten, what changes with one feature of the first op: as many ops after it, at the most."""
    names = [f"n{i}" for i in range(10)]
    chain = graph_of(dict.fromkeys(names, 1), *((a, b, 1) for a, b in zip(names, names[1:], strict=False)))
    view = View(Decisions.of(chain, cluster_of(2)))
    (features,) = as_tensors([view.op_features])
    changed = features.clone()
    changed[0] += 3
    seen = torch.zeros(10)
    for seed in range(5):
        policy = Policy.fresh(CONFIG, seed)
        before, after = (embed(policy.parameters, view, x, CONFIG.size) for x in (features, changed))
        seen += (before - after).abs().amax(dim=1)
    assert torch.nonzero(seen > 1e-7).flatten().tolist() == list(range(CONFIG.rounds + 1))


def test_decisions_are_means_of_their_ops() -> None:
    graph = distinct()
    decisions = by_name(graph, cluster_of(3))
    policy, view = Policy.fresh(CONFIG, seed=5), View(decisions)
    ops, embedded = embedding_of(graph), policy.embedded(view)
    for u, unit in enumerate(decisions.units):
        torch.testing.assert_close(embedded[u], ops[list(unit)].mean(dim=0))


# The policy


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_one_policy_serves_any_number_of_devices(k: int) -> None:
    decisions = by_name(distinct(), cluster_of(k))
    policy, view, environment = Policy.fresh(CONFIG, 0), View(decisions), Environment(decisions, 3, Rules(visits=2))
    environment.reset([0] * len(decisions))
    rollout = run_episodes(policy, view, environment, torch.Generator().manual_seed(0))
    steps = 2 * len(decisions)
    assert rollout.states.features.shape[:2] == (3 * steps, k)
    assert rollout.rewards.shape == (steps, 3)
    logits = policy.logits(view, rollout.states, policy.embedded(view))
    chosen = logits.log_softmax(dim=-1).gather(-1, rollout.actions.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(chosen, rollout.log_probabilities, rtol=1e-4, atol=1e-5)
    assert (rollout.actions < k).all()


def test_episodes_do_not_depend_on_the_numbering() -> None:
    graph, cluster = distinct(), cluster_of(3, latency_us=0.3)
    plans = []
    for g in (graph, shuffled(graph)):
        decisions = by_name(g, cluster)
        policy, environment = Policy.fresh(CONFIG, 3), Environment(decisions, 4)
        policy.parameters["head.score.weight"] *= 50
        environment.reset([0] * len(decisions))
        run_episodes(policy, View(decisions), environment, torch.Generator().manual_seed(1))
        placements = [decisions.placement(devices) for devices in environment.devices]
        plans.append([{op.id: p[v] for v, op in enumerate(g.ops)} for p in placements])
    assert plans[0] == plans[1]
    assert len({d for plan in plans[0] for d in plan.values()}) > 1


def test_equal_devices_are_scored_alike() -> None:
    """Four equal devices, of which three hold nothing: these get the same score, the one that holds all another one."""
    decisions = by_name(towers(), cluster_of(4))
    policy, view, environment = Policy.fresh(CONFIG, 0), View(decisions), Environment(decisions, 1)
    environment.reset([2] * len(decisions))
    logits = policy.logits(view, observed(environment), policy.embedded(view))[0]
    assert logits[0] == logits[1] == logits[3] != logits[2]


def test_without_lots_the_likeliest_actions_are_taken() -> None:
    decisions = by_name(distinct(), cluster_of(3))
    policy, view, environment = Policy.fresh(CONFIG, 0), View(decisions), Environment(decisions, 3)
    taken = []
    for generator, likeliest in ((None, 0), (torch.Generator().manual_seed(4), 2)):
        environment.reset([0] * len(decisions))
        taken.append(run_episodes(policy, view, environment, generator, likeliest).actions.reshape(-1, 3))
    assert (taken[0] == taken[0][:, :1]).all()
    assert (taken[1][:, :2] == taken[0][:, :2]).all()
    assert (taken[1][:, 2] != taken[0][:, 2]).any()
