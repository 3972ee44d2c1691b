"""Fitting rules for orders: a planted rule is found, where there is none none is made up, and cases are measured for real."""

import json
from pathlib import Path

import numpy as np
import pytest

from baechi_ext.place.order_choice import RULES
from benchmarks import order_rules
from benchmarks.order_rules import FEATURES, HEAD, ORDERS, Sample, fitted, in_words, measure, order_cases, recorded, report

OPS, GROUPED = FEATURES.index("ops"), FEATURES.index("grouped")


@pytest.fixture(autouse=True)
def few_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a quarter, half and three quarters: quick."""
    monkeypatch.setattr(order_rules, "THRESHOLDS", 3)


def sample(penalties: np.ndarray, features: np.ndarray, noise: float = 0.05, seed: int = 0) -> Sample:
    """Two cases for each of half as many graphs; the order of no penalty is the best but for noise."""
    costs = np.abs(np.random.default_rng(seed).normal(0, noise, penalties.shape)) + penalties
    return Sample(np.arange(len(features)) // 2, features, costs - costs.min(axis=1, keepdims=True))


def random_features(seed: int, cases: int = 120) -> np.ndarray:
    return np.random.default_rng(seed).uniform(1, 100, size=(cases, len(FEATURES)))


def penalties_of(best: list[str]) -> np.ndarray:
    found = np.full((len(best), len(ORDERS)), 0.3)
    for row, order in enumerate(best):
        found[row, ORDERS.index(order)] = 0.0
    return found


def planted(seed: int) -> Sample:
    """bfs for at most 50 ops, else dfs_preorder where at most 25 are grouped and topo for more."""
    features = random_features(seed)
    rows = features[:, [OPS, GROUPED]].tolist()
    best = ["bfs" if ops <= 50 else "dfs_preorder" if grouped <= 25 else "topo" for ops, grouped in rows]
    return sample(penalties_of(best), features, seed=seed)


def test_a_planted_rule_is_found() -> None:
    """On cases that it was not fitted to it costs a quarter of what the best order for all does."""
    rule = fitted(planted(2))
    assert all(question in in_words(rule) for question in ("ops <= ", "grouped <= "))
    other = planted(1)
    assert other.costs_of(rule).mean() < other.costs.mean(axis=0).min() / 4


def test_noise_is_mostly_no_rule() -> None:
    """Where all orders are alike, a tree seems better by a standard error now and then."""
    features = [random_features(seed) for seed in range(6)]
    rules = [fitted(sample(np.zeros((len(x), len(ORDERS))), x, seed=seed)) for seed, x in enumerate(features)]
    assert sum("order" in rule for rule in rules) > 3


def test_one_order_for_all() -> None:
    features = random_features(3)
    assert fitted(sample(penalties_of(["reversed_bfs"] * len(features)), features)) == {"order": "reversed_bfs"}


def test_names_are_not_recommended() -> None:
    features = random_features(4)
    penalties = penalties_of(["alpha"] * len(features))
    penalties[:, ORDERS.index("lexico_topo")] = 0.1
    assert fitted(sample(penalties, features)) == {"order": "lexico_topo"}


def test_a_row_of_the_table() -> None:
    train, test = planted(0), planted(1)
    row = report("m_topo", fitted(train), train, test)
    assert row.count("|") == HEAD[-1].count("|")
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[0] == "`m_topo`"
    assert "ops <= " in cells[1]
    assert cells[2] == "120"
    assert 0.8 < float(cells[5].split()[0]) < 0.95
    tree = {"feature": "mean_degree", "at_most": 3.25, "then": {"order": "topo"}, "else": {"order": "bfs"}}
    assert in_words({**tree, "then": tree}) == "mean degree <= 3.25: (mean degree <= 3.25: `topo`; else `bfs`); else `bfs`"


def test_cases_are_the_same_each_time_and_of_both_splits() -> None:
    first = [next(cases) for cases in [order_cases(1)] for _ in range(12)]
    again = [next(cases) for cases in [order_cases(1)] for _ in range(12)]
    assert [(c.name, c.graph.fingerprint, c.cluster) for c in first] == [(c.name, c.graph.fingerprint, c.cluster) for c in again]
    assert {case.split for case in first} == {"train", "test"}


def test_from_measuring_to_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight small cases, of which some were measured before; the rules are written where they are asked for."""
    cases = sorted((case for case in order_cases(1) if len(case.graph) <= 60), key=lambda case: len(case.graph))[:8]
    monkeypatch.setattr(order_rules, "order_cases", lambda clusters: iter(cases))
    monkeypatch.setattr(order_rules, "RULES", tmp_path / "rules.json")
    measure(tmp_path / "steps", ["m_topo"], cases[:3])
    assert len(recorded(tmp_path / "steps")) == 3
    line = [f"--steps={tmp_path / 'steps'}", "--cases=8", "--ship", f"--out={tmp_path / 'table.md'}"]
    order_rules.main([*line, "--methods=m_topo"])
    assert len(recorded(tmp_path / "steps")) == 8
    capsys.readouterr()
    order_rules.main([*line, "--methods=round_robin"])
    records = recorded(tmp_path / "steps")
    assert [record["method"] for record in records] == ["m_topo"] * 8 + ["round_robin"] * 8
    assert all(set(ORDERS) == record["steps"].keys() for record in records)
    found = json.loads((tmp_path / "rules.json").read_text())
    assert found["rules"].keys() == {"m_topo", "round_robin", "random", "placeto"}
    command = "python -m benchmarks.order_rules --methods={} --clusters=1 --cases=8 --ship"
    assert found["commands"] == {name: command.format(name) for name in ("m_topo", "round_robin")}
    assert capsys.readouterr().out == (tmp_path / "table.md").read_text()
    shipped = json.loads(RULES.read_text())
    assert shipped["rules"].keys() - shipped["commands"].keys() <= order_rules.NOT_FITTED.keys()
    assert all(command.startswith("python -m benchmarks.order_rules ") for command in shipped["commands"].values())
