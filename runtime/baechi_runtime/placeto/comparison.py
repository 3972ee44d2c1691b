"""Placeto beside other methods on graphs it was not trained on, with equal numbers of simulated plans: `baechi placeto evaluate`.

It says, too, how many plans searches simulate until they are nearly as good as others, or as they ever get.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from baechi_ext.errors import FileError, OptionError
from baechi_ext.ir import Cluster
from baechi_ext.ir.files import make_folder, read_json, write_json, write_text
from baechi_ext.ir.made_by import MadeBy, signed
from baechi_ext.place.placeto.checkpoint import SHIPPED, load_policy, parameters_sha256
from baechi_ext.simulate import lower_bound_us
from baechi_runtime.placeto.contenders import CONTENDERS, WITH_POLICY, Contest, Entry, entry
from baechi_runtime.placeto.graphs import Source
from baechi_runtime.placeto.plots import save_distributions
from baechi_runtime.report.figure import require_matplotlib
from baechi_runtime.report.findings import Findings
from baechi_runtime.report.printed import Evaluated, SourceCompared
from baechi_runtime.report.progress import progress

NEAR = 0.01
"""A step that is longer by this part is near another."""
GOALS = {"own": "its own end", "rnn": "the RNN placer's end", "m_etf": "`m_etf`"}
"""Goals that searches are to come near to."""

Needs = dict[str, int | None]
"""By goal; None where the search does not come near it, and no key where nobody knows it."""


def needs(entries: Mapping[str, Entry | str]) -> dict[str, Needs]:
    """By method that searches plan by plan, how many plans it simulated until its best one was NEAR each goal.

    Ends are those of curves: before an order is chosen.
    """
    found = {name: e for name, e in entries.items() if isinstance(e, Entry)}
    ends = {name: e.curve[-1][1] if e.curve else e.step_us for name, e in found.items()}
    needed: dict[str, Needs] = {name: {} for name, e in found.items() if e.curve}
    for name, of in needed.items():
        for goal in GOALS:
            if (end_us := ends.get(name if goal == "own" else goal)) is not None:
                of[goal] = next((plans for plans, us in found[name].curve if us <= (1 + NEAR) * end_us), None)
    return needed


def _needed(needs: Sequence[Needs], goal: str) -> str:
    """The median of the graphs on which a method comes near a goal, and on how many that is."""
    known = [of[goal] for of in needs if goal in of]
    reached = [plans for plans in known if plans is not None]
    shown = f"{median(reached):.0f}" if reached else "-"
    return f"{shown} ({len(reached)} of {len(known)})" if known else "-"


def _markdown(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table with a line above; nothing without rows."""
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, *rows)]
    return [title, "", lines[0], "|---" * len(columns) + "|", *lines[1:], ""] if len(lines) > 1 else []


LEVEL = 1e-3
"""A step that is longer than the best by less than this part of it is as good."""


@dataclass(frozen=True, slots=True)
class ComparisonRequest:
    """Who is compared, on what, and where the numbers go."""

    sources: Sequence[Source]
    cluster: Cluster
    methods: tuple[str, ...] | None = None
    """Keys of CONTENDERS; None: all."""
    policy: str | None = None
    """A policy file; None: the one that comes with the package."""
    evaluations: int = 4000
    """Plans that each search may simulate for each graph."""
    seed: int = 0
    out: Path | None = None
    plot: bool = False
    command: tuple[str, ...] = ()
    """The command line, word by word."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.methods or () if name not in CONTENDERS]
        if unknown:
            raise OptionError(f"unknown method {unknown[0]!r} of a comparison; choose some of {', '.join(CONTENDERS)}")
        if self.plot and self.out is None:
            raise OptionError("--plot writes to --out, which is not given; add --out=FOLDER")


@dataclass(frozen=True, slots=True)
class Row:
    """One graph's results so far; a sentence where a method has no plan."""

    file: str
    ops: int
    lower_bound_us: float
    entries: dict[str, Entry | str]

    @property
    def ratios(self) -> dict[str, float]:
        """Step over lower bound, of the methods that have a plan."""
        return {name: e.step_us / max(self.lower_bound_us, 1e-9) for name, e in self.entries.items() if isinstance(e, Entry)}

    @property
    def winners(self) -> set[str]:
        best = min(self.ratios.values(), default=0.0)
        return {name for name, ratio in self.ratios.items() if ratio <= best * (1 + LEVEL)}

    @property
    def needs(self) -> dict[str, Needs]:
        """By method, how many plans it simulated until it came near what it found in the end, and what others found."""
        return needs(self.entries)

    def to_json(self) -> dict[str, Any]:
        entries: dict[str, dict[str, Any]] = {}
        for name, found in self.entries.items():
            entries[name] = found.to_json() if isinstance(found, Entry) else {"why_not": found}
        for name, plans in self.needs.items():
            entries[name]["plans_until_near"] = plans
        return {"file": self.file, "ops": self.ops, "lower_bound_us": self.lower_bound_us, "methods": entries}


@dataclass(frozen=True)
class Comparison(Findings):
    """All rows of one source."""

    title: str
    request: ComparisonRequest
    rows: tuple[Row, ...]
    policy_sha256: str = ""

    @property
    def asked(self) -> tuple[str, ...]:
        """The methods that are to be compared."""
        return self.request.methods or tuple(CONTENDERS)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that are asked for, and others that have results already."""
        known = {name for row in self.rows for name in row.entries}
        return (*self.asked, *(name for name in CONTENDERS if name in known.difference(self.asked)))

    def completed(self, i: int, method: str, found: Entry | str) -> "Comparison":
        """The comparison with one more entry, for graph i."""
        entries = {**self.rows[i].entries, method: found}
        row = replace(self.rows[i], entries={name: entries[name] for name in CONTENDERS if name in entries})
        return replace(self, rows=(*self.rows[:i], row, *self.rows[i + 1 :]))

    def distribution(self, method: str) -> list[float]:
        """Steps over lower bounds, sorted: with the share of graphs up to each, a distribution function."""
        return sorted(row.ratios[method] for row in self.rows if method in row.ratios)

    def summary(self) -> dict[str, dict[str, float | int | None]]:
        """By method, the least mean first; means are of the graphs for which it has a plan."""
        found = {}
        for method in self.methods:
            ratios = self.distribution(method)
            entries = [e for row in self.rows if isinstance(e := row.entries.get(method), Entry)]
            searched = [e.evaluations for e in entries if e.evaluations is not None]
            found[method] = {
                "graphs": len(ratios),
                "mean_ratio": _mean(ratios),
                "worst_ratio": max(ratios, default=None),
                "wins": sum(method in row.winners for row in self.rows),
                "mean_evaluations": _mean(searched),
                "median_seconds": median(e.seconds for e in entries) if entries else None,
            }
        return dict(sorted(found.items(), key=lambda item: item[1]["mean_ratio"] or float("inf")))

    def report(self) -> SourceCompared:
        request = self.request
        return SourceCompared(
            source=self.title,
            evaluations=request.evaluations,
            seed=request.seed,
            policy=request.policy or "default",
            policy_sha256=self.policy_sha256,
            cluster=request.cluster.to_json(),
            summary=self.summary(),
            distributions={method: self.distribution(method) for method in self.methods},
            graphs=[row.to_json() for row in self.rows],
        )

    def lines(self) -> list[str]:
        """Tables in Markdown: by method, of the plans that searches need, and graph by graph."""
        request, summary, needs = self.request, self.summary(), [row.needs for row in self.rows]
        forms = {"graphs": "d", "mean_ratio": ".3f", "worst_ratio": ".3f", "wins": "d", "mean_evaluations": ".0f", "median_seconds": ".2f"}
        searches = dict.fromkeys(method for of in needs for method in of)
        sizes = [(row.file.partition(".")[0], str(row.ops), f"{row.lower_bound_us / 1000:.3g}") for row in self.rows]
        ratios = [[_cell(row.ratios.get(method), ".3f") for method in summary] for row in self.rows]
        return [
            *_markdown(
                f"{self.title}: {len(self.rows)} graphs, {len(request.cluster)} devices, {request.evaluations} plans for each search",
                ("method", "graphs", "step / bound", "worst", "wins", "plans simulated", "seconds"),
                ((method, *(_cell(facts[name], form) for name, form in forms.items())) for method, facts in summary.items()),
            ),
            *_markdown(
                f"Plans simulated until within {NEAR:.0%} of ... (median, and on how many of the graphs; before an order is chosen):",
                ("method", *GOALS.values()),
                ((m, *(_needed([of[m] for of in needs if m in of], goal) for goal in GOALS)) for m in searches),
            ),
            *_markdown(
                "Step over lower bound, graph by graph:",
                ("graph", "ops", "lower bound, ms", *summary),
                ((*size, *found) for size, found in zip(sizes, ratios, strict=True)),
            ),
        ][:-1]


@dataclass(frozen=True, slots=True)
class ComparisonReport(Findings):
    """A comparison for each source."""

    comparisons: tuple[Comparison, ...]

    def report(self) -> Evaluated:
        return Evaluated(comparisons=[comparison.report() for comparison in self.comparisons])

    def lines(self) -> list[str]:
        return [line for comparison in self.comparisons for line in (*comparison.lines(), "")][:-1]


def compare(request: ComparisonRequest) -> ComparisonReport:
    """Runs every method on the test graphs of every source, and writes what it knows after each of them.

    What `out` has of the same budgets, seed, cluster and policy is not found anew, and stays where it is of other methods. A method without
    a plan for a graph is an entry, no error, and is tried again. Raises FileError, PolicyError or MissingBackendError where the policy
    can't be used, FileError or OptionError for wrong sources, MissingBackendError where a plot is asked for without matplotlib.
    """
    if request.plot:
        require_matplotlib(", or leave out --plot")
    if request.out is not None:
        make_folder(request.out)
    return ComparisonReport(tuple(_compared(request, source) for source in request.sources))


def _compared(request: ComparisonRequest, source: Source) -> Comparison:
    path = request.policy or SHIPPED
    policy, sha256 = load_policy(path), parameters_sha256(path)
    graphs = source.graphs("test")
    rows = tuple(Row(file, len(graph), float(lower_bound_us(graph, request.cluster)), {}) for file, graph in graphs.items())
    comparison = _with_known(Comparison(source.title, request, rows, sha256))
    with progress(f"comparing {len(comparison.asked)} methods on {len(graphs)} graphs of {source.title}") as show:
        for i, (file, graph) in enumerate(graphs.items()):
            contest = Contest(graph, request.cluster, policy, request.evaluations, request.seed)
            for method in comparison.asked:
                if method not in comparison.rows[i].entries:
                    show(f"{file}, {method}")
                    comparison = comparison.completed(i, method, entry(method, contest))
                    _write(comparison)
    _write(comparison)  # what was all known may have no table or plot yet
    return comparison


def _with_known(comparison: Comparison) -> Comparison:
    """With what the folder `out` has of the same comparison; of another policy, what has nothing to do with it."""
    folder = comparison.request.out
    path = None if folder is None else folder / f"{comparison.title}.json"
    if path is None or not path.exists():
        return comparison
    try:
        return _with_those_of(comparison, read_json(path, "comparison"))
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise FileError(f"{str(path)!r} is not a comparison that placeto evaluate wrote ({e!r}); remove it, or choose another --out") from e


def _with_those_of(comparison: Comparison, there: Mapping[str, Any]) -> Comparison:
    here = comparison.to_json()
    if any(there.get(name) != here[name] for name in ("evaluations", "seed", "cluster")):
        return comparison
    same_policy = there.get("policy_sha256") == comparison.policy_sha256
    found = {tuple(row[name] for name in ("file", "ops", "lower_bound_us")): row["methods"] for row in there["graphs"]}
    for i, row in enumerate(comparison.rows):
        for method, value in found.get((row.file, row.ops, row.lower_bound_us), {}).items():
            if method in CONTENDERS and (same_policy or method not in WITH_POLICY):
                if "why_not" not in value:
                    comparison = comparison.completed(i, method, Entry.from_json(value))
                elif method not in comparison.asked:  # otherwise it is tried again: a package may be there by now
                    comparison = comparison.completed(i, method, value["why_not"])
    return comparison


def _write(comparison: Comparison) -> None:
    folder, made_by = comparison.request.out, MadeBy(comparison.request.command)
    if folder is None:
        return
    write_json(folder / f"{comparison.title}.json", signed(comparison.to_json(), made_by), compact=True)
    write_text(folder / f"{comparison.title}.md", "\n".join([*comparison.lines(), "", f"`{made_by}`", ""]))
    if comparison.request.plot:
        curves = {method: comparison.distribution(method) for method in comparison.methods}
        save_distributions(folder / f"{comparison.title}.svg", comparison.title, curves, made_by)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
