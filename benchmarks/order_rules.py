"""Fits the rules by which `--traversal_order=auto` chooses an order, and says what they are worth on graphs that were set aside.

    python -m benchmarks.order_rules --steps=FILE            measures what FILE has not yet, fits, says
    python -m benchmarks.order_rules --steps=FILE --ship     and writes the rules to where the package has them, beside those of others

Half of the graphs are of the families of baechi_ext.datasets, by their split; half are generated, of the shapes that methods are tuned on
and, to check the rules, of the three that are held out. Each stands on clusters drawn from its name.

For each method, its step under each order on each case is divided by the least of them, and logarithms
are taken: what a rule costs is their mean under the orders that it chooses. Rules are fitted to
train cases alone. How many questions a tree may ask is decided by cross-validation (10 folds, no graph in two of them): the fewest whose
cost is within one standard error of the least (Breiman et al., Classification and Regression Trees, 1984). `alpha` is measured, but not
recommended.
"""

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from baechi_ext import datasets
from baechi_ext.errors import InfeasibleError
from baechi_ext.ir import Cluster, Link, OpGraph
from baechi_ext.ir.files import read_json, write_bytes, write_json
from baechi_ext.place.common import PlaceOptions
from baechi_ext.place.order_choice import RULES, GraphFeatures, Rule, decide
from baechi_ext.place.registry import place
from baechi_ext.place.traversal import TRAVERSALS
from benchmarks.families import link_of_ratio, tightened
from benchmarks.runner import parsed
from benchmarks.shapes import FAMILIES

METHODS = ("contiguous", "m_topo", "m_topo_nonuniform", "round_robin")
NOT_FITTED: dict[str, Rule] = {
    "random": {"order": "topo", "why": "lots are as good in any order"},
    "placeto": {"order": "topo", "why": "the order that the policy of the package was trained in"},
}
"""Rules of methods of which nothing was measured."""
ORDERS = tuple(name for name in TRAVERSALS if name != "random")
RECOMMENDED = [i for i, name in enumerate(ORDERS) if name != "alpha"]
"""Places of the orders that a rule can come to: names alone say nothing of a graph."""
FOLDS = 10
MOST_QUESTIONS = 2
LEAF_SHARE = 0.05
"""A tree does not tell fewer of the cases apart."""
THRESHOLDS = 12
"""Tried of each feature, at quantiles."""
ROUNDING = 1e-9
FEATURES = tuple(field.name for field in fields(GraphFeatures))
DIGITS = 6
SHAPES = {"train": ("layered", "fork_join", "series_parallel", "random", "training"), "test": ("wavefront", "recurrent", "transformer")}
GENERATED = 48
"""Graphs of each split."""
FEWEST_OPS, MOST_OPS = 20, 400
BAECHIS_LINK = Link(us_per_byte=0.0001754, latency_us=134.0)


@dataclass(frozen=True)
class OrderCase:
    """A graph on a cluster, to fit rules to or to check them on."""

    split: str
    name: str
    """The graph's name; its cases share it."""
    number: int
    """The cluster's number."""
    graph: OpGraph
    cluster: Cluster


def order_cases(clusters: int) -> Iterator[OrderCase]:
    """Each graph of both splits on so many clusters; all kinds mixed, so that the first cases are a sample of all."""
    graphs = [(split, name, graph) for split in SHAPES for name, graph in (*_captured(split), *_generated(split))]
    for number in range(clusters):
        for split, name, graph in sorted(graphs, key=lambda entry: zlib.crc32(entry[1].encode())):
            yield OrderCase(split, name, number, graph, _cluster(graph, np.random.default_rng(zlib.crc32(f"{name} {number}".encode()))))


def _captured(split: str) -> Iterator[tuple[str, OpGraph]]:
    for family in datasets.FAMILIES:
        for graph in datasets.load(family, split):
            yield graph.name, graph


def _generated(split: str) -> Iterator[tuple[str, OpGraph]]:
    """Sizes are log-uniform."""
    shapes = SHAPES[split]
    for i in range(GENERATED):
        shape = shapes[i % len(shapes)]
        rng = np.random.default_rng(zlib.crc32(f"order {split} {i}".encode()))
        ops = round(np.exp(rng.uniform(np.log(FEWEST_OPS), np.log(MOST_OPS))))
        yield f"{split}_{shape}_{i}", FAMILIES[shape](ops, rng)


def _cluster(graph: OpGraph, rng: np.random.Generator) -> Cluster:
    """2 to 8 equal devices; in a quarter of the cases the link that `baechi place` takes where none is given, else transfers that take
    0.1 to 10 times as long as ops; in half of them memory that is tight."""
    count, own, ratio, tight = int(rng.choice([2, 3, 4, 8])), rng.random() < 0.25, 10 ** rng.uniform(-1, 1), rng.random() < 0.5
    cluster = Cluster.uniform(count, link=BAECHIS_LINK if own else link_of_ratio(graph, ratio))
    return tightened(graph, cluster) if tight else cluster


@dataclass(frozen=True)
class Sample:
    """The cases of one split that have a plan under every order: a row for each."""

    graphs: np.ndarray
    """The graph of a case, by number."""
    features: np.ndarray
    costs: np.ndarray
    """By ORDERS, the logarithm of the step over the least one."""

    @classmethod
    def of(cls, records: Sequence[dict[str, Any]], method: str, split: str) -> "Sample":
        whole = [r for r in records if (r["method"], r["split"]) == (method, split) and set(ORDERS) <= r["steps"].keys()]
        names = sorted({record["graph"] for record in whole})
        steps = np.log([[record["steps"][order] for order in ORDERS] for record in whole]).reshape(-1, len(ORDERS))
        return cls(
            np.array([names.index(record["graph"]) for record in whole]),
            np.array([[record["features"][name] for name in FEATURES] for record in whole]).reshape(-1, len(FEATURES)),
            steps - steps.min(axis=1, keepdims=True),
        )

    def __len__(self) -> int:
        return len(self.costs)

    def rows(self, chosen: np.ndarray) -> "Sample":
        return Sample(self.graphs[chosen], self.features[chosen], self.costs[chosen])

    def costs_of(self, rule: Rule) -> np.ndarray:
        """By case, of the order that a rule comes to."""
        chosen = [ORDERS.index(decide(rule, GraphFeatures(*row))[0]) for row in self.features.tolist()]
        return self.costs[np.arange(len(self)), chosen]


def measure(path: Path, methods: Sequence[str], cases: Iterable[OrderCase]) -> None:
    """Appends to `path` a line for each case and method that it has not yet: the graph, its features, and the step under each order that
    found a plan."""
    done = {(record["graph"], record["cluster"], record["method"]) for record in recorded(path)}
    with path.open("a", encoding="utf-8") as out:
        for case in cases:
            missing = [method for method in methods if (case.name, case.number, method) not in done]
            if missing:
                about = {"split": case.split, "graph": case.name, "cluster": case.number}
                about["features"] = asdict(GraphFeatures.of(case.graph, case.cluster))
            for method in missing:
                steps = {order: us for order in ORDERS if (us := _step_us(method, order, case)) is not None}
                out.write(json.dumps({**about, "method": method, "steps": steps}) + "\n")
                out.flush()


def recorded(path: Path) -> list[dict[str, Any]]:
    """The lines that `measure` has written."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _step_us(method: str, order: str, case: OrderCase) -> float | None:
    try:
        result = place(method, case.graph, case.cluster, PlaceOptions(traversal_order=order))
    except InfeasibleError:
        return None
    return float(f"{result.predicted_step_us:.{DIGITS}g}")


def fitted(sample: Sample) -> Rule:
    """The tree of as many questions as cross-validation supports."""
    found = [_mean_by_graph(sample, _costs_of_folds(sample, most)) for most in range(MOST_QUESTIONS + 1)]
    least, error = min(found)
    return _tree(sample, next(most for most, (mean, _) in enumerate(found) if mean <= least + error))[1]


def _costs_of_folds(sample: Sample, most: int) -> np.ndarray:
    """By case, what a tree costs that was fitted to other graphs."""
    found = np.zeros(len(sample))
    for fold in range(FOLDS):
        left_out = sample.graphs % FOLDS == fold
        if left_out.any():
            found[left_out] = sample.rows(left_out).costs_of(_tree(sample.rows(~left_out), most)[1])
    return found


def _tree(sample: Sample, most: int, fewest: int | None = None) -> tuple[float, Rule]:
    """The best tree with at most this many questions on a path, none of which leaves fewer cases than `fewest` on a side, and its cost."""
    fewest = max(1, round(LEAF_SHARE * len(sample))) if fewest is None else fewest
    best = _leaf(sample)
    if most == 0:
        return best
    quantiles = np.quantile(sample.features, np.linspace(0, 1, THRESHOLDS + 2)[1:-1], axis=0)
    for name, column, limits in zip(FEATURES, sample.features.T, quantiles.T, strict=True):
        limits = np.array(sorted({float(f"{limit:.3g}") for limit in limits}))
        below = column <= limits[:, None]
        counts = below.sum(axis=1)
        allowed = np.flatnonzero(np.minimum(counts, len(sample) - counts) >= fewest)
        if most == 1 and len(allowed):  # only the best of these is made: all others are many
            columns = sample.costs[:, RECOMMENDED]
            sums = below[allowed] @ columns
            costs = sums.min(axis=1) + (columns.sum(axis=0) - sums).min(axis=1)
            allowed = allowed[[costs.argmin()]] if costs.min() < best[0] - ROUNDING else ()
        for i in allowed:
            sides = below[i], ~below[i]
            (cost, then), (cost_else, otherwise) = (_tree(sample.rows(side), most - 1, fewest) for side in sides)
            if cost + cost_else < best[0] - ROUNDING:
                best = cost + cost_else, {"feature": name, "at_most": float(limits[i]), "then": then, "else": otherwise}
    return best


def _leaf(sample: Sample) -> tuple[float, Rule]:
    totals = sample.costs.sum(axis=0)
    best = min(RECOMMENDED, key=lambda i: totals[i])
    return float(totals[best]), {"order": ORDERS[best]}


def _mean_by_graph(sample: Sample, values: np.ndarray) -> tuple[float, float]:
    """The mean over graphs of a graph's mean, and its standard error."""
    _, number = np.unique(sample.graphs, return_inverse=True)
    means = np.bincount(number, values) / np.bincount(number)
    return float(means.mean()), float(means.std(ddof=1) / np.sqrt(len(means)))


HEAD = [
    "Steps on cases that no rule was fitted to, over the least step that any order gives in a case: geometric means.",
    "",
    "| method | rule | cases | under the rule | under the best order for train cases | ratio, 95% | under the best order in hindsight |",
    "|---|---|---|---|---|---|---|",
]


def report(method: str, rule: Rule, train: Sample, test: Sample) -> str:
    """A row of the table: geometric means of steps over the least step that any order gives, on test cases."""
    fixed = train.costs.sum(axis=0).argmin()
    hindsight = test.costs.sum(axis=0).argmin()
    mean, error = _mean_by_graph(test, test.costs_of(rule) - test.costs[:, fixed])
    low, high = np.exp([mean - 2 * error, mean + 2 * error])
    ruled = np.exp(_mean_by_graph(test, test.costs_of(rule))[0])
    best, after = (
        f"`{ORDERS[i]}` {np.exp(_mean_by_graph(test, test.costs[:, i])[0]):.3f}" for i in (fixed, hindsight)
    )
    over = f"{np.exp(mean):.3f} ({low:.3f} to {high:.3f})"
    return f"| `{method}` | {in_words(rule)} | {len(test)} | {ruled:.3f} | {best} | {over} | {after} |"


def in_words(rule: Rule) -> str:
    if "order" in rule:
        return f"`{rule['order']}`"
    then = in_words(rule["then"])
    then = then if "order" in rule["then"] else f"({then})"
    return f"{rule['feature'].replace('_', ' ')} <= {rule['at_most']:g}: {then}; else {in_words(rule['else'])}"


FLAGS = {
    "--steps": {"type": Path, "required": True},
    "--methods": {"default": ",".join(METHODS), "help": "default %(default)s; placeto is slow"},
    "--clusters": {"type": int, "default": 1, "help": "that each graph is placed on"},
    "--cases": {"type": int, "help": "the first so many, which are a sample of all (default all)"},
    "--out": {"type": Path, "help": "write the table to this file, too"},
    "--ship": {"action": "store_true"},
}


def main(argv: Sequence[str] | None = None) -> None:
    args = parsed(__doc__, FLAGS, argv)
    methods = args.methods.split(",")
    measure(args.steps, methods, islice(order_cases(args.clusters), args.cases))
    records = recorded(args.steps)
    samples = {method: [Sample.of(records, method, split) for split in datasets.SPLITS] for method in methods}
    rules = {method: fitted(train) for method, (train, _) in samples.items()}
    lines = [*HEAD, *(report(method, rules[method], *samples[method]) for method in rules)]
    print("\n".join(lines))
    if args.out is not None:
        write_bytes(args.out, ("\n".join(lines) + "\n").encode())
    if args.ship:
        ship(rules, [f"--{name}={value}" for name in ("methods", "clusters", "cases") if (value := getattr(args, name)) is not None])


def ship(rules: dict[str, Rule], flags: Sequence[str]) -> None:
    """Writes rules and the command that fitted them to where the package has them; those of other methods stay."""
    there = read_json(RULES, "order rules") if RULES.exists() else {"commands": {}, "rules": {}}
    command = " ".join(("python -m benchmarks.order_rules", *flags, "--ship"))
    found = {"commands": there["commands"] | dict.fromkeys(rules, command), "rules": NOT_FITTED | there["rules"] | rules}
    write_json(RULES, found)


if __name__ == "__main__":
    main()
