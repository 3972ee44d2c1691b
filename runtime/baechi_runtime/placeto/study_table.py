"""Results of a study: its runs as a CSV file, a row for each point of their learning curves, those of one run written at once; steps under
each order with intervals, and whether the order makes a difference. Everything drawn is seeded.

A graph counts once: the mean of its repeats, of the logarithm of the step over the step where a run begins. Intervals are of bootstrapped
graphs. Tests permute within graphs: all orders, for whether the order makes any difference; the signs of the differences to one order,
for which ones differ from it, with p-values corrected for their number (Holm, Scandinavian Journal of Statistics 6, 1979).
"""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baechi_ext.errors import FileError
from baechi_ext.ir.files import append_csv, read_text
from baechi_runtime.report.findings import Findings
from baechi_runtime.report.printed import Studied, StudyRow

RUNS = "runs.csv"
"""The file in a study's folder."""
UNTRAINED, LOCAL_SEARCH = "untrained", "local_search"
CONTROLS = {
    UNTRAINED: "the same episodes in the order topo by a policy that learns nothing",
    LOCAL_SEARCH: "a random decision to a random device, kept where that is no worse; as many plans as the episodes have steps",
}
"""Controls that stand beside the orders in a study."""


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """One search on one graph: in an order, or a control. Repeats differ in what they draw."""

    source: str
    graph: str
    order: str
    repeat: int


@dataclass(frozen=True, slots=True)
class Point:
    """The state of a run after this many episodes; after none: where it begins, all on the fastest device."""

    episodes: int
    best_us: float
    """The least step until then."""
    mean_us: float
    """Mean step at the end of the last episodes."""
    simulated: int
    """Plans simulated until then."""
    seconds: float
    """Processor time."""


NAMES = (*(field.name for field in fields(Run)), *(field.name for field in fields(Point)))


def append(path: Path, run: Run, points: Iterable[Point]) -> None:
    """Adds a whole run to the file. Raises FileError where that is not possible."""
    append_csv(path, NAMES, [[*astuple(run), *(f"{x:.7g}" if isinstance(x, float) else x for x in astuple(point))] for point in points])


def read_runs(path: Path, episodes: int) -> dict[Run, Sequence[Point]]:
    """The runs that have come to this many episodes; an empty dict where there is no file. Raises FileError for another file."""
    if not path.exists():
        return {}
    found: dict[Run, list[Point]] = {}
    try:
        text = read_text(path, "runs")
        whole = text[: text.rfind("\n") + 1]  # the next row that is written replaces one that was cut off
        for row in csv.DictReader(io.StringIO(whole, newline="")):
            run = Run(row["source"], row["graph"], row["order"], int(row["repeat"]))
            steps = float(row["best_us"]), float(row["mean_us"])
            point = Point(int(row["episodes"]), *steps, int(row["simulated"]), float(row["seconds"]))
            if not all(map(math.isfinite, (*steps, point.seconds))):
                raise ValueError("a number that is not finite")
            if point.episodes == 0:
                found[run] = []  # of a run that was cut off while it was written, and made again, the second counts
            found[run].append(point)
    except (KeyError, TypeError, ValueError, csv.Error) as e:
        raise FileError(f"{str(path)!r} is not a file of runs ({e!r}); choose another --out, or delete the line") from e
    return {run: points for run, points in found.items() if points[-1].episodes >= episodes}


REFERENCE = "topo"
"""The order that others are compared with: the one that Placeto was published with."""
DRAWS = 10_000
NEAR = 0.01
ALL = "all"
"""The name of all sources together."""
Values = NDArray[np.float64]


@dataclass(frozen=True)
class StudyTable(Findings):
    """A study's runs and what follows from them."""

    settings: Mapping[str, Any]
    runs: Mapping[Run, Sequence[Point]]

    @property
    def orders(self) -> tuple[str, ...]:
        return tuple(self.settings["orders"])

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Those that have runs, and all of them together where there are several."""
        found = tuple(dict.fromkeys(run.source for run in self.runs))
        return found if len(found) == 1 else (*found, ALL)

    def of(self, source: str, order: str) -> dict[Run, Sequence[Point]]:
        """The runs of an order or control on a source."""
        return {run: points for run, points in self.runs.items() if run.order == order and source in (run.source, ALL)}

    def values(self, source: str, order: str) -> dict[tuple[str, str], float]:
        """Graph -> mean logarithm of the last step over the first."""
        by_graph: dict[tuple[str, str], list[float]] = {}
        for run, points in self.of(source, order).items():
            by_graph.setdefault((run.source, run.graph), []).append(math.log(points[-1].best_us / points[0].best_us))
        return {graph: sum(logs) / len(logs) for graph, logs in by_graph.items()}

    def matrix(self, source: str, orders: Sequence[str]) -> Values:
        """`values` of several orders by graph and order, of the graphs that have them all."""
        columns = [self.values(source, order) for order in orders]
        graphs = sorted(set.intersection(*map(set, columns))) if columns else []
        return np.array([[column[graph] for column in columns] for graph in graphs]).reshape(len(graphs), len(orders))

    @cached_property
    def rows(self) -> list[StudyRow]:
        """By source, the orders and then the controls."""
        return [row for source in self.sources for row in self._rows(source)]

    def _rows(self, source: str) -> Iterable[StudyRow]:
        differences = {}
        for order in (*self.orders, *CONTROLS):
            if order != REFERENCE and REFERENCE in self.orders:
                differences[order] = self.matrix(source, (order, REFERENCE)) @ (1, -1)
        p = holm({order: sign_flip_test(values) for order, values in differences.items() if len(values)})
        for order in (*self.orders, *CONTROLS):
            logs = np.array(list(self.values(source, order).values()))
            if len(logs):
                ratio, low, high = np.exp([logs.mean(), *bootstrapped(logs)]).tolist()
                runs = self.of(source, order).values()
                over = float(np.exp(differences[order].mean())) if order in p else None
                episodes = np.mean([near(points) for points in runs])
                seconds = np.mean([points[-1].seconds for points in runs])
                yield StudyRow(source, order, ratio, low, high, over, p.get(order), float(episodes), float(seconds))

    @cached_property
    def p_of_sources(self) -> dict[str, float]:
        """Source -> the p-value of all orders being worth the same."""
        found = {}
        for source in self.sources:
            matrix = self.matrix(source, self.orders)
            if matrix.shape[0] > 1 and matrix.shape[1] > 1:
                found[source] = permutation_test(matrix)
        return found

    def lines(self) -> list[str]:
        """Markdown."""
        settings, graphs = self.settings, len({(run.source, run.graph) for run in self.runs})
        found = [
            f"{graphs} graphs ({settings['split']} split), {settings['repeats']} repeats of {settings['episodes']} episodes, "
            f"{len(settings['cluster']['devices'])} devices. Step: at the end over at the beginning, which is all on one device; the "
            f"geometric mean of graphs with its 95% interval. Over {REFERENCE}: the ratio of steps, and the probability of one so far from "
            f"1 if they were alike, corrected for the number of comparisons. Near: episodes after which the best step was within "
            f"{NEAR:.0%} of the last one. Seconds: processor time of a run.",
            "",
            f"| source | order | step | 95% interval | over {REFERENCE} | p | near | seconds |",
            "|---|---|---|---|---|---|---|---|",
            *(_line(row) for row in self.rows),
            "",
        ]
        for source, p in self.p_of_sources.items():
            best = min((row for row in self.rows if row.source == source and row.order in self.orders), key=lambda row: row.ratio)
            verdict = "makes a difference" if p < 0.05 else "was not shown to make a difference"
            found.append(f"- {source}: the order {verdict} (p = {p:.4f}); the least steps are those of `{best.order}`.")
        return found

    def report(self) -> Studied:
        return Studied(settings=dict(self.settings), runs=len(self.runs), rows=self.rows, p=self.p_of_sources)


def _line(row: StudyRow) -> str:
    compared = ("-", "-") if row.over_reference is None or row.p is None else (f"{row.over_reference:.3f}", f"{row.p:.3f}")
    step = f"{row.ratio:.3f} | {row.low:.3f} to {row.high:.3f}"
    return f"| {row.source} | `{row.order}` | {step} | {' | '.join(compared)} | {row.episodes:.0f} | {row.seconds:.1f} |"


def near(points: Sequence[Point]) -> int:
    """The episodes after which the best step was within NEAR of the last one."""
    return next(point.episodes for point in points if point.best_us <= points[-1].best_us * (1 + NEAR))


def bootstrapped(values: Values) -> tuple[float, float]:
    """The 95% interval of the mean (percentiles of resampled means; Efron, The Annals of Statistics 7, 1979)."""
    draw = np.random.default_rng(0)
    means = values[draw.integers(len(values), size=(DRAWS, len(values)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def sign_flip_test(differences: Values) -> float:
    """The probability of a mean as far from 0 if each difference were as likely to have the other sign: all signs, or DRAWS of them."""
    n = len(differences)
    if 2**n <= DRAWS:
        signs = 1 - 2 * (np.arange(2**n)[:, None] >> np.arange(n) & 1)
        return float(_reached(signs @ differences, differences.sum()).mean())
    signs = 1 - 2 * np.random.default_rng(0).integers(2, size=(DRAWS, n))
    return float((_reached(signs @ differences, differences.sum()).sum() + 1) / (DRAWS + 1))


def permutation_test(matrix: Values) -> float:
    """The probability of column means that differ as much if the values of each row had come to its columns by lot: DRAWS of lots."""
    draw, rows = np.random.default_rng(0), np.tile(matrix, (DRAWS, 1, 1))
    spread = draw.permuted(rows, axis=2).mean(axis=1).var(axis=1)
    return float((_reached(spread, matrix.mean(axis=0).var()).sum() + 1) / (DRAWS + 1))


def _reached(values: Values, observed: float) -> NDArray[np.bool_]:
    """Marks the values that are as far from 0 as `observed`, or farther, rounding aside."""
    return np.abs(values) >= abs(observed) * (1 - 1e-9)


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """p-values corrected for their number: the least times it, the next times one less, and none below one before it."""
    found, least = {}, 0.0
    for i, name in enumerate(sorted(p, key=p.__getitem__)):
        least = max(least, min(1.0, (len(p) - i) * p[name]))
        found[name] = least
    return found
