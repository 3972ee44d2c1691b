"""Training on families and comparing on others of their graphs: what is written, gone on with, counted and refused."""

import csv
import json
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from baechi_ext.errors import FileError, MissingBackendError, OptionError, PolicyError
from baechi_ext.ir import Cluster, Link
from baechi_ext.ir.made_by import MadeBy
from baechi_ext.place.placeto.checkpoint import load_policy, save_policy
from baechi_ext.place.placeto.policy import Policy, PolicyConfig
from baechi_ext.place.placeto.train import TrainingConfig
from baechi_runtime.placeto.comparison import Comparison, ComparisonRequest, Row, compare, needs
from baechi_runtime.placeto.contenders import CONTENDERS, Contest, Entry, entry
from baechi_runtime.placeto.graphs import Source
from baechi_runtime.placeto.training import TrainingRequest, train
from tests.place.placeto.graphs import distinct, towers, write_family

CLUSTER = Cluster.uniform(2, link=Link(us_per_byte=0.5, latency_us=1.0))
NETWORK = PolicyConfig(width=4, rounds=2, hidden=8)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """A family of five graphs to train on, of which one is for exams, and two to test on."""
    write_family(tmp_path, "ptb", [distinct(8, seed) for seed in range(5)], [distinct(9, 7), towers()])
    return Source("ptb", tmp_path)


@pytest.fixture
def request_to_train(tmp_path: Path, source: Source) -> TrainingRequest:
    config = TrainingConfig(updates=6, graphs=2, exam_every=3)
    return TrainingRequest((source,), CLUSTER, tmp_path / "out" / "deep", config, network=NETWORK, episodes=2)


# Sources


def test_a_family_by_split_and_a_folder_whole(source: Source, tmp_path: Path) -> None:
    assert list(source.graphs("test")) == ["graph_05.json", "graph_06.json"]
    assert list(replace(source, most=3).graphs("train")) == ["graph_00.json", "graph_01.json", "graph_02.json"]
    towers(3).save(tmp_path / "three.json")
    folder = Source(str(tmp_path), tmp_path)
    assert (len(folder.graphs("test")["three.json"]), folder.title) == (12, tmp_path.name)


def test_what_is_no_source(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="'imagenet' is neither a family .cifar10, ptb, nmt. nor a folder; give one of them"):
        Source("imagenet", tmp_path).graphs("test")
    with pytest.raises(FileError, match="has no graph files"):
        Source(str(tmp_path), tmp_path).graphs("test")


# Training


def test_a_training(request_to_train: TrainingRequest) -> None:
    report = train(request_to_train)
    assert (report.updates, report.done, report.graphs, report.exam_graphs) == (6, True, 4, 1)
    policy = load_policy(report.file)
    assert policy.config == NETWORK
    said = json.loads(Path(report.file).read_text())["training"]
    assert (said["sources"], said["updates_made"], said["exam"]) == (["ptb"], 6, report.exam)
    rows = list(csv.DictReader((request_to_train.out / "progress.csv").read_text().splitlines()))
    assert [row["updates"] for row in rows] == list("123456")
    assert report.lines()[1].startswith("training  6 updates on 4 graphs; step over lower bound in exams on 1 others: ")


def test_a_training_goes_on(request_to_train: TrainingRequest) -> None:
    """Stopped at once, it has made an update or two; the same request then ends as one that was never stopped."""
    first = train(replace(request_to_train, time_limit_seconds=1e-9))
    assert (first.done, first.to_json()["exam"]) == (False, None)
    second = train(request_to_train)
    whole = train(replace(request_to_train, out=request_to_train.out.parent / "whole"))
    assert (second.exam, second.updates) == (whole.exam, 6)
    rows = list(csv.DictReader((request_to_train.out / "progress.csv").read_text().splitlines()))
    assert [row["updates"] for row in rows] == list("123456")
    assert [int(row["episodes"]) for row in rows] == [4 * i for i in range(1, 7)]
    seconds, best = ([float(row[name]) for row in rows] for name in ("seconds", "best"))
    assert seconds == sorted(seconds)
    alike = list(csv.DictReader((request_to_train.out.parent / "whole" / "progress.csv").read_text().splitlines()))
    assert best == [float(row["best"]) for row in alike]
    with pytest.raises(PolicyError, match="the training is another one"):
        train(replace(request_to_train, config=TrainingConfig(updates=7)))


def test_a_training_does_not_write_over_the_policy_it_begins_with(request_to_train: TrainingRequest) -> None:
    for name in ("policy.json", "policy", "policy.safetensors", "../deep/policy.json"):
        with pytest.raises(OptionError, match="is the file that the training writes to --out"):
            replace(request_to_train, policy=str(request_to_train.out / name))
    assert replace(request_to_train, policy=str(request_to_train.out / "other.json")).policy is not None


def test_the_lines_of_updates_that_a_killed_training_makes_again_are_removed(request_to_train: TrainingRequest) -> None:
    """It saves itself when it has exams: what it said of later updates it says again."""
    train(replace(request_to_train, time_limit_seconds=1e-9))
    path = request_to_train.out / "progress.csv"
    header, *made = path.read_text().splitlines(keepends=True)
    assert len(made) < 6
    again = [f"{len(made) + i}{',' * header.count(',')}\n" for i in (1, 2)]
    path.write_text("".join([header, *made, *again]))
    train(request_to_train)
    assert [row["updates"] for row in csv.DictReader(path.read_text().splitlines())] == list("123456")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("sources", r"it learns from other graphs, or .* \(sources, --folder, --most_graphs\); start anew, in another folder"),
        ("most", "it learns from other graphs"),
        ("folder", "it learns from other graphs"),
        ("cluster", "it is for other devices or links"),
        ("episodes", r"it runs another number of episodes at once \(--episodes\)"),
        ("policy", r"it began with another policy \(--policy\)"),
    ],
)
def test_a_training_from_something_else_does_not_go_on(
    request_to_train: TrainingRequest, tmp_path: Path, change: str, message: str
) -> None:
    (source,), begun = request_to_train.sources, replace(request_to_train, time_limit_seconds=1e-9)
    write_family(tmp_path, "nmt", [distinct(8, seed) for seed in range(4, 9)], [towers()])
    (tmp_path / "moved").mkdir()
    write_family(tmp_path / "moved", "ptb", [distinct(8, seed) for seed in range(1, 6)], [towers()])
    save_policy(tmp_path / "given", Policy.fresh(NETWORK, 5), {})
    others = {
        "sources": replace(begun, sources=(replace(source, name="nmt"),)),
        "most": replace(begun, sources=(replace(source, most=4),)),
        "folder": replace(begun, sources=(replace(source, folder=tmp_path / "moved"),)),
        "cluster": replace(begun, cluster=Cluster.uniform(3)),
        "episodes": replace(begun, episodes=3),
        "policy": replace(begun, policy=str(tmp_path / "given.json")),
    }
    train(begun)
    state = (begun.out / "training.json").read_bytes()
    with pytest.raises(PolicyError, match=f"the training is another one: {message}"):
        train(others[change])
    assert (begun.out / "training.json").read_bytes() == state
    older = json.loads(state)
    del older["learns"], older["state"]["episodes"]
    (begun.out / "training.json").write_text(json.dumps(older))
    train(others[change])  # nobody can tell


def test_the_same_graphs_in_another_folder_go_on(request_to_train: TrainingRequest, tmp_path: Path) -> None:
    (source,), first = request_to_train.sources, train(replace(request_to_train, time_limit_seconds=1e-9))
    (tmp_path / "ptb").rename(tmp_path / "graphs")
    (tmp_path / "moved").mkdir()
    (tmp_path / "graphs").rename(tmp_path / "moved" / "ptb")
    moved = replace(request_to_train, sources=(replace(source, folder=tmp_path / "moved"),))
    assert train(moved).updates == 6 > first.updates


def test_an_interrupted_training_keeps_what_it_has(request_to_train: TrainingRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("baechi_runtime.placeto.training.news", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(request_to_train)
    assert json.loads((request_to_train.out / "policy.json").read_text())["training"]["updates_made"] == 1
    monkeypatch.undo()
    assert train(request_to_train).done


def test_a_training_begins_with_a_policy(request_to_train: TrainingRequest, tmp_path: Path) -> None:
    save_policy(tmp_path / "given", Policy.fresh(replace(NETWORK, width=8), 5), {})
    report = train(replace(request_to_train, policy=str(tmp_path / "given.json")))
    assert load_policy(report.file).config.width == 8


def test_tensorboard_is_asked_for_where_it_is_missing(request_to_train: TrainingRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingBackendError, match="pip install 'baechi-ext"):
        train(replace(request_to_train, tensorboard=True))


# Comparison


@pytest.fixture
def request_to_compare(source: Source, tmp_path: Path) -> ComparisonRequest:
    save_policy(tmp_path / "given", Policy.fresh(NETWORK, 5), {})
    return ComparisonRequest((source,), CLUSTER, policy=str(tmp_path / "given.json"), evaluations=400, out=tmp_path / "found")


def test_every_contender_keeps_to_the_budget(request_to_compare: ComparisonRequest) -> None:
    found = compare(request_to_compare).comparisons[0]
    assert [set(row.entries) for row in found.rows] == [set(CONTENDERS)] * 2
    for row in found.rows:
        assert row.entries["expert"].startswith("the graph has no expert hints")
        plans = {name: e.evaluations for name, e in row.entries.items() if isinstance(e, Entry)}
        assert {name for name, count in plans.items() if count is None} - {"metis", "scotch"} == {"single", "m_etf", "m_sct"}
        assert all(0 < count <= 400 for count in plans.values() if count is not None)
        assert all(ratio >= 1 - 1e-9 for ratio in row.ratios.values())
    assert {name for name, ratio in found.rows[1].ratios.items() if ratio == pytest.approx(1.0)} >= {"rnn", "annealing", "random"}  # towers


def test_what_a_comparison_writes(request_to_compare: ComparisonRequest) -> None:
    report = compare(replace(request_to_compare, methods=("single", "m_etf", "expert")))
    written = json.loads((request_to_compare.out / "ptb.json").read_text())
    assert written == {**report.to_json()["comparisons"][0], **MadeBy().to_json()}
    assert (request_to_compare.out / "ptb.md").read_text().splitlines() == [*report.lines(), "", f"`{MadeBy()}`"]
    assert [len(written["distributions"][name]) for name in ("single", "m_etf", "expert")] == [2, 2, 0]
    assert written["graphs"][1]["methods"]["single"]["step_us"] == 80


def test_a_comparison_goes_on(request_to_compare: ComparisonRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries are made once, but those of the policy anew for another policy, and all anew for another budget."""
    made: list[str] = []

    def counted(name: str, contest: Contest) -> Entry | str:
        made.append(name)
        if len(made) == 3:
            raise KeyboardInterrupt
        return entry(name, contest)

    monkeypatch.setattr("baechi_runtime.placeto.comparison.entry", counted)
    request = replace(request_to_compare, methods=("zero_shot", "random"))
    with pytest.raises(KeyboardInterrupt):
        compare(request)
    found = compare(request)
    assert compare(request) == found
    assert made == ["zero_shot", "random", "zero_shot", "zero_shot", "random"]
    assert [list(row.entries) for row in found.comparisons[0].rows] == [["zero_shot", "random"]] * 2
    save_policy(request.policy, Policy.fresh(NETWORK, 6), {})
    again = compare(replace(request, methods=("random", "single", "zero_shot"))).comparisons[0]
    assert made[5:] == ["single", "zero_shot"] * 2
    assert again.rows[0].entries["random"] == found.comparisons[0].rows[0].entries["random"]
    compare(replace(request, evaluations=300))
    assert made[9:] == ["zero_shot", "random"] * 2


def test_a_comparison_keeps_what_other_methods_found_and_tries_again_what_had_no_plan(
    request_to_compare: ComparisonRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that was missing may be there by now; and a plot is drawn of what was all known."""
    request, missing = replace(request_to_compare, methods=("single", "metis")), ["no pymetis"]
    monkeypatch.setattr("baechi_runtime.placeto.comparison.entry", lambda name, c: missing[-1] if name == "metis" else entry(name, c))
    compare(request)
    found = compare(replace(request, methods=("m_etf",))).comparisons[0]
    assert [list(row.entries) for row in found.rows] == [["single", "metis", "m_etf"]] * 2
    assert {row.entries["metis"] for row in found.rows} == {"no pymetis"}
    written = json.loads((request.out / "ptb.json").read_text())
    assert set(written["summary"]) == {"single", "metis", "m_etf"}
    missing.append("not yet")
    again = compare(replace(request, plot=True)).comparisons[0]
    assert {row.entries["metis"] for row in again.rows} == {"not yet"}
    assert [row.entries["single"] for row in again.rows] == [row.entries["single"] for row in found.rows]
    (request.out / "ptb.svg").unlink()
    compare(replace(request, methods=("single",), plot=True))
    assert (request.out / "ptb.svg").exists()


@pytest.mark.parametrize("change", [{"graphs": None}, {"graphs": [{}]}, {"graphs": ["a"]}])
def test_a_damaged_comparison_is_named(request_to_compare: ComparisonRequest, change: dict) -> None:
    request = replace(request_to_compare, methods=("single",))
    compare(request)
    path = request.out / "ptb.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FileError, match="ptb.json' is not a comparison that placeto evaluate wrote .*; remove it, or choose another --out"):
        compare(request)


def test_a_plot_of_distributions(request_to_compare: ComparisonRequest) -> None:
    compare(replace(request_to_compare, methods=("single", "m_etf"), plot=True))
    text = (request_to_compare.out / "ptb.svg").read_text()
    assert text.lstrip().startswith("<?xml")
    assert all(name in text for name in ("single", "m_etf"))


def test_the_same_comparison_twice(request_to_compare: ComparisonRequest) -> None:
    rows = [compare(request_to_compare).comparisons[0].rows for _ in range(2)]
    assert [row.ratios for row in rows[0]] == [row.ratios for row in rows[1]]


def test_a_summary_by_hand() -> None:
    """Bounds of 10: a takes 12 and 10, b 10 and nothing, c 12 and 10.005, as good as 10."""
    request = ComparisonRequest((), CLUSTER, methods=("annealing", "rnn", "random"))
    first = Row("1", 3, 10.0, {"annealing": Entry(12, 50, 1.0), "rnn": Entry(10, None, 2.0), "random": Entry(12, 40, 0.5)})
    second = Row("2", 3, 10.0, {"annealing": Entry(10, 70, 3.0), "rnn": "no plan", "random": Entry(10.005, 40, 0.5)})
    found = Comparison("x", request, (first, second))
    assert list(found.summary()) == ["rnn", "annealing", "random"]
    assert [facts["wins"] for facts in found.summary().values()] == [1, 1, 1]
    annealing = {"graphs": 2, "mean_ratio": 1.1, "worst_ratio": 1.2, "wins": 1, "mean_evaluations": 60, "median_seconds": 2}
    assert found.summary()["annealing"] == annealing
    assert found.distribution("random") == pytest.approx([1.0005, 1.2])
    assert found.lines()[4] == "| rnn | 1 | 1.000 | 1.000 | 1 | - | 2.00 |"


def test_needs_by_hand() -> None:
    """The RNN placer ends with 100, near which `random` comes with its fourth plan, and near what m_etf found nobody does."""
    entries = {
        "rnn": Entry(95.0, 60, 1.0, ((1, 200.0), (30, 100.9), (50, 100.0))),
        "random": Entry(90.0, 40, 1.0, ((1, 200.0), (4, 101.0), (9, 99.8))),
        "zero_shot": Entry(150.0, 40, 1.0, ((1, 200.0), (8, 160.0))),
        "m_etf": Entry(80.0, None, 1.0),
        "expert": "no hints",
    }
    assert needs(entries) == {
        "rnn": {"own": 30, "rnn": 30, "m_etf": None},
        "random": {"own": 9, "rnn": 4, "m_etf": None},
        "zero_shot": {"own": 8, "rnn": None, "m_etf": None},
    }
    row = Row("1", 3, 10.0, entries)
    found = Comparison("x", ComparisonRequest((), CLUSTER, methods=tuple(entries)), (row, row)).lines()
    assert found[-1] == "| 1 | 3 | 0.01 | 8.000 | 9.000 | 9.500 | 15.000 | - |"
    assert found[-10:-7] == [
        "| rnn | 30 (2 of 2) | 30 (2 of 2) | - (0 of 2) |",
        "| random | 9 (2 of 2) | 4 (2 of 2) | - (0 of 2) |",
        "| zero_shot | 8 (2 of 2) | - (0 of 2) | - (0 of 2) |",
    ]
    assert row.to_json()["methods"]["random"]["plans_until_near"] == {"own": 9, "rnn": 4, "m_etf": None}


def test_goals_that_are_not_compared() -> None:
    entries = {"random": Entry(90.0, 40, 1.0, ((1, 200.0),)), "annealing": Entry(90.0, 40, 1.0)}
    assert needs(entries) == {"random": {"own": 1}}


def test_curves_are_of_the_search(request_to_compare: ComparisonRequest) -> None:
    """Steps fall, and all but the choice of an order, which can only help, is in them."""
    for row in compare(request_to_compare).comparisons[0].rows:
        assert {name for name, e in row.entries.items() if isinstance(e, Entry) and e.curve} == set(row.needs)
        assert set(row.needs) == {"zero_shot", "fine_tuned", "from_scratch", "rnn", "random"}
        for e in (row.entries[name] for name in row.needs):
            plans, steps = zip(*e.curve, strict=True)
            assert sorted(set(plans)) == list(plans)
            assert sorted(set(steps), reverse=True) == list(steps)
            assert plans[-1] <= e.evaluations
            assert e.step_us <= steps[-1] * (1 + 1e-9)


def test_what_no_comparison_is(request_to_compare: ComparisonRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="unknown method 'placeto' of a comparison; choose some of zero_shot, fine_tuned"):
        replace(request_to_compare, methods=("single", "placeto"))
    with pytest.raises(OptionError, match="add --out=FOLDER"):
        replace(request_to_compare, plot=True, out=None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingBackendError, match="leave out --plot"):
        compare(replace(request_to_compare, plot=True))


@pytest.mark.parametrize(
    ("name", "evaluations"),
    [("zero_shot", 17), ("random", 17), *product(("zero_shot", "fine_tuned", "from_scratch", "random"), (40, 67))],
)
def test_not_even_the_first_episodes_exceed_the_plans_allowed(name: str, evaluations: int) -> None:
    """An episode visits eight decisions twice, so four at once may simulate 68 plans."""
    contest = Contest(towers(), CLUSTER, Policy.fresh(replace(NETWORK, visits=2), 0), evaluations, 0)
    assert len(contest.training(1).decisions) == 8
    found = entry(name, contest)
    assert isinstance(found, Entry)
    assert 0 < found.evaluations <= evaluations


def test_too_few_plans_for_an_episode() -> None:
    few = Contest(towers(), CLUSTER, Policy.fresh(replace(NETWORK, visits=2), 0), 16, 0)
    message = "16 plans are too few for an episode of a policy, which may simulate 17; allow 17"
    assert entry("zero_shot", few) == message
    message = "16 plans are too few for 2 episodes of a policy, each of which may simulate 17; allow 34"
    assert [entry(name, few) for name in ("fine_tuned", "from_scratch")] == [message] * 2
    random = entry("random", replace(few, evaluations=10))
    assert isinstance(random, Entry)
    assert random.evaluations == 10


def test_a_contender_without_a_plan_says_why() -> None:
    contest = Contest(towers(), CLUSTER, Policy.fresh(NETWORK, 0), 8, 0)
    assert "too few for the RNN placer" in entry("rnn", contest)
    assert "no plan can exist" in entry("m_etf", replace(contest, cluster=Cluster.uniform(2, memory_bytes=1)))
