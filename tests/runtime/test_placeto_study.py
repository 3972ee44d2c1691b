"""The study, for real but small: its runs are repeatable, equal in what they may use, and survive an interrupt."""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from baechi_ext.errors import FileError, MissingBackendError, OptionError
from baechi_ext.ir import OpGraph
from baechi_runtime.cli import main as cli
from baechi_runtime.host.parallel import each
from baechi_runtime.placeto import study as placeto_study
from baechi_runtime.placeto.study import BATCH, StudySettings, Task, affordable, runs_of, search
from baechi_runtime.placeto.study_table import CONTROLS, Point, Run, StudyTable, append, read_runs
from tests.build import cluster_of, graph_of
from tests.processes import children_of, ended
from tests.runtime.forked import start
from tests.runtime.workers import finish, only_error

SETTINGS = StudySettings(("small",), "train", 2, ("topo", "bfs"), 2, 2 * BATCH, cluster_of(3, latency_us=1), 0)


def a_graph(seed: int) -> OpGraph:
    """Three chains of four ops between one source and one end."""
    names = [f"{chain}{i}" for chain in "abc" for i in range(4)]
    edges = [("first", f"{chain}0", 1) for chain in "abc"] + [(f"{chain}3", "last", 1) for chain in "abc"]
    edges += [(f"{chain}{i}", f"{chain}{i + 1}", 1 + seed) for chain in "abc" for i in range(3)]
    return graph_of({"first": 1.0, **dict.fromkeys(names, 10.0 + seed), "last": 1.0}, *edges)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of three graph files."""
    (tmp_path / "graphs").mkdir()
    for seed in range(3):
        a_graph(seed).save(tmp_path / "graphs" / f"{seed}.json.gz")
    return tmp_path


def command(folder: Path, *more: str) -> list[str]:
    few = [f"--episodes={2 * BATCH}", "--repeats=1", "--orders=topo,bfs", "--most_graphs=2"]
    return ["placeto", "study", str(folder / "graphs"), f"--out={folder / 'out'}", *few, *more]


@pytest.mark.parametrize("order", ["topo", "bfs", *CONTROLS])
def test_a_run(order: str) -> None:
    """All begin at 122 us, on one device; none gets worse, and none simulates more plans than its episodes have steps (14 each)."""
    task = Task.of(Run("small", "0", order, 0), a_graph(0), SETTINGS)
    first, second = search(task), search(task)
    assert [replace(point, seconds=0) for point in first] == [replace(point, seconds=0) for point in second]
    assert [point.episodes for point in first] == [0, BATCH, 2 * BATCH]
    assert first[0].best_us == first[0].mean_us == 122.0
    assert first[0].best_us >= first[1].best_us >= first[2].best_us > 42.0
    assert first[2].best_us < 122.0
    assert first[2].simulated <= (1 + BATCH) + 2 * BATCH * (14 + 1)
    other = search(replace(task, run=replace(task.run, repeat=1)))
    assert [p.mean_us for p in other] != [p.mean_us for p in first]


def test_runs_in_other_processes_are_the_same() -> None:
    tasks = [Task.of(Run("small", "0", order, 0), a_graph(0), SETTINGS) for order in ("topo", "bfs", "alpha")]
    elsewhere = {task.run: points for task, points in each(search, tasks, 2)}
    for task in tasks:
        assert [replace(p, seconds=0) for p in elsewhere[task.run]] == [replace(p, seconds=0) for p in search(task)]


def test_local_search_finds_the_towers() -> None:
    """With enough plans each chain is on a device of its own: 1 + 40 + 1 and two transfers of 2 us."""
    settings = replace(SETTINGS, episodes=40 * BATCH)
    assert search(Task.of(Run("small", "0", "local_search", 0), a_graph(0), settings))[-1].best_us <= 62.0


def test_runs_are_mixed() -> None:
    graphs = {name: dict.fromkeys("xyz", a_graph(0)) for name in ("one", "two")}
    runs = list(runs_of(replace(SETTINGS, sources=("one", "two")), graphs))
    assert len(runs) == len(set(runs)) == 2 * 2 * 2 * (2 + len(CONTROLS))
    assert [(run.source, run.graph) for run in runs[:8]] == [("one", "x")] * 4 + [("two", "x")] * 4
    assert {run.repeat for run in runs[: len(runs) // 2]} == {0}


def test_a_study_from_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is made, goes on where a run is missing, and refuses to be mixed with another one."""
    assert cli.main(command(folder)) == 0
    table = (folder / "out" / "study.md").read_text().splitlines()[:-2]
    assert capsys.readouterr().out.splitlines()[:-1] == table
    source = str(folder / "graphs")
    runs = read_runs(folder / "out" / "runs.csv", 2 * BATCH)
    assert len(runs) == 2 * (2 + len(CONTROLS))
    assert {run.source for run in runs} == {source}
    lines = (folder / "out" / "runs.csv").read_text().splitlines(keepends=True)
    (folder / "out" / "runs.csv").write_text("".join(lines[:-4]))
    assert len(read_runs(folder / "out" / "runs.csv", 2 * BATCH)) == len(runs) - 2
    assert cli.main([*command(folder), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["runs"], value["settings"]["graphs"], len(value["rows"])) == (len(runs), 2, 2 + len(CONTROLS))
    again = read_runs(folder / "out" / "runs.csv", 2 * BATCH)
    assert {run: points[-1].best_us for run, points in again.items()} == {run: points[-1].best_us for run, points in runs.items()}
    assert cli.main([*command(folder), "--seed=1"]) == 2
    assert "holds another study: seed is 0 there, and here 1; choose another --out" in capsys.readouterr().err


def test_an_interrupted_study_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made: list[Run] = []

    def interrupted(task: Task) -> object:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(task.run)
        return search(task)

    monkeypatch.setattr(placeto_study, "search", interrupted)
    all_graphs = [word for word in command(folder) if "most_graphs" not in word]
    assert cli.main(all_graphs) == 130
    assert list(read_runs(folder / "out" / "runs.csv", 2 * BATCH)) == made
    monkeypatch.setattr(placeto_study, "search", lambda task: made.append(task.run) or search(task))
    assert cli.main(all_graphs) == 0
    assert len(made) == len(set(made)) == 3 * (2 + len(CONTROLS))


def test_ctrl_c_of_a_study_in_two_processes(folder: Path) -> None:
    """As from a terminal, which tells the workers, too: what is done is kept, nobody and nothing else stays, and the study goes on."""
    table = folder / "out" / "runs.csv"
    line = command(folder, "--workers=2", "--repeats=2")
    process = start(*line)
    while not finished(table):
        assert process.poll() is None
        time.sleep(0.01)
    family = children_of(process.pid)
    for pid in (process.pid, *family):
        os.kill(pid, signal.SIGINT)
    code, out, err = finish(process)
    assert (code, out, only_error(err)) == (130, "", "error: interrupted")
    assert len(family) == 3  # the workers, and what looks after their semaphores, which hears only later that they have ended
    assert ended(family)
    kept = table.read_text()
    assert 0 < len(read_runs(table, 2 * BATCH)) < 2 * 2 * (2 + len(CONTROLS))
    assert cli.main(command(folder, "--repeats=2")) == 0
    assert table.read_text().startswith(kept)
    assert len(read_runs(table, 2 * BATCH)) == 2 * 2 * (2 + len(CONTROLS))


def finished(table: Path) -> bool:
    """True if the table has a whole run, whatever is being written below."""
    with suppress(FileError):
        return bool(read_runs(table, 2 * BATCH))
    return False


def test_budgets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of ten episodes is said to take 14 times ten seconds, that is one a decision and episode: a graph takes 14 * 10 * 8 in all."""
    clock = iter(range(0, 10**6, 140))
    monkeypatch.setattr(placeto_study.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(placeto_study, "learning", lambda *_: [])
    graphs = {"small": {f"{seed}": a_graph(seed) for seed in range(5)}}
    a_graph_seconds = 14 * 10 * 8 / 0.9
    settings = replace(SETTINGS, graphs=5)
    assert [affordable(settings, graphs, n * a_graph_seconds + 1) for n in (2, 3, 5, 50)] == [2, 3, 5, 5]
    with pytest.raises(OptionError, match=r"2 graphs of each source take about 0.69 hours of one core, and .* leave 0.35; give more"):
        affordable(settings, graphs, a_graph_seconds + 1)


def test_a_budget_decides_and_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(placeto_study, "affordable", lambda *_: 2)
    budget = [word for word in command(folder, "--budget=0.5") if "most_graphs" not in word]
    assert cli.main(budget) == 0
    assert "2 graphs (train split)" in capsys.readouterr().out
    monkeypatch.setattr(placeto_study, "affordable", lambda *_: 3)
    assert cli.main([*budget, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["graphs"] == 2


@pytest.mark.parametrize("graphs", [None, "2", float("nan"), 0])
def test_a_damaged_study_is_named(folder: Path, graphs: object, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "out").mkdir(exist_ok=True)
    (folder / "out" / "study.json").write_text(json.dumps({"graphs": graphs}))
    assert cli.main([*(w for w in command(folder) if "most_graphs" not in w), "--budget=1"]) == 1
    assert "study.json: graphs is" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["best_us", "\x00", "topo,0,nan,1,1,1,1"])
def test_a_damaged_file_of_runs_is_named(tmp_path: Path, text: str) -> None:
    run = Run("ptb", "graph_00", "topo", 0)
    append(tmp_path / "runs.csv", run, [Point(0, 9.0, 9.5, 0, 0.0)])
    with (tmp_path / "runs.csv").open("a") as file:
        file.write(f"ptb,graph_00,{text}\n")
    with pytest.raises(FileError, match="is not a file of runs"):
        read_runs(tmp_path / "runs.csv", 0)


def test_plots(folder: Path) -> None:
    assert cli.main(command(folder, "--plot")) == 0
    for name in ("boxes", "curves", "improvement"):
        text = (folder / "out" / f"{name}.svg").read_text()
        assert text.lstrip().startswith("<?xml")
        assert "bfs" in text


def test_plots_without_matplotlib(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingBackendError, match=r"plots need matplotlib; pip install 'baechi-ext\[plots\]'"):
        placeto_study.study(placeto_study.StudyRequest(SETTINGS, folder, folder / "out", plot=True))


def test_a_table_is_a_report() -> None:
    assert StudyTable({**SETTINGS.to_json()}, {}).to_json()["runs"] == 0
