"""The traversal order `auto`: for each method a decision tree over features of the graph, two questions deep at most.

Features are numbers without units: small or large, sparse or dense, bound by transfers or by ops. The trees were fitted; where questions
did not help on graphs that had no part in it, a tree is one order. They are in order_rules.json, beside the command that fitted them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.files import read_json
from baechi_ext.ir.op_graph import OpGraph


@dataclass(frozen=True, slots=True)
class GraphFeatures:
    """The features of a graph on a cluster. An op's neighbours are the ops that it reads from and those that read from it."""

    ops: float
    mean_degree: float
    """Neighbours of an op."""
    max_degree: float
    transfer_over_op: float
    """The communication-to-computation ratio: the mean tensor's time on the mean link over the mean op's time."""
    grouped: float
    """The part of the ops that share a device with another."""

    @classmethod
    def of(cls, graph: OpGraph, cluster: Cluster) -> "GraphFeatures":
        """Takes time in proportion to ops and edges."""
        n = len(graph)
        degrees = [len({*graph.predecessors[v], *graph.successors[v]}) for v in range(n)]
        transfer_us = cluster.mean_link().transfer_us(sum(t.bytes for t in graph.tensors) / len(graph.tensors)) if graph.tensors else 0.0
        return cls(
            ops=n,
            mean_degree=sum(degrees) / max(1, n),
            max_degree=max(degrees, default=0),
            transfer_over_op=transfer_us / max(graph.total_compute_us() / max(1, n), 1e-9),
            grouped=sum(len(members) for members in graph.groups.values() if len(members) > 1) / max(1, n),
        )


AUTO = "auto"
HELP = "the one that a fitted rule recommends for the method and the graph; the output says which and why"
RULES = Path(__file__).parent / "order_rules.json"
Rule = Mapping[str, Any]
"""{"order": ...}, where it is not a fitted one with "why", or {"feature": ..., "at_most": ..., "then": a rule, "else": a rule}."""


class OrderChoice(NamedTuple):
    """An order, a key of TRAVERSALS, and a line that says why."""

    order: str
    reason: str


def choose_order(method: str, graph: OpGraph, cluster: Cluster) -> OrderChoice:
    """The order that a method of those that visit ops in one is recommended to visit the ops of this graph in."""
    rule = _rules()[method]
    order, answers = decide(rule, GraphFeatures.of(graph, cluster))
    why = ", ".join(answers) or rule.get("why", f"on average the best one for {method}")
    return OrderChoice(order, f"traversal order {order}: {why}")


def decide(rule: Rule, features: GraphFeatures) -> tuple[str, list[str]]:
    """The order that a rule comes to, and what the questions on the way there were answered."""
    answers = []
    while "order" not in rule:
        value, limit = getattr(features, rule["feature"]), rule["at_most"]
        below = value <= limit
        answers.append(f"{rule['feature'].replace('_', ' ')} {value:.4g} {'<=' if below else '>'} {limit:.4g}")
        rule = rule["then" if below else "else"]
    return rule["order"], answers


@cache
def _rules() -> dict[str, Rule]:
    rules: dict[str, Rule] = read_json(RULES, "order rules")["rules"]
    return rules
