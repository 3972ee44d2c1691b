"""The training of the shipped policy: its problems, and a short training from the command line, gone on with."""

import json
from pathlib import Path

import pytest
import torch

from baechi_ext.datasets import FAMILIES
from baechi_ext.place.placeto.checkpoint import load_policy
from baechi_ext.place.placeto.environment import Rules
from benchmarks import placeto_policy
from benchmarks.placeto_policy import family_trainings, main, problem
from tests.place.placeto.graphs import distinct, write_family


def test_problems_are_the_same_each_time_and_of_all_kinds() -> None:
    assert problem(5)[0].fingerprint == problem(5)[0].fingerprint != problem(6)[0].fingerprint
    clusters = [problem(seed)[1] for seed in range(40)]
    assert {len(cluster) for cluster in clusters} >= {2, 3, 4, 8}
    limited = [cluster.devices[0].memory_bytes is not None for cluster in clusters]
    unequal = [len({d.speed for d in cluster.devices}) > 1 for cluster in clusters]
    assert all(0 < sum(some) < 20 for some in (limited, unequal))


def test_families_are_split_once_more_and_their_test_graphs_stay_unseen(tmp_path: Path) -> None:
    """One of a family's four graphs is for exams, and the others stand on two clusters each."""
    for family in FAMILIES:
        write_family(tmp_path, family, [distinct(8, seed) for seed in range(4)], [distinct(9, 4)])
    taught, exams = family_trainings(tmp_path, 2, Rules())
    assert (len(taught), len(exams)) == (3 * 3 * 2, 3)
    seen = [{training.decisions.graph.fingerprint for training in some} for some in (taught, exams)]
    assert seen == [{distinct(8, seed).fingerprint for seed in range(3)}, {distinct(8, 3).fingerprint}]
    assert taught[0].decisions.cluster != taught[1].decisions.cluster


def test_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TRAININGS": 2, "EXAMS": 1, "MOST_OPS": 21}.items():
        monkeypatch.setattr(placeto_policy, name, value)
    for family in FAMILIES:
        write_family(tmp_path, family, [distinct(8, seed) for seed in range(4)])
    command = [f"--out={tmp_path}", f"--folder={tmp_path}", "--updates=25", "--episodes=2", "--visits=2", "--entropy=0.1,0.01"]
    main(command)
    policy = load_policy(tmp_path / "policy")
    assert policy.config.visits == 2
    said = json.loads((tmp_path / "policy.json").read_text())["training"]
    assert said["entropy"] == [0.1, 0.01]
    options = f"--folder={tmp_path} --updates=25 --episodes=2 --visits=2 --entropy=0.1,0.01"
    assert said["command"] == f"python -m benchmarks.placeto_policy --out=FOLDER {options} --ship"
    assert len((tmp_path / "progress.csv").read_text().splitlines()) == 1 + 25
    main(command)
    again = load_policy(tmp_path / "policy")
    assert all(torch.equal(again.parameters[name], value) for name, value in policy.parameters.items())
