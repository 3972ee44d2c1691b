"""Training: it solves toys whose optimum is known, the same each time, in one piece or in two."""

import csv
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from baechi_ext.errors import FileError, MissingBackendError, OptionError, PolicyError
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.place.placeto import train
from baechi_ext.place.placeto.checkpoint import read_pair, write_pair
from baechi_ext.place.placeto.environment import Environment, Rules
from baechi_ext.place.placeto.learning import LossWeights, advantages, loss, ppo, reinforce
from baechi_ext.place.placeto.policy import Policy, PolicyConfig
from baechi_ext.place.placeto.train import (
    KIND,
    Trainer,
    TrainingConfig,
    TrainingProgress,
    csv_log,
    examined,
    resume_training,
    save_training,
    tensorboard_log,
)
from baechi_ext.place.placeto.training_task import TrainingTask
from tests.build import cluster_of, graph_of
from tests.place.placeto.graphs import distinct, towers

SMALL = PolicyConfig(width=4, rounds=2, hidden=16)
SHORT = TrainingConfig(updates=4, graphs=2, exam_every=2, seed=3)


def training(graph: OpGraph, cluster: Cluster, batch: int = 4, **rules: object) -> TrainingTask:
    return TrainingTask.of(graph, cluster, batch, Rules(**rules))


def some_trainings() -> list[TrainingTask]:
    return [training(distinct(8, seed), cluster_of(2 + seed % 2, latency_us=1)) for seed in range(3)]


def trained(config: TrainingConfig = SHORT, trainings: list[TrainingTask] | None = None) -> Policy:
    exams = [training(distinct(6, 9), cluster_of(2), 1)]
    return Trainer(Policy.fresh(SMALL, config.seed), trainings or some_trainings(), config, exams).run()


def same(a: Policy, b: Policy) -> bool:
    return all(torch.equal(a.parameters[name], b.parameters[name]) for name in a.parameters)


# Advantages and losses


def test_advantages_by_hand() -> None:
    """Three episodes of two steps, worth 2, 4 and 0 and then 2, 2 and 0: first 0, 2 and -2, then 2/3, 2/3 and -4/3 above the mean.

    Before the second step they have gained 1, 3 and 0, which is -1/3, 5/3 and -4/3 more than the mean; of that (-2/9 + 10/9 + 16/9) /
    (1/9 + 25/9 + 16/9) = 4/7 was to be expected.
    """
    rewards = torch.tensor([[1.0, 3.0, 0.0], [2.0, 2.0, 0.0]])
    raw = torch.tensor([[0, 2, -2], [2 / 3 + 4 / 21, 2 / 3 - 20 / 21, -4 / 3 + 16 / 21]])
    torch.testing.assert_close(advantages(rewards, 0.5), raw / raw.std(correction=0))
    assert advantages(torch.ones(3, 4), 0.9).abs().max() == 0


def test_what_was_gained_before_is_no_merit() -> None:
    """All episodes end alike, whatever they gained first: then no later action is better than another."""
    found = advantages(torch.tensor([[0.0, 1.0, 3.0], [3.0, 2.0, 0.0]]), 1.0)
    assert found.abs().max() < 1e-3


def test_losses_by_hand() -> None:
    new, old, gain = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -2.0]), torch.tensor([2.0, 1.0])
    assert float(reinforce(new, old, gain, 0.2)) == pytest.approx(1.5)
    assert float(ppo(new, old, gain, 0.2)) == pytest.approx(-(2 + 1.2) / 2)
    assert float(ppo(new, old, -gain, 0.2)) == pytest.approx((2 + math.e) / 2)


def test_long_rollouts_are_learned_from_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy.fresh(SMALL, 0)
    one = some_trainings()[0]
    rollout = one.run(policy, torch.Generator().manual_seed(0))
    rows = []
    monkeypatch.setattr("baechi_ext.place.placeto.learning._MOST_NUMBERS", 100)
    monkeypatch.setattr(Policy, "logits", lambda self, graph, states, h: rows.append(len(states.current)) or states.features.sum(dim=-1))
    loss("ppo", policy, rollout, torch.zeros_like(rollout.rewards), LossWeights(0.0, 0.2), torch.Generator().manual_seed(0))
    assert rows == [100 // (len(one.decisions) * 2)]


# Toys


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce"])
def test_two_towers_go_to_two_devices(algorithm: str) -> None:
    """Two chains of 40 us that nothing connects; a transfer costs 6. The likeliest actions of the trained policy reach the optimum."""
    config = TrainingConfig(algorithm=algorithm, updates=60, graphs=1, learning_rate=(1e-2, 1e-3), entropy=(0.05, 0.001), discount=1.0)
    one = training(towers(), cluster_of(2, latency_us=5), 16)
    policy = Trainer(Policy.fresh(SMALL, 0), [one], config).run()
    one.run(policy, None)
    assert one.environment.makespans_us.tolist() == [40.0] * 16


def test_what_does_not_fit_moves_away() -> None:
    """Three ops in a row of 4 bytes each, devices of 8, dear transfers: only memory moves the last one."""
    names = "abc"
    graph = graph_of(dict.fromkeys(names, 10.0), ("a", "b", 1), ("b", "c", 1), persistent_bytes=dict.fromkeys(names, 4))
    one = training(graph, cluster_of(2, latency_us=5, memory_bytes=10), 16)
    config = TrainingConfig(updates=40, graphs=1, learning_rate=(1e-2, 1e-3), discount=1.0)
    one.run(Trainer(Policy.fresh(SMALL, 0), [one], config).run(), None)
    assert one.environment.makespans_us.tolist() == [36.0] * 16


def test_a_policy_of_two_devices_serves_four() -> None:
    """Trained with two towers on two devices, it spreads four over four better than two devices could."""
    config = TrainingConfig(updates=60, graphs=1, learning_rate=(1e-2, 1e-3), entropy=(0.05, 0.001), discount=1.0)
    policy = Trainer(Policy.fresh(SMALL, 0), [training(towers(), cluster_of(2, latency_us=5), 16)], config).run()
    four = training(towers(4), cluster_of(4, latency_us=5), 1)
    four.run(policy, None)
    assert four.environment.makespans_us[0] < 80


# The loop


def test_same_seed_same_policy() -> None:
    first, second, other = trained(), trained(), trained(replace(SHORT, seed=4))
    assert same(first, second)
    assert not same(first, other)


def test_threads_change_nothing() -> None:
    assert same(trained(), trained(replace(SHORT, workers=2)))


def test_resumed_as_if_never_interrupted(tmp_path: Path) -> None:
    whole = Trainer(Policy.fresh(SMALL, 3), some_trainings(), SHORT, [training(distinct(6, 9), cluster_of(2), 1)])
    expected = whole.run()
    halves = [Trainer(Policy.fresh(SMALL, 3), some_trainings(), SHORT, [training(distinct(6, 9), cluster_of(2), 1)]) for _ in range(2)]
    save_training(tmp_path / "none", halves[0])
    resume_training(tmp_path / "none", halves[0])

    def stop(progress: TrainingProgress) -> None:
        if progress.updates == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        halves[0].run(stop)
    save_training(tmp_path / "half", halves[0])
    resume_training(tmp_path / "half", halves[1])
    assert same(expected, halves[1].run())
    assert (whole.updates, whole.best_exam) == (halves[1].updates, halves[1].best_exam)


def interrupted_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> None:
    """Has the user interrupt a function's call of that number, the first is 1, once it has done its work."""
    calls, own = [], getattr(owner, name)

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(own(*args, **options))
        if len(calls) == call:
            raise KeyboardInterrupt
        return calls[-1]

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("start", ["single", "best"])
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [(torch.optim.Adam, "step", 8), (train, "examined", 1), (train, "examined", 2), (TrainingTask, "run", 6)],
)
def test_what_is_interrupted_within_an_update_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, start: str
) -> None:
    """Between the steps of an update's optimizer, in an exam, in an episode: policy and best plans are what they would have been."""

    def trainer() -> Trainer:
        exams = [training(distinct(6, 9), cluster_of(2), 1)]
        return Trainer(Policy.fresh(SMALL, 3), some_trainings(), replace(SHORT, updates=6, start=start), exams)

    whole = trainer()
    expected = whole.run()
    half, rest = trainer(), trainer()
    with monkeypatch.context() as patch:
        interrupted_at(patch, owner, name, call)
        with pytest.raises(KeyboardInterrupt):
            half.run()
    assert 0 < half.updates < 6
    before_seconds = half.seconds
    save_training(tmp_path / "half", half)
    resume_training(tmp_path / "half", rest)
    assert rest.updates == half.updates
    for goes_on in (rest, half):
        told: list[TrainingProgress] = []
        assert same(expected, goes_on.run(told.append))
        assert (whole.best_exam, whole.exam) == (goes_on.best_exam, goes_on.exam)
        assert [list(task.best.items()) for task in whole.trainings] == [list(task.best.items()) for task in goes_on.trainings]
        assert told[-1].episodes == sum(task.episodes for task in whole.trainings) == 6 * 2 * 4
        assert told[-1].seconds > before_seconds > 0


def test_trainings_of_older_versions_are_resumed(tmp_path: Path) -> None:
    """Those knew nothing of seconds, of episodes, and of the plans that these saw."""
    trainer = Trainer(Policy.fresh(SMALL, 3), some_trainings(), replace(SHORT, updates=2))
    trainer.run()
    save_training(tmp_path / "t", trainer)
    value, tensors = read_pair(tmp_path / "t", KIND)
    value["state"] = {name: value["state"][name] for name in ("updates", "exam", "best_exam", "exams_without_success")}
    write_pair(tmp_path / "t", value, {name: tensor for name, tensor in tensors.items() if not name.startswith("task.")})
    older = Trainer(Policy.fresh(SMALL, 3), some_trainings(), replace(SHORT, updates=2))
    resume_training(tmp_path / "t", older)
    assert same(older.policy, trainer.policy)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("plans", lambda plans: plans[:, 1:], r"its plans are of shapes .*, expected ones of \d+ decisions"),
        ("plans", lambda plans: plans + 7, r"one of its plans has device \d+ of 2"),
        ("worth", lambda worth: worth[0, 0], "can't be resumed"),
        ("worth", None, "KeyError"),
    ],
)
def test_a_training_with_plans_of_other_graphs_is_not_resumed(tmp_path: Path, name: str, change: Any, message: str) -> None:
    def trainer() -> Trainer:
        return Trainer(Policy.fresh(SMALL, 3), [training(towers(), cluster_of(2))], SHORT)

    ended = trainer()
    ended.run()
    save_training(tmp_path / "t", ended)
    value, tensors = read_pair(tmp_path / "t", KIND)
    tensor = tensors.pop(f"task.0.{name}")
    write_pair(tmp_path / "t", value, {**tensors, f"task.0.{name}": change(tensor)} if change else tensors)
    with pytest.raises(PolicyError, match=message):
        resume_training(tmp_path / "t", trainer())


def test_another_training_is_not_resumed(tmp_path: Path) -> None:
    save_training(tmp_path / "t", Trainer(Policy.fresh(SMALL, 0), some_trainings(), SHORT))
    other = Trainer(Policy.fresh(SMALL, 0), some_trainings(), replace(SHORT, discount=0.5))
    with pytest.raises(PolicyError, match=r"the training is another one: its config is .*'discount': 1.0.* start anew"):
        resume_training(tmp_path / "t", other)
    with pytest.raises(PolicyError, match="the training is another one: its policy is"):
        resume_training(tmp_path / "t", Trainer(Policy.fresh(replace(SMALL, width=8), 0), some_trainings(), SHORT))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"updates": "2"}, "updates is '2'; expected a number"),
        ({"updates": 1.5}, "updates is 1.5; expected a whole number"),
        ({"updates": None}, "updates is None; expected a whole number"),
        ({"exam": float("nan")}, "exam is nan; expected a finite number"),
        ({"updates": 2}, "adam"),
        ({"seconds": "long"}, "seconds is 'long'; expected a number"),
        ({"episodes": [4]}, "expected a number for each of 3 graphs"),
        ({"episodes": [4, 0.5, 4]}, "episodes is 0.5; expected a whole number"),
    ],
)
def test_a_damaged_training_is_not_resumed(tmp_path: Path, change: dict, message: str) -> None:
    save_training(tmp_path / "t", Trainer(Policy.fresh(SMALL, 0), some_trainings(), SHORT))
    path = tmp_path / "t.json"
    value = json.loads(path.read_text())
    path.write_text(json.dumps({**value, "state": {**value["state"], **change}}))
    with pytest.raises(PolicyError, match=f"the training can't be resumed .*{message}.*; start anew"):
        resume_training(path, Trainer(Policy.fresh(SMALL, 0), some_trainings(), SHORT))


def test_a_training_with_parameters_of_another_shape_is_not_resumed(tmp_path: Path) -> None:
    trainer = Trainer(Policy.fresh(SMALL, 0), some_trainings(), SHORT)
    save_training(tmp_path / "t", trainer)
    value, tensors = read_pair(tmp_path / "t", KIND)
    name = next(name for name, tensor in tensors.items() if tensor.numel() > 1)  # the file has them in any order
    write_pair(tmp_path / "t", value, {**tensors, name: tensors[name].reshape(-1)[:1]})
    with pytest.raises(PolicyError, match=r"is of shape \(1,\), expected"):
        resume_training(tmp_path / "t", trainer)


def test_exams_choose_the_policy_and_stop_early() -> None:
    """With a learning rate of 0 no exam is better than the first: training stops after two more."""
    exam = training(distinct(6, 9), cluster_of(2), 1)
    config = replace(SHORT, updates=100, learning_rate=(0.0, 0.0), exam_every=1, patience=2)
    start = Policy.fresh(SMALL, 3)
    trainer = Trainer(start, some_trainings(), config, [exam])
    policy = trainer.run()
    assert trainer.updates == 3
    assert same(policy, start)
    assert trainer.best_exam == examined(start, [exam])


def test_before_the_first_exam_the_policy_as_it_is_is_the_result() -> None:
    exam = training(distinct(6, 9), cluster_of(2), 1)
    trainer = Trainer(Policy.fresh(SMALL, 3), some_trainings(), replace(SHORT, updates=100, exam_every=25), [exam])
    result = trainer.run(evaluations=200)
    assert 0 < trainer.updates < 25
    assert same(result, trainer.policy)


def test_a_trained_policy_has_an_exam_first() -> None:
    """A policy that learned at a rate of 10 is kept only if it does better."""
    exam, start = training(towers(3), cluster_of(3, latency_us=5), 1), Policy.fresh(SMALL, 3)
    trainer = Trainer(start, some_trainings(), replace(SHORT, learning_rate=(10.0, 10.0)), [exam], trained=True)
    told: list[TrainingProgress] = []
    result = trainer.run(told.append)
    first = examined(start, [exam])
    assert told[0].exam == first
    assert examined(result, [exam]) == trainer.best_exam <= first


def test_one_episode_at_once_teaches_nothing() -> None:
    with pytest.raises(OptionError, match="episodes at once on each graph of a training are 1; expected at least 2"):
        Trainer(Policy.fresh(SMALL, 0), [training(towers(), cluster_of(2), 1)], SHORT)


def test_an_exam_is_step_over_bound() -> None:
    """Everything on one of two devices is 80 us; the bound is 40."""
    policy = Policy.fresh(SMALL, 0)
    for parameter in policy.parameters.values():
        parameter.zero_()
    assert examined(policy, [training(towers(), cluster_of(2), 1)]) == pytest.approx(2.0)


def test_progress_and_its_csv_file(tmp_path: Path) -> None:
    told: list[TrainingProgress] = []
    log = csv_log(tmp_path / "log.csv")
    trainer = Trainer(Policy.fresh(SMALL, 3), some_trainings(), SHORT, [training(distinct(6, 9), cluster_of(2), 1)])
    trainer.run(lambda progress: (told.append(progress), log(progress)))
    assert [p.updates for p in told] == [1, 2, 3, 4]
    assert [p.episodes for p in told] == [8, 16, 24, 32]
    assert [math.isinf(p.exam) for p in told] == [True, False, False, False]
    assert all(p.evaluations_per_second > 0 and 0 <= p.entropy <= math.log(3) + 0.1 for p in told)
    csv_log(tmp_path / "log.csv")
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [row["episodes"] for row in rows] == ["8", "16", "24", "32"]
    assert (rows[0]["exam"], float(rows[3]["best_exam"])) == ("", trainer.best_exam)
    csv_log(tmp_path / "log.csv", 2)
    assert [row["updates"] for row in csv.DictReader((tmp_path / "log.csv").read_text().splitlines())] == ["1", "2"]
    with pytest.raises(FileError, match="cannot write"):
        csv_log(tmp_path / "no" / "log.csv")


def test_scalars_for_tensorboard(tmp_path: Path) -> None:
    told: list[TrainingProgress] = []
    log = tensorboard_log(tmp_path)
    Trainer(Policy.fresh(SMALL, 3), some_trainings(), SHORT).run(lambda progress: (told.append(progress), log(progress)))
    written = EventAccumulator(str(tmp_path)).Reload()
    scalars = [(event.step, event.value) for event in written.Scalars("placeto/reward")]
    assert scalars == [(p.updates, pytest.approx(p.reward)) for p in told]


def test_tensorboard_is_asked_for_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingBackendError, match="pip install 'baechi-ext"):
        tensorboard_log(tmp_path)


def test_it_ends_with_the_budget() -> None:
    """No update begins that could simulate more plans than are left: two graphs, 4 episodes of 7 decisions and a start each."""
    trainer = Trainer(Policy.fresh(SMALL, 3), some_trainings(), replace(SHORT, updates=1000))
    used: list[int] = []
    trainer.run(lambda _: used.append(sum(one.environment.simulated for one in trainer.trainings)), evaluations=500)
    assert len(trainer.trainings[0].decisions) == 7
    assert 500 - 2 * 4 * 8 < used[-1] <= 500
    assert 2 < len(used) == trainer.updates < 1000


def test_progress_tells_of_the_best_plans() -> None:
    """One device takes 80 us, the bound is 40: the first plan of an episode is seen, too."""
    told: list[TrainingProgress] = []
    one = training(towers(), cluster_of(2, latency_us=5))
    Trainer(Policy.fresh(SMALL, 3), [one], SHORT).run(told.append)
    assert one.best_ratio == told[-1].best <= told[0].best <= 2
    assert training(towers(), cluster_of(2)).best_ratio == math.inf


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "best"}, "unknown algorithm 'best' of a training; choose one of reinforce, ppo"),
        ({"start": "here"}, "unknown start 'here' of a training; choose one of single, random, best"),
        ({"graphs": 0}, "graphs of a training is 0; expected at least 1"),
    ],
)
def test_what_is_no_training(changes: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        TrainingConfig(**changes)


def test_a_search_begins_where_it_was_best_and_keeps_to_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    one = training(towers(), cluster_of(2, latency_us=5), 4)
    begun = []
    reset = Environment.reset
    monkeypatch.setattr(Environment, "reset", lambda self, plans: begun.append(tuple(plans)) or reset(self, plans))
    best = []
    run = TrainingTask.run
    monkeypatch.setattr(TrainingTask, "run", lambda *a, **more: (run(*a, **more), best.append(next(iter(one.best)))))
    one.search(Policy.fresh(SMALL, 0), torch.Generator().manual_seed(0), 100, evaluations=150)
    assert begun == [one.single(), *best[:-1]]
    assert 150 - 4 * 9 < one.environment.simulated <= 150
    assert one.best_ratio == pytest.approx(1.0)


@pytest.mark.parametrize("start", ["random", "best"])
def test_other_starts(start: str) -> None:
    one = training(towers(), cluster_of(2, latency_us=5), 8)
    policy = Policy.fresh(SMALL, 0)
    first = one.run(policy, torch.Generator().manual_seed(0))
    second = one.run(policy, torch.Generator().manual_seed(0), start)
    assert not torch.equal(first.states.devices[:8], second.states.devices[:8])
    assert (second.states.devices[:8] == second.states.devices[0]).all() == (start == "best")
