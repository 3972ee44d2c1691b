"""The RNN placer: what it knows of groups, and what it learns on one graph."""

import math

import numpy as np
import pytest
import torch

from baechi_ext.errors import OptionError
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.place.placeto.environment import Rules
from baechi_ext.place.placeto.rnn import RnnConfig, RnnPlacer, group_features
from baechi_ext.place.placeto.training_task import TrainingTask
from tests.build import cluster_of, graph_of
from tests.place.placeto.graphs import distinct, towers

SMALL = RnnConfig(hidden=16, device_width=4)


def training(graph: OpGraph, cluster: Cluster, batch: int = 16) -> TrainingTask:
    return TrainingTask.of(graph, cluster, batch, Rules())


def test_features_of_groups_by_hand() -> None:
    """Ops of 10 us; sending one of 5 bytes takes 5 us, half the mean op's time, one of 20 bytes two of them; a and b are one group."""
    graph = graph_of({"a": 10.0, "b": 10.0, "c": 10.0}, ("a", "c", 5), ("b", "c", 20), colocation={"a": "g", "b": "g"})
    view = training(graph, cluster_of(2)).view
    found = group_features(view)
    assert found.shape == (2, 5 + 1 + 2 * 2)
    np.testing.assert_allclose(found[:, 5], np.log1p([2, 1]))
    np.testing.assert_allclose(found[:, 6:], np.log1p([[0, 2.5, 0, 0], [0, 0, 2.5, 0]]), rtol=1e-6)
    np.testing.assert_allclose(found[0, :5], view.op_features[:2].mean(axis=0), rtol=1e-6)


def test_a_batch_of_plans() -> None:
    one = training(distinct(), cluster_of(3))
    placer = RnnPlacer(one, SMALL)
    plans = placer.drawn(16, torch.Generator().manual_seed(0))
    groups = len(one.decisions)
    assert plans.shape == (16, groups)
    assert set(plans.flatten().tolist()) == {0, 1, 2}
    assert torch.equal(plans, placer.drawn(16, torch.Generator().manual_seed(0)))
    chances = placer.chances(plans).detach()
    assert chances.shape == (groups, 16, 3)
    torch.testing.assert_close(chances.exp().sum(dim=-1), torch.ones(groups, 16))
    assert float(-(chances.exp() * chances).sum(dim=-1).mean()) > 0.9 * math.log(3)


def test_drawn_step_by_step_as_learned_in_one_pass() -> None:
    """Each group's device, given what was drawn before, is drawn as often as `chances` says of the plans."""
    one = training(distinct(6), cluster_of(2))
    placer = RnnPlacer(one, RnnConfig(hidden=4))
    with torch.no_grad():
        for parameter in placer.layers.parameters():
            parameter *= 3  # so that some devices are far likelier
    plans = placer.drawn(20_000, torch.Generator().manual_seed(0))
    distinct_plans, count = plans.unique(dim=0, return_counts=True)
    chances = placer.chances(distinct_plans).detach()
    chosen = chances.gather(-1, distinct_plans.T.unsqueeze(-1)).squeeze(-1).sum(dim=0).exp()
    torch.testing.assert_close(count / 20_000, chosen, atol=0.01, rtol=0)
    assert chosen.max() > 2 * chosen.mean()


def test_two_towers_go_to_two_devices() -> None:
    """Two chains of 40 us that nothing connects: what it draws at last is near the optimum, 40, and far from its first draws."""
    one = training(towers(), cluster_of(2, latency_us=5))
    placer = RnnPlacer(one, SMALL)
    first = placer.update()
    placer.run(16 * 80)
    assert one.best_ratio == pytest.approx(1.0)
    assert placer.update() * one.environment.scale_us < 45 < first * one.environment.scale_us


def test_it_simulates_as_many_plans_as_it_may() -> None:
    one = training(towers(), cluster_of(2))
    RnnPlacer(one, SMALL).run(100)
    assert one.environment.simulated == 6 * 16
    assert one.best
    with pytest.raises(OptionError, match="31 plans are too few for the RNN placer, which learns from 16 at a time; allow 32"):
        RnnPlacer(one, SMALL).run(31)


def test_same_seed_same_plans() -> None:
    found = []
    for seed in (1, 1, 2):
        state = torch.random.get_rng_state()
        one = training(distinct(), cluster_of(3))
        placer = RnnPlacer(one, RnnConfig(hidden=16, seed=seed))
        placer.run(64)
        assert torch.equal(state, torch.random.get_rng_state())
        found.append([x.detach().clone() for x in placer.layers.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))
