"""The order `auto`: its rules are of a kind that a person can follow, and what they choose is used and explained."""

import json
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest

from baechi_ext import datasets
from baechi_ext.place.common import PlaceOptions
from baechi_ext.place.order_choice import RULES, GraphFeatures, Rule, choose_order, decide
from baechi_ext.place.registry import METHODS, place
from baechi_ext.place.traversal import TRAVERSALS
from tests.build import cluster_of, graph_of

SHIPPED: dict[str, Rule] = json.loads(RULES.read_text())["rules"]
CHAIN = graph_of({f"{v}": 1 for v in range(6)}, *((f"{v}", f"{v + 1}", 1) for v in range(5)))
TREE = {
    "feature": "max_degree",
    "at_most": 3.4,
    "then": {"order": "bfs"},
    "else": {"feature": "ops", "at_most": 6.0, "then": {"order": "dfs_preorder"}, "else": {"order": "alpha"}},
}


def paths(rule: Rule, asked: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """The features that are asked about on the way to each order, and the order."""
    if "order" in rule:
        yield asked, rule["order"]
    else:
        for side in ("then", "else"):
            yield from paths(rule[side], (*asked, rule["feature"]))


def test_every_method_that_visits_ops_has_a_rule() -> None:
    assert set(SHIPPED) == {name for name, method in METHODS.items() if method.ordered}


@pytest.mark.parametrize("method", SHIPPED)
def test_rules_ask_at_most_two_questions_about_features_and_end_at_orders(method: str) -> None:
    for asked, order in paths(SHIPPED[method]):
        assert len(asked) <= 2
        assert set(asked) <= {field.name for field in fields(GraphFeatures)}
        assert order in TRAVERSALS


@pytest.mark.parametrize(
    ("changes", "order", "answers"),
    [
        ({"max_degree": 3.4}, "bfs", ["max degree 3.4 <= 3.4"]),
        ({"max_degree": 12.0}, "dfs_preorder", ["max degree 12 > 3.4", "ops 6 <= 6"]),
        ({"max_degree": 4 / 3 * 3, "ops": 7}, "alpha", ["max degree 4 > 3.4", "ops 7 > 6"]),
    ],
)
def test_by_hand(changes: dict[str, float], order: str, answers: list[str]) -> None:
    features = replace(GraphFeatures.of(CHAIN, cluster_of(2)), **changes)
    assert decide(TREE, features) == (order, answers)


@pytest.mark.parametrize("method", ["contiguous", "m_topo", "m_topo_nonuniform", "round_robin", "random"])
def test_the_chosen_order_is_used_and_explained(method: str) -> None:
    graph, cluster = datasets.load("nmt", "test")[0], cluster_of(3, us_per_byte=0.0002, latency_us=100)
    choice = choose_order(method, graph, cluster)
    result = place(method, graph, cluster, PlaceOptions(traversal_order="auto"))
    same = place(method, graph, cluster, PlaceOptions(traversal_order=choice.order))
    assert result.plan.placement == same.plan.placement
    assert result.plan.options == same.plan.options
    assert result.notes == (choice.reason,)
    assert choice.reason.startswith(f"traversal order {choice.order}: ")


def test_no_order_no_note() -> None:
    assert place("m_topo", CHAIN, cluster_of(2)).notes == ()
