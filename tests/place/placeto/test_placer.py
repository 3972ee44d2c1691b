"""The method: what a policy file does to a graph, within limits of memory and time."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from baechi_ext.errors import FileError, InfeasibleError
from baechi_ext.place.common import PlaceOptions, SearchProgress
from baechi_ext.place.placeto.checkpoint import SHIPPED, load_policy, save_policy
from baechi_ext.place.placeto.environment import Rules
from baechi_ext.place.placeto.policy import Policy, PolicyConfig
from baechi_ext.place.placeto.train import Trainer, TrainingConfig
from baechi_ext.place.placeto.training_task import TrainingTask
from baechi_ext.place.registry import place
from tests import oracle
from tests.build import cluster_of, graph_of
from tests.place.placeto.graphs import distinct, towers

SMALL = PolicyConfig(width=4, rounds=2, hidden=16)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> PlaceOptions:
    """The file of a policy that knows how to put two towers on two devices."""
    path = tmp_path_factory.mktemp("policy") / "towers.json"
    config = TrainingConfig(updates=60, graphs=1, learning_rate=(1e-2, 1e-3), entropy=(0.05, 0.001), discount=1.0)
    training = TrainingTask.of(towers(), cluster_of(2, latency_us=5), 16, Rules())
    save_policy(path, Trainer(Policy.fresh(SMALL, 0), [training], config).run(), {})
    return PlaceOptions(placeto_policy=str(path), seed=1)


@pytest.fixture
def fresh(tmp_path: Path) -> PlaceOptions:
    """The file of one that knows nothing."""
    save_policy(tmp_path / "fresh", Policy.fresh(SMALL, 0), {})
    return PlaceOptions(placeto_policy=str(tmp_path / "fresh.json"), seed=1)


def test_zero_shot(trained: PlaceOptions) -> None:
    result = place("placeto", towers(3), cluster_of(3, latency_us=5), trained)
    assert (result.predicted_step_us, result.status) == (40, "optimal")
    assert result.plan.options["placeto_policy"].endswith("towers.json")
    assert "placeto_episodes" not in result.plan.options


def test_the_shipped_policy_knows_more_than_chance() -> None:
    """One episode of its likeliest actions, on graphs it has not seen, against the best of as many random plans as it simulates."""
    policy = load_policy(SHIPPED)
    found = []
    for seed in range(4):
        one, lots = (TrainingTask.of(distinct(30, seed), cluster_of(3), 1, Rules(visits=policy.config.visits)) for _ in range(2))
        one.run(policy, None)
        draw = np.random.default_rng(seed)
        while lots.environment.simulated < one.environment.simulated:
            lots.judge(draw.integers(3, size=(1, len(lots.decisions))))
        found.append((one.best_ratio, lots.best_ratio))
    placed, drawn = map(sum, zip(*found, strict=True))
    assert placed < 0.9 * drawn


def test_every_plan_is_valid(fresh: PlaceOptions) -> None:
    for seed in range(3):
        graph, cluster = distinct(12, seed), cluster_of(3, latency_us=1, memory_bytes=90)
        plan = place("placeto", graph, cluster, replace(fresh, placeto_episodes=16)).plan
        assert oracle.violations(graph, cluster, plan.placement, plan.priority) == []
        assert plan.predicted_step_us == pytest.approx(oracle.simulate(graph, cluster, plan.placement, plan.priority).makespan_us)


def test_never_slower_than_one_device(fresh: PlaceOptions) -> None:
    graph = graph_of(dict.fromkeys("abcd", 10.0), ("a", "b", 99), ("b", "c", 99), ("c", "d", 99))
    assert place("placeto", graph, cluster_of(3), fresh).predicted_step_us == 40


def test_it_learns_on_the_graph(fresh: PlaceOptions) -> None:
    """Eight towers on four devices: 16 episodes of a policy that knows nothing miss what it learns in 800."""
    graph, cluster = towers(8, 3), cluster_of(4, latency_us=5)
    before, after = (place("placeto", graph, cluster, replace(fresh, placeto_episodes=n)).predicted_step_us for n in (0, 800))
    assert after < before


def test_same_seed_same_plan(fresh: PlaceOptions) -> None:
    options = replace(fresh, placeto_episodes=32)
    plans = [place("placeto", distinct(), cluster_of(3), given).plan for given in (options, options, replace(options, seed=2))]
    assert (plans[0].placement, plans[0].priority) == (plans[1].placement, plans[1].priority)


def test_the_order_of_visits(trained: PlaceOptions) -> None:
    plan = place("placeto", towers(), cluster_of(2, latency_us=5), replace(trained, traversal_order="dfs_postorder")).plan
    assert plan.options["traversal_order"] == "dfs_postorder"
    assert plan.predicted_step_us <= 80


def test_learning_tells_how_it_goes_and_ends_when_told(fresh: PlaceOptions) -> None:
    told: list[SearchProgress] = []

    def watch(progress: SearchProgress) -> None:
        told.append(progress)
        if len(told) == 3:
            raise KeyboardInterrupt

    result = place("placeto", towers(), cluster_of(2, latency_us=5), replace(fresh, placeto_episodes=800, watch=watch))
    assert result.interrupted
    assert [p.evaluations for p in told] == sorted(p.evaluations for p in told)
    assert told[-1].bound_us == pytest.approx(40)
    assert result.predicted_step_us <= told[-1].best_us


def test_learning_ends_at_the_time_limit(fresh: PlaceOptions) -> None:
    options = replace(fresh, placeto_episodes=10**6, time_limit_seconds=0.5)
    assert place("placeto", towers(), cluster_of(2, latency_us=5), options).placement_seconds < 60


def test_large_graphs_have_fewer_decisions(trained: PlaceOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baechi_ext.place.placeto.placer._SIMULATED_OPS", 20_000)
    seen = []
    monkeypatch.setattr(TrainingTask, "run", lambda self, *_, _run=TrainingTask.run, **more: seen.append(self) or _run(self, *_, **more))
    result = place("placeto", towers(10, 40), cluster_of(2, latency_us=5), trained)
    assert (len(seen[0].decisions) <= 64, seen[0].environment.batch < 16) == (True, True)
    assert result.predicted_step_us <= 4000


def test_it_learns_from_several_episodes_on_large_graphs_too(fresh: PlaceOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside itself an episode is neither better nor worse: alone it would teach to stay undecided."""
    monkeypatch.setattr("baechi_ext.place.placeto.placer._SIMULATED_OPS", 1)
    seen: list[int] = []
    monkeypatch.setattr(TrainingTask, "run", lambda self, *_, _run=TrainingTask.run, **more: seen.append(self) or _run(self, *_, **more))
    for episodes in (0, 4):
        place("placeto", towers(), cluster_of(2, latency_us=5), replace(fresh, placeto_episodes=episodes))
    assert [one.environment.batch for one in seen] == [1] * 4 + [4] * 5


def test_batches_simulate_no_more_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that visits each op twice, on 400 ops: 4 batches of an episode, 2 visits of 64 decisions and 400 ops a plan."""
    monkeypatch.setattr("baechi_ext.place.placeto.placer._SIMULATED_OPS", 4 * 2 * 80 * 400)
    seen: list[TrainingTask] = []
    monkeypatch.setattr(TrainingTask, "run", lambda self, *_, _run=TrainingTask.run, **more: seen.append(self) or _run(self, *_, **more))
    place("placeto", towers(10, 40), cluster_of(2, latency_us=5))
    assert len(seen) == 4
    assert seen[0].environment.simulated * 400 <= 4 * 2 * 80 * 400 + 4 * 400


def test_a_search_ends_between_batches_at_the_time_limit(fresh: PlaceOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[TrainingTask] = []
    monkeypatch.setattr(TrainingTask, "run", lambda self, *_, _run=TrainingTask.run, **more: seen.append(self) or _run(self, *_, **more))
    monkeypatch.setattr("baechi_ext.place.common.SMALL", 0)
    result = place("placeto", towers(), cluster_of(2, latency_us=5), replace(fresh, time_limit_seconds=1e-9))
    assert (len(seen), result.plan.predicted_step_us <= 80) == (1, True)


def test_what_there_is_nothing_to_decide_about(trained: PlaceOptions) -> None:
    assert place("placeto", graph_of({}), cluster_of(2), trained).predicted_step_us == 0
    assert place("placeto", towers(), cluster_of(1), trained).predicted_step_us == 80


def test_what_is_refused(trained: PlaceOptions) -> None:
    with pytest.raises(FileError, match="cannot read placeto policy file"):
        place("placeto", towers(), cluster_of(2), replace(trained, placeto_policy="/nowhere"))
    heavy = graph_of({"a": 1}, persistent_bytes={"a": 9})
    with pytest.raises(InfeasibleError, match="needs at least 9"):
        place("placeto", heavy, cluster_of(2, memory_bytes=5), trained)
