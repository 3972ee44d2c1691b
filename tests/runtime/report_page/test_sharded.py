"""The page and the plot of a sharded run: real worker processes, and a real browser."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from baechi_ext.errors import BaechiError, FileError, PlanError
from baechi_ext.shard.plan import ShardPlan
from baechi_runtime.report.page.sharded import sharded_data, sharded_headline
from baechi_runtime.report.page.writing import write_page
from baechi_runtime.report.run_plots import write_plots
from baechi_runtime.report.sharded_summary import ShardedRun
from baechi_runtime.report.tables import share_of
from baechi_runtime.report.trace import write_trace
from tests.docs.report_schema import require_reported
from tests.runtime.forked_workers import ForkedWorkers
from tests.runtime.report_page.pages import Page, needs_browser
from tests.runtime.report_page.runs import ENDING, HOSTILE

MODEL = ["--model_name=rnnlm", "--batch_size=4", "--vocab_size=64", "--rnn_units=16", "--max_seq_length=8", "--rnn_chunk=4"]
NAMES = ["not split", "pase", "data_parallel", "ddp"]
SECTIONS = ["strategies", "parts", "layers", "messages", "memory"]
browser_marks = needs_browser()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, workers: ForkedWorkers) -> Path:
    """The folder of a run of three strategies."""
    out = tmp_path_factory.mktemp("runs") / "sharded"
    flags = ["--workers=process", "--sharding=pase,data_parallel,ddp", "--num_steps=2", f"--out={out}"]
    workers.run("baechi_on_processes", 2, "train", *MODEL, *flags)
    return out


@pytest.fixture(scope="module")
def hostile(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with names that look like HTML."""
    copy = tmp_path_factory.mktemp("runs") / "hostile"
    shutil.copytree(folder, copy)
    report = json.loads((copy / "report.json").read_text())
    report["model"], report["strategies"][2]["name"], report["strategies"][1]["note"] = f"model {HOSTILE}", HOSTILE, ENDING
    (copy / "report.json").write_text(json.dumps(report))
    for name in ("shard_plan.json", "shard_plan_pase.json"):
        plan = json.loads((copy / name).read_text())
        costliest = max(plan["shard"], key=lambda layer: sum(plan["shard"][layer]["costs_us"].values()))
        plan["shard"] = {ENDING if layer == costliest else layer: value for layer, value in plan["shard"].items()}
        (copy / name).write_text(json.dumps(plan))
    return write_page(str(copy), None)


def test_what_is_shown_is_what_the_files_say(folder: Path) -> None:
    report = json.loads((folder / "report.json").read_text())
    require_reported(report)
    data = sharded_data(ShardedRun.load(folder))
    assert [s["name"] for s in data["strategies"]] == NAMES
    for shown, summary in zip(data["strategies"], [report["whole"], *report["strategies"]], strict=True):
        assert (shown["predicted_us"], shown["samples_us"]) == (summary["predicted_step_us"], summary["measured_step_us"]["samples"])
        assert sum(shown["parts_us"]) == pytest.approx(summary["predicted_step_us"], abs=0.01)
        assert len(shown["held"]) == 2
    assert [plan["name"] for plan in data["plans"]] == ["pase", "data_parallel"]
    plan = json.loads((folder / "shard_plan.json").read_text())
    assert (plan["command"], plan["versions"]) == (report["command"], report["versions"])
    for plan, name in zip(data["plans"], ("shard_plan.json", "shard_plan_data_parallel.json"), strict=True):
        written = ShardPlan.load(folder / name)
        assert [layer["name"] for layer in plan["layers"]] == list(written.shard)
        assert sum(sum(layer["costs_us"]) for layer in plan["layers"]) == pytest.approx(written.predicted_step_us, rel=1e-3)
    headline = sharded_headline(ShardedRun.load(folder))
    assert "fewer than 7 steps were measured" in headline["verdict"]["text"]
    assert "--sharding=pase,data_parallel,ddp" in headline["command"]
    assert headline["lead"] == "each layer split over 2 devices: pase, data_parallel; the batch split over 2 devices: ddp"
    kinds = [kind["name"] for kind in data["kinds"]]
    pase, step_us = data["strategies"][1], report["strategies"][0]["predicted_step_us"]
    for kind in ("compute", "executor", "update"):
        part_us = pase["parts_us"][kinds.index(kind)]  # that of the executor is what measured calls leave of a whole step, if anything
        assert (f"{share_of(part_us, step_us)} {kind}" in headline["verdict"]["text"]) == (part_us > 0)
    assert f"torch {torch.__version__}" in dict(headline["facts"])["versions"]


def test_the_runs_own_plan_comes_first_whatever_the_order_of_strategies(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "run")
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    report["strategies"][:2] = reversed(report["strategies"][:2])
    (tmp_path / "run" / "report.json").write_text(json.dumps(report))
    for name in ("shard_plan.json", "shard_plan_pase.json"):  # by the costs that were measured, the best plan may be data parallelism
        plan = json.loads((tmp_path / "run" / name).read_text())
        (tmp_path / "run" / name).write_text(json.dumps({**plan, "cost_flop": plan["cost_flop"] + 1}))
    run = ShardedRun.load(tmp_path / "run")
    assert list(run.plans) == ["pase", "data_parallel"]
    pase, data_parallel = (ShardPlan.load(tmp_path / "run" / f"shard_plan_{name}.json") for name in ("pase", "data_parallel"))
    assert run.plan == pase != data_parallel
    assert sharded_headline(run)["verdict"] == sharded_headline(ShardedRun.load(folder))["verdict"]


def test_steps_that_were_predicted_in_the_wrong_order_are_shown(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "run")
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    (tmp_path / "run" / "report.json").write_text(json.dumps({**report, "kendall_tau": -1 / 3}))
    assert dict(sharded_headline(ShardedRun.load(tmp_path / "run"))["facts"])["ranking"].endswith("-0.33")


def test_a_training_has_the_doubts_it_has_and_no_comparison(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "run")
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    for doubts, text in ((["a reason"], "a reason. Run it again on a quiet machine. The"), ([], "is not known. The")):
        unpaired = [{**strategy, "ratio": None} for strategy in report["strategies"]]
        (tmp_path / "run" / "report.json").write_text(json.dumps({**report, "strategies": unpaired, "doubts": doubts}))
        assert text in sharded_headline(ShardedRun.load(tmp_path / "run"))["verdict"]["text"]


def test_predicted_messages_are_those_that_are_counted(folder: Path) -> None:
    report = json.loads((folder / "report.json").read_text())
    for strategy in report["strategies"][:2]:
        assert strategy["sent"]["predicted"] == strategy["sent"]["counted"]
    assert report["strategies"][1]["sent"]["counted"]["allreduce"]["bytes"] > 0
    assert report["strategies"][2]["sent"]["predicted"] is None


def test_each_process_holds_its_part_of_the_weights(folder: Path) -> None:
    whole, _, parallel, ddp = ShardedRun.load(folder).strategies
    words = 64 * 16 * 2 + 64 + 2 * (16 + 16 + 1) * 4 * 16
    for strategy in (whole, parallel, ddp):
        assert [held.gradients for held in strategy.held_bytes] == [4 * words] * 2
    assert all(held.weights == 4 * words for held in whole.held_bytes)
    assert all(0 < parallel.held_bytes[d].kept < whole.held_bytes[d].kept for d in range(2))


def test_layers_add_up_to_the_step(folder: Path) -> None:
    for strategy in json.loads((folder / "report.json").read_text())["strategies"][:2]:
        for part, us in strategy["predicted_parts_us"].items():
            assert sum(layer[part] for layer in strategy["layers"]) == pytest.approx(us)


def test_the_plot_is_of_the_strategies(folder: Path, tmp_path: Path) -> None:
    paths = write_plots(str(folder), str(tmp_path))
    assert [path.name for path in paths] == ["strategies.png", "strategies.pdf"]
    assert paths[0].read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert paths[1].read_bytes().startswith(b"%PDF-")


def test_a_trace_says_that_there_is_no_recording(folder: Path) -> None:
    with pytest.raises(FileError, match="has a sharded run, whose steps were timed as a whole and not op by op; baechi report"):
        write_trace(str(folder), None, None)


def test_a_plan_alone_has_a_page_and_no_plot(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "shard_plan_pase.json", tmp_path / "shard_plan.json")
    headline = sharded_headline(ShardedRun.load(tmp_path))
    assert headline["verdict"]["text"].startswith("This step is predicted, and was not measured. The predicted step of the plan is")
    assert write_page(str(tmp_path), None).read_text().startswith("<!doctype html>")
    with pytest.raises(FileError, match="has a shard plan, and no steps to plot; baechi train --sharding="):
        write_plots(str(tmp_path), None)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("report.json", {"strategies": 3}, "Expected `array`, got `int` - at `$.strategies`; write it again with baechi train --sharding"),
        ("report.json", {"strategies": [7]}, "Expected `object`, got `int` - at `$.strategies[0]`"),
        ("report.json", {"whole": {"held_bytes": [3]}}, "Expected `object`, got `int` - at `$.whole.held_bytes[0]`"),
        ("report.json", {"whole": {"sent": {"predicted": {"x": 1}}}}, "Expected `object`, got `int` - at `$.whole.sent.predicted[...]`"),
        ("shard_plan.json", {"kind": "plan"}, "shard_plan.json: this is not a shard plan"),
    ],
)
def test_a_damaged_run_is_refused(folder: Path, tmp_path: Path, name: str, change: dict[str, Any], message: str) -> None:
    shutil.copytree(folder, tmp_path / "run")
    file = tmp_path / "run" / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises((FileError, PlanError)) as error:
        ShardedRun.load(tmp_path / "run")
    assert message in str(error.value)
    assert isinstance(error.value, BaechiError)


def test_a_plan_is_looked_for_in_the_folder_alone(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "run")
    shutil.move(tmp_path / "run" / "shard_plan_data_parallel.json", tmp_path / "outside.json")
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    report["strategies"][1]["plan"] = "../outside.json"
    (tmp_path / "run" / "report.json").write_text(json.dumps(report))
    assert list(ShardedRun.load(tmp_path / "run").plans) == ["pase"]


class TestInABrowser:
    pytestmark = browser_marks

    @pytest.mark.parametrize("width", [1280, 390])
    def test_every_panel_is_there_and_drawn(self, browser: Any, hostile: Path, width: int) -> None:
        page = Page(browser, hostile, width)
        assert page.run("return [...document.querySelectorAll('main > section')].map((s) => s.id)") == SECTIONS
        drawn = "[...document.querySelectorAll('header, section, svg, table, .shares')]"
        boxes = page.run(f"return {drawn}.map((e) => [e.nodeName, e.getBoundingClientRect().width, e.getBoundingClientRect().height])")
        assert len(boxes) > len(SECTIONS)
        assert [box for box in boxes if box[1] < 100 or box[2] < 30] == []
        assert page.run("return document.querySelectorAll('#strategies svg circle').length") == 3 * len(NAMES)
        assert page.run("return document.documentElement.scrollWidth") <= width
        assert page.errors() == []
        assert page.requests() == []

    def test_a_step_of_unknown_parts_is_not_one_of_none(self, browser: Any, folder: Path, tmp_path: Path) -> None:
        shutil.copytree(folder, tmp_path / "run")
        report = json.loads((tmp_path / "run" / "report.json").read_text())
        report["strategies"][2]["predicted_parts_us"] = None
        (tmp_path / "run" / "report.json").write_text(json.dumps(report))
        page = Page(browser, write_page(str(tmp_path / "run"), None))
        rows = page.run("return [...document.querySelectorAll('#parts .row')].map((row) => row.innerText.split('\\n'))")
        assert [row[-1] for row in rows if row[0] == "ddp"] == ["not predicted"]
        assert "not predicted" not in str([row for row in rows if row[0] != "ddp"])
        cells = page.run("return [...document.querySelectorAll('#parts tbody tr')].map((r) => [...r.cells].map((one) => one.innerText))")
        assert {cell for name, *costs in cells if name == "ddp" for cell in costs} == {"-"}
        assert page.errors() == []

    def test_messages_say_what_they_are_for(self, browser: Any, hostile: Path) -> None:
        page = Page(browser, hostile)
        rows = page.run("return [...document.querySelectorAll('#messages tbody tr')].map((row) => row.children[1].innerText.split('\\n'))")
        kinds = page.run("return data.strategies.flatMap((s) => s.messages.map(([kind]) => kind))")
        assert [row[1] for row in rows] == kinds
        assert ["sums of weights' gradients, and inside of calls", "allreduce"] in rows
        assert "other" not in [row[0] for row in rows]
        names = page.run("return Object.entries(COLLECTIVES).filter(([kind]) => kind.includes('reduce')).map(([, name]) => name)")
        assert len(set(names)) == len(names) == 4

    def test_notes_are_in_sight_on_narrow_screens(self, browser: Any, hostile: Path) -> None:
        page = Page(browser, hostile, 390)
        note = "document.querySelector('#strategies .below .note')"
        for scrolled in (0, 1000):
            page.run(f"{note}.closest('.scroll').scrollLeft = {scrolled}")
            left, right = page.run(f"const box = {note}.getBoundingClientRect(); return [box.left, box.right]")
            assert 0 <= left < right <= 390
        heights = page.run("return [...document.querySelectorAll('#strategies tbody tr:not(.below)')].map((row) => row.offsetHeight)")
        assert len(heights) == len(NAMES)
        assert sorted(heights)[1] < 30  # a line; the hostile name takes more

    def test_names_from_files_are_text_and_nothing_else(self, browser: Any, hostile: Path) -> None:
        page = Page(browser, hostile)
        assert page.text("h1") == f"model {HOSTILE}"
        assert HOSTILE in page.text("#strategies")
        assert ENDING in page.text("#strategies table")
        assert ENDING in page.text("#layers")
        assert page.run("return [document.scripts.length, document.querySelectorAll('img').length]") == [2, 0]
        assert page.errors() == []

    def test_a_click_on_a_layer_says_why_it_is_split_so(self, browser: Any, hostile: Path) -> None:
        page = Page(browser, hostile)
        page.browser.find_element("css selector", "input[type=search]").send_keys("<img")
        links = page.browser.find_elements("css selector", "#layers-table button")
        assert [link.text for link in links] == [ENDING]
        page.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", links[0])
        links[0].click()
        assert page.text("#layer-name") == ENDING
        rows = page.run("return [...document.querySelectorAll('#others tbody tr')].map((row) => row.innerText)")
        layer = page.run("return layers.selected")
        assert len(rows) == 1 + len(layer["others"]) > 1
        assert "(here)" in rows[0]
        page.keys("layers", "\ue00c", "#layers-table button")
        assert page.run("return [layers.selected, document.getElementById('layer-name')]") == [None, None]
        assert page.errors() == []

    def test_another_plan_and_another_order(self, browser: Any, hostile: Path) -> None:
        page = Page(browser, hostile)
        plan, order = page.browser.find_elements("css selector", "#layers select")
        order.send_keys("costliest first")
        costs = page.run("return shownLayers().map(costOf)")
        assert costs == sorted(costs, reverse=True)
        before = page.text("#layers-table")
        plan.send_keys("data_parallel")
        assert page.run("return plans[layers.plan].name") == "data_parallel"
        assert page.text("#layers-table") != before
        page.browser.find_element("id", "all-layers").send_keys(" ")  # a click may close the list of plans instead
        assert page.run("return shownLayers().length === layersOf().length")
        assert page.errors() == []
