"""The traversal-order study (Wang, Payberah, Hagos and Vlassov, arXiv 2201.09676) made anew: what `baechi placeto study` does.

Placeto learns from nothing on each graph, in equally many episodes for each order and repeat; episodes begin at the best plan of those
before. Two controls get the same: a policy that learns nothing, and a local search with as many plans as the episodes have steps.
The folder `out` gets study.json, what is studied, and runs.csv, what was found; the same command goes on where it was interrupted.
"""

import math
import os
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from baechi_ext.errors import FileError, OptionError
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.ir.files import make_folder, read_json, write_json, write_text
from baechi_ext.ir.made_by import MadeBy, signed
from baechi_ext.ir.numbers import as_number
from baechi_ext.place.placeto.checkpoint import require_torch
from baechi_ext.place.placeto.decisions import Decisions
from baechi_ext.place.placeto.environment import Environment, Rules
from baechi_ext.place.placeto.policy import Policy, PolicyConfig
from baechi_ext.place.placeto.train import Trainer, TrainingConfig, TrainingProgress
from baechi_ext.place.placeto.training_task import TrainingTask
from baechi_ext.place.traversal import traversal
from baechi_runtime.host.parallel import each
from baechi_runtime.host.processor import processor
from baechi_runtime.placeto.graphs import Source
from baechi_runtime.placeto.plots import write_plots
from baechi_runtime.placeto.study_table import CONTROLS, LOCAL_SEARCH, RUNS, UNTRAINED, Point, Run, StudyTable, append, read_runs
from baechi_runtime.report.figure import require_matplotlib
from baechi_runtime.report.progress import progress

BATCH = 5
"""Episodes between two updates: as many as a baseline at each step needs, and few enough to learn often."""
LEARNING_RATE, ENTROPY = 1e-2, 0.0
"""The settings that learned most, of six, in 50 episodes on one graph of each family's train split, in the order topo."""
RULES = Rules(longest_path_first=False)
"""The published simulator runs ops as they become ready."""
FEWEST_GRAPHS = 2
CALIBRATION_EPISODES = 2 * BATCH
RESERVE = 0.9
"""The part of a budget that is planned for."""
Graphs = Mapping[str, Mapping[str, OpGraph]]
"""Source -> file -> graph."""


@dataclass(frozen=True, slots=True)
class StudySettings:
    """The settings of a study, which goes on only where they are the same."""

    sources: tuple[str, ...]
    split: str
    graphs: int
    """The number of graphs of each source: its first ones."""
    orders: tuple[str, ...]
    repeats: int
    episodes: int
    cluster: Cluster
    seed: int

    def to_json(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in ("split", "graphs", "repeats", "episodes", "seed")}
        return {"sources": list(self.sources), "orders": list(self.orders), "cluster": self.cluster.to_json(), **plain}


@dataclass(frozen=True, slots=True)
class StudyRequest:
    """A study and how it is run. With a budget the number of graphs is the most that is expected to fit."""

    settings: StudySettings
    folder: Path
    """Where the families are."""
    out: Path
    workers: int = 1
    budget_hours: float | None = None
    plot: bool = False
    command: tuple[str, ...] = ()
    """The command line, word by word."""


@dataclass(frozen=True, slots=True)
class Task:
    """A run and what it needs, as JSON has it: another process can take it."""

    run: Run
    graph: dict[str, Any]
    cluster: dict[str, Any]
    episodes: int
    seed: int

    @classmethod
    def of(cls, run: Run, graph: OpGraph, settings: StudySettings) -> "Task":
        return cls(run, graph.to_json(), settings.cluster.to_json(), settings.episodes, settings.seed)


def study(request: StudyRequest) -> StudyTable:
    """Makes the runs that are missing of a study; returns its table and writes it (study.md), with plots where they are asked for.

    Raises OptionError where the folder holds another study or the budget is too small, FileError for what can't be read or written,
    MissingBackendError without torch, or without matplotlib for plots. An interrupt loses the runs that are under way.
    """
    make_folder(request.out)
    require_torch()  # before anything is written, and where only other processes will use it: its version is to be said
    if request.plot:
        require_matplotlib(", or leave out --plot")
    graphs = {name: Source(name, request.folder, None).graphs(request.settings.split) for name in request.settings.sources}
    settings = _settled(request, graphs)
    _make_missing(settings, graphs, request)
    table = StudyTable(settings.to_json(), read_runs(request.out / RUNS, settings.episodes))
    made_by = MadeBy(request.command)
    write_text(request.out / "study.md", "\n".join([*table.lines(), "", f"`{made_by}`", ""]))
    if request.plot:
        write_plots(request.out, table, made_by)
    return table


def _make_missing(settings: StudySettings, graphs: Graphs, request: StudyRequest) -> None:
    path = request.out / RUNS
    done = read_runs(path, settings.episodes)
    tasks = [Task.of(run, graphs[run.source][run.graph], settings) for run in runs_of(settings, graphs) if run not in done]
    if not tasks:
        return
    begun_seconds = time.perf_counter()
    with progress(f"{in_words(settings)}; {len(tasks)} are to be made") as show, closing(each(search, tasks, request.workers)) as found:
        for i, (task, points) in enumerate(found, 1):
            append(path, task.run, points)
            left_seconds = (time.perf_counter() - begun_seconds) / i * (len(tasks) - i)
            show(f"{i} of {len(tasks)}, about {left_seconds / 60:.0f} min left")


def _settled(request: StudyRequest, graphs: Graphs) -> StudySettings:
    """The settings of the study that the folder holds, or of the one that begins there."""
    path = request.out / "study.json"
    settings = replace(request.settings, graphs=min(request.settings.graphs, *map(len, graphs.values())))
    if path.exists():
        there = read_json(path, "study")
        if request.budget_hours is not None:
            graphs_there = as_number(there.get("graphs"), f"{path}: graphs", FileError, minimum=1)
            settings = replace(settings, graphs=int(graphs_there))
        different = [name for name, value in settings.to_json().items() if value != there.get(name)]
        if different:
            raise OptionError(
                f"{str(request.out)!r} holds another study: {different[0]} is {there.get(different[0])!r} there, and here "
                f"{settings.to_json()[different[0]]!r}; choose another --out"
            )
        return settings
    if request.budget_hours is not None:
        settings = replace(settings, graphs=affordable(settings, graphs, request.budget_hours * 3600 * request.workers))
    machine = {"processor": processor(), "cores": os.cpu_count()}
    write_json(path, signed({"schema_version": 1, **settings.to_json(), "machine": machine}, MadeBy(request.command)))
    return settings


def affordable(settings: StudySettings, graphs: Graphs, seconds: float) -> int:
    """The number of graphs of each source, at most `settings.graphs`, with which a study takes so long on one core: one run is timed.

    Raises OptionError where it is less than FEWEST_GRAPHS.
    """
    decisions = {name: [len(Decisions.of(graph, settings.cluster)) for graph in some.values()] for name, some in graphs.items()}
    name, some = next(iter(graphs.items()))
    timed = Decisions.of(next(iter(some.values())), settings.cluster)
    with progress("timing a run"):
        learning(timed, BATCH, settings.seed, LEARNING_RATE)  # what is loaded and compiled once
        begun_seconds = time.perf_counter()
        learning(timed, CALIBRATION_EPISODES, settings.seed, LEARNING_RATE)
    step_seconds = (time.perf_counter() - begun_seconds) / (CALIBRATION_EPISODES * max(1, len(timed)))
    runs = settings.repeats * (len(settings.orders) + len(CONTROLS))

    def needed_seconds(count: int) -> float:
        return step_seconds * settings.episodes * runs * sum(sum(sizes[:count]) for sizes in decisions.values())

    count = max((n for n in range(settings.graphs + 1) if needed_seconds(n) <= RESERVE * seconds), default=0)
    if count < FEWEST_GRAPHS:
        raise OptionError(
            f"{FEWEST_GRAPHS} graphs of each source take about {needed_seconds(FEWEST_GRAPHS) / RESERVE / 3600:.2g} hours of one core, and "
            f"--budget and --workers leave {seconds / 3600:.2g}; give more, or fewer --episodes, --repeats or --orders"
        )
    return count


def runs_of(settings: StudySettings, graphs: Graphs) -> Iterator[Run]:
    """All runs of a study: repeat after repeat, and within each first one graph of each source, so that a part of a study is even."""
    files = {name: list(some)[: settings.graphs] for name, some in graphs.items()}
    for repeat, i, source, order in product(range(settings.repeats), range(settings.graphs), files, (*settings.orders, *CONTROLS)):
        yield Run(source, files[source][i], order, repeat)


def in_words(settings: StudySettings) -> str:
    """Says what a study is made of."""
    graphs = settings.graphs * len(settings.sources)
    runs = graphs * (len(settings.orders) + len(CONTROLS)) * settings.repeats
    return (
        f"studying {graphs} graphs ({settings.graphs} of each source), {len(settings.orders)} orders and {len(CONTROLS)} controls, "
        f"{settings.repeats} repeats of {settings.episodes} episodes on {len(settings.cluster)} devices: {runs} runs"
    )


def search(task: Task) -> list[Point]:
    """Makes one run. The same seed serves all orders of a graph and repeat: they begin with the same policy."""
    run, graph = task.run, OpGraph.from_json(task.graph)
    order = "topo" if run.order in CONTROLS else run.order
    seed = zlib.crc32(f"{task.seed} {run.source} {run.graph} {run.repeat}".encode(errors="backslashreplace")) % 2**20
    decisions = Decisions.of(graph, Cluster.from_json(task.cluster), traversal(graph, order, seed))
    if run.order == LOCAL_SEARCH:
        return local_search(decisions, task.episodes, seed)
    return learning(decisions, task.episodes, seed, 0.0 if run.order == UNTRAINED else LEARNING_RATE)


def learning(decisions: Decisions, episodes: int, seed: int, learning_rate: float) -> list[Point]:
    """Placeto on one graph, from nothing."""
    begun_seconds = time.process_time()
    training = TrainingTask(decisions, BATCH, RULES)
    environment = training.environment
    points = [_first_point(environment, begun_seconds)]

    def watch(now: TrainingProgress) -> None:
        best_us = next(iter(training.best.values()))[1]
        mean_us = float(environment.makespans_us.mean())
        points.append(Point(now.episodes, best_us, mean_us, environment.simulated, time.process_time() - begun_seconds))

    config = TrainingConfig(
        updates=math.ceil(episodes / BATCH),
        graphs=1,
        start="best",
        learning_rate=(learning_rate, learning_rate),
        entropy=(ENTROPY, ENTROPY),
        seed=seed,
    )
    Trainer(Policy.fresh(PolicyConfig(), seed), [training], config).run(watch)
    return points


def local_search(decisions: Decisions, episodes: int, seed: int) -> list[Point]:
    """See CONTROLS; a point as often as a policy learns."""
    begun_seconds = time.process_time()
    environment, draw = Environment(decisions, 1, RULES), np.random.default_rng(seed)
    points = [_first_point(environment, begun_seconds)]
    plan, cost, best_us = environment.devices.copy(), environment.costs[0], points[0].best_us
    for i in range(math.ceil(episodes / BATCH)):
        for _ in range(BATCH * len(decisions)):
            u = int(draw.integers(len(decisions)))
            before, plan[0, u] = plan[0, u], draw.integers(len(decisions.cluster))
            environment.reset(plan)
            if environment.costs[0] <= cost:
                cost, best_us = environment.costs[0], float(environment.makespans_us[0])
            else:
                plan[0, u] = before
        points.append(Point((i + 1) * BATCH, best_us, best_us, environment.simulated, time.process_time() - begun_seconds))
    return points


def _first_point(environment: Environment, begun_seconds: float) -> Point:
    """The point where all runs begin: everything on the fastest device."""
    decisions = environment.decisions
    environment.reset([(decisions.cluster.fastest,) * len(decisions)])
    step_us = float(environment.makespans_us[0])
    return Point(0, step_us, step_us, environment.simulated, time.process_time() - begun_seconds)
