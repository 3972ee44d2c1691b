"""The page of a run shows the same numbers that the run's files say, and nothing in it could be HTML."""

import json
import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from baechi_ext.cost import Contention, OpProfile, Profile
from baechi_ext.errors import FileError
from baechi_ext.hybrid.placer import hybrid
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.ir.cluster import Link
from baechi_ext.place.registry import place
from baechi_ext.simulate import lower_bound_us, simulate
from baechi_ext.simulate.one_device import one_device_timeline
from baechi_runtime.files.run_folder import COMPARISON, RunFolder
from baechi_runtime.measure.samples import Samples
from baechi_runtime.report.cell import timeline_of
from baechi_runtime.report.page.data import graph_data, page_data
from baechi_runtime.report.page.headline import headline
from baechi_runtime.report.page.writing import render, write_page
from baechi_runtime.report.palette import DEVICES, device_colour, text_colour
from baechi_runtime.report.reading import results_of
from baechi_runtime.report.report import Comparison, Step, Training, Variant
from baechi_runtime.report.tables import as_size, as_time
from tests.hybrid.steps import layer, step
from tests.runtime.report_page.runs import ENDING, HOSTILE, comparison, report_of, towers, write_plan, write_run


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.load(write_run(tmp_path / "run", towers()))


def changed_headline(run: RunFolder, changes: dict[str, Any]) -> dict[str, Any]:
    changed = replace(run, report={**(run.report or {}), **changes})
    return headline(changed, results_of(changed, Comparison()))


def test_the_steps_are_those_of_the_files(run: RunFolder) -> None:
    data = page_data(run)
    assert data["ops"]["id"] == [op.id for op in run.graph.ops]
    assert data["placement"] == list(run.plan.placement)
    assert data["predicted"]["step_us"] == run.timeline.makespan_us
    assert data["measured"]["end_us"] == pytest.approx([1.25 * us for us in run.timeline.end_us], abs=0.005)
    assert [tuple(t[:3]) for t in data["measured"]["transfers"]] == [t[:3] for t in run.timeline.transfers]


def test_a_plan_beside_a_graph_with_other_costs_is_noted(run: RunFolder) -> None:
    assert not [text for _, text in headline(run, Step())["facts"] if "other costs" in text]
    other = run.graph.replace_ops([replace(op, compute_us=2 * op.compute_us) for op in run.graph.ops])
    other.save(run.path / "graph.json")
    facts = page_data(RunFolder.load(run.path))["headline"]["facts"]
    (note,) = [text for name, text in facts if name == "note" and "other costs" in text]
    assert note.startswith(f"the plan was made with other costs: its file says a step of {as_time(run.plan.predicted_step_us)}, on this ")


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_the_lower_bound_is_one_of_the_costs_that_the_graph_has(run: RunFolder, factor: float) -> None:
    other = run.graph.replace_ops([replace(op, compute_us=factor * op.compute_us) for op in run.graph.ops])
    other.save(run.path / "graph.json")
    data, bound_us = page_data(RunFolder.load(run.path)), lower_bound_us(other, run.plan.cluster)
    assert data["plan"]["lower_bound_us"] == bound_us != run.plan.lower_bound_us
    above = data["predicted"]["step_us"] / bound_us - 1
    assert above >= 0
    assert data["headline"]["figures"][0]["detail"] == f"{above:.1%} above the lower bound of {as_time(bound_us)}"
    assert page_data(run)["plan"]["lower_bound_us"] == run.plan.lower_bound_us


def test_the_verdict_on_a_training_says_what_was_measured(run: RunFolder) -> None:
    said = [headline(run, Training(measured_step_us=steps))["verdict"] for steps in (None, Samples([880.0, 900.0, 950.0]))]
    assert said[0]["text"].startswith("This step is predicted;")
    assert said[1]["text"].startswith("Steps of this plan were measured;")


@pytest.mark.parametrize(("load", "shown"), [(0.0, ["0.0%"]), (0.25, ["25.0%"]), (None, [])])
def test_the_load_of_others_is_shown_where_it_is_known(run: RunFolder, load: float | None, shown: list[str]) -> None:
    facts = headline(run, Step(load_of_others=load))["facts"]
    assert [text.split()[0] for name, text in facts if name == "CPU load"] == shown


def test_an_op_that_was_not_seen_to_run_has_no_times(run: RunFolder) -> None:
    assert run.measured is not None
    cut = replace(run, measured=replace(run.measured, ops=run.measured.ops[1:]))
    measured = page_data(cut)["measured"]
    missing = run.graph.index[run.measured.ops[0].id]
    assert [v for v, start in enumerate(measured["start_us"]) if start is None] == [missing]


def of_groups(tmp_path: Path, devices: int, layers: int, memory_bytes: float | None = None) -> RunFolder:
    """The folder of a plan on pairs of devices, over which each of some equal layers is split."""
    folder = tmp_path / f"hybrid_{devices}"
    folder.mkdir()
    graph, sharding = step([layer(f"layer.{i}", 2) for i in range(layers)])
    link = Link(us_per_byte=0.001, latency_us=1)
    found = hybrid(graph, Cluster.uniform(devices, memory_bytes=memory_bytes, link=link), sharding, partial(place, "m_etf"))
    graph.save(folder / "graph.json")
    found.plan.save(folder / "plan.json")
    return RunFolder.load(folder)


@pytest.mark.parametrize(("devices", "layers", "gain"), [(2, 1, 2.0), (4, 2, 4.0)])
def test_a_plan_on_groups_is_compared_with_the_whole_step_on_one_device(tmp_path: Path, devices: int, layers: int, gain: float) -> None:
    """Each op runs on the two devices of a group, which is not one device."""
    run = of_groups(tmp_path, devices, layers)
    top = headline(run, Step())
    assert run.hybrid is not None
    assert top["verdict"]["large"] == f"{gain:.2f} times as fast as one device, predicted"
    names = ", ".join(f"device:{d}" for d in range(devices))
    assert top["lead"].startswith(f"hybrid on {devices} devices in groups of 2 ({names}), {layers} op")


def test_a_whole_step_that_no_device_of_a_group_holds(tmp_path: Path) -> None:
    run = of_groups(tmp_path, 2, 1, memory_bytes=200)
    held = one_device_timeline(run.whole).peak_memory_bytes[0]
    assert run.timeline.peak_memory_bytes[0] < 200 < held
    verdict = headline(run, Step())["verdict"]
    assert verdict["large"] == "One device does not hold it"
    assert as_size(held) in verdict["text"]


def test_a_plan_names_its_graph_unless_its_devices_are_groups(run: RunFolder, tmp_path: Path) -> None:
    """Then it is of another graph than that of the folder, and can't be saved."""
    assert page_data(run)["plan"]["graph_fingerprint"] == run.graph.fingerprint
    assert "graph_fingerprint" not in page_data(of_groups(tmp_path, 4, 2))["plan"]


def test_a_backward_op_has_the_module_of_its_forward_op(run: RunFolder) -> None:
    bare = run.graph.replace_ops([replace(op, module=None) if op.phase == "backward" else op for op in run.graph.ops])
    assert page_data(replace(run, graph=bare))["ops"]["module"] == [op.module for op in run.graph.ops]


def test_a_sum_of_gradients_has_the_module_that_all_of_them_are_in() -> None:
    modules = {"a": "net.1.left", "b": "net.1.right", "c": None}
    nodes = [{"id": name, "compute_us": 1, "phase": "backward", "module": module} for name, module in modules.items()]
    nodes += [{"id": name, "compute_us": 1, "phase": "backward", "forward_op": "loss"} for name in ("sum", "all")]
    nodes += [{"id": "loss", "compute_us": 1}]
    edges = [(s, t) for t, sources in (("sum", "ab"), ("all", ["sum", "c"])) for s in sources]
    graph = OpGraph.from_json({"nodes": nodes, "edges": [{"source": s, "target": t, "bytes": 1} for s, t in edges]})
    assert graph_data(graph)["ops"]["module"] == ["net.1.left", "net.1.right", None, "net.1", None, None]


def embedded(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_nothing_from_a_file_can_end_the_data_or_begin_an_element(run: RunFolder) -> None:
    page = render(page_data(run))
    assert "<script>alert" not in page
    assert ENDING not in page
    assert page.count("<script") == page.count("</script>") == 2
    assert HOSTILE in embedded(page)["ops"]["id"]
    assert ENDING in embedded(page)["ops"]["id"]


def test_names_that_look_like_the_template_stay_as_they_are(run: RunFolder) -> None:
    data = page_data(run)
    data["headline"]["title"] = "{{SCRIPT}} {{DATA}}"
    page = render(data)
    assert "<title>{{SCRIPT}} {{DATA}} - m_etf</title>" in page
    assert embedded(page)["headline"]["title"] == "{{SCRIPT}} {{DATA}}"


def test_the_page_may_fetch_nothing_and_run_its_own_script_only(run: RunFolder) -> None:
    page = render(page_data(run))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    assert policy[1].startswith("default-src 'none'; ")
    assert "unsafe" not in policy[1]
    assert re.findall(r"\b(?:src|href)=[\"']?(?!#)([^\"' >]+)", page.split('id="data"')[0].split("<style>")[0]) == ["data:,"]
    assert "://" not in page.replace("http://www.w3.org/2000/svg", "").split('id="data"')[0]


def over_eager(**ratio: float) -> dict[str, Any]:
    return {"speedup_over_eager": {"median": 0.9, "low": 0.8, **ratio}}


COMPILED = {"measured_step_us": {name: {"samples": [us] * 8} for name, us in (("eager", 14.0), ("placed", 10.0), ("torch.compile", 8.0))}}


@pytest.mark.parametrize(
    ("changes", "tone", "text"),
    [
        ({}, "good", "1.40 times as fast as plain eager: Splitting pays (95% interval 1.30 to 1.50)."),
        ({"speedup_over_eager": None}, "good", "1.40 times as fast as one device: Splitting pays (95% interval 1.30 to 1.50)."),
        (over_eager(high=1.1), "bad", "0.90 times as fast as plain eager: Splitting does not clearly"),
        (over_eager(high=0.9), "bad", "0.90 times as fast as plain eager: Splitting does not pay"),
        ({"eager_step": "tf.function, one thread"}, "good", "1.40 times as fast as plain tf.function: Splitting pays"),
        ({"unplaced": "the script unplaced"}, "good", "1.40 times as fast as the script unplaced: Splitting pays"),
        (COMPILED, "bad", "0.80 times as fast as torch.compile: Splitting does not pay"),
        ({"doubts": ["too few steps"]}, "doubt", "Inconclusive: too few steps."),
        ({"speedup_over_eager": None, "speedup_interval": None}, "plain", "times as fast as one device, predicted: Steps of this plan"),
    ],
)
def test_the_verdict(run: RunFolder, changes: dict[str, Any], tone: str, text: str) -> None:
    verdict = changed_headline(run, changes)["verdict"]
    assert verdict["tone"] == tone
    assert text in f"{verdict['large']}: {verdict['text']}"


def test_a_plan_that_was_not_run_has_a_page(tmp_path: Path) -> None:
    folder = write_plan(tmp_path / "plan", towers())
    path = write_page(str(folder), str(tmp_path / "page.html"))
    data = embedded(path.read_text())
    assert data["measured"] is None
    assert data["methods"] == []
    assert [figure["label"] for figure in data["headline"]["figures"]] == ["predicted step", "moved"]
    assert data["peaks"] == []


def test_a_step_that_one_device_does_not_hold_is_not_compared_with_one(tmp_path: Path) -> None:
    run = RunFolder.load(write_plan(tmp_path / "plan", towers()))
    held = one_device_timeline(run.graph).peak_memory_bytes[0]
    for room, large in ((held, "times as fast as one device, predicted"), (held - 1, "One device does not hold it")):
        plan = replace(run.plan, cluster=Cluster.uniform(2, memory_bytes=int(room)))
        verdict = headline(replace(run, plan=plan), Step())["verdict"]
        assert large in verdict["large"]
    assert as_size(held) in verdict["text"]


def test_one_device_alone_is_not_slowed_down_by_others(tmp_path: Path) -> None:
    run = RunFolder.load(write_plan(tmp_path / "plan", towers()))
    alone = {op.id: OpProfile((op.compute_us / 2,), contended_us=(op.compute_us,)) for op in run.graph.ops}
    beside = Contention(2, (sum(op.compute_us for op in run.graph.ops),))
    profile = Profile(run.graph.fingerprint, {}, "thread_cpu", 0, alone, contention=beside)
    gain = one_device_timeline(run.graph).makespan_us / run.timeline.makespan_us
    for known, predicted in ((None, gain), (profile, gain / 2)):
        verdict = headline(replace(run, profile=known), Step())["verdict"]
        assert verdict["large"] == f"{predicted:.2f} times as fast as one device, predicted"


def test_the_one_device_that_a_step_is_compared_with_is_the_fastest(tmp_path: Path) -> None:
    run = RunFolder.load(write_plan(tmp_path / "plan", towers()))
    slow = replace(run, plan=replace(run.plan, cluster=run.plan.cluster.each_with("speed", (0.1, 1.0))))
    gain = one_device_timeline(run.graph).makespan_us / slow.timeline.makespan_us
    assert headline(slow, Step())["verdict"]["large"] == f"{gain:.2f} times as fast as one device, predicted"


def test_one_device_alone_is_as_bound_by_its_host_as_all(tmp_path: Path) -> None:
    run = RunFolder.load(write_plan(tmp_path / "plan", towers()))
    issued = {op.id: 3 * op.compute_us for op in run.graph.ops}
    alone = {op.id: OpProfile((op.compute_us,), contended_us=(op.compute_us,), issue_us=issued[op.id]) for op in run.graph.ops}
    profile = Profile(run.graph.fingerprint, {}, "thread_cpu", 0, alone, contention=Contention(2, (1.0,)))
    graph = run.graph.replace_ops([replace(op, issue_us=issued[op.id]) for op in run.graph.ops])
    bound = RunFolder(run.path, graph, replace(run.plan, graph=graph), profile, None, None)
    gain = one_device_timeline(graph).makespan_us / bound.timeline.makespan_us
    assert one_device_timeline(graph).makespan_us > 2 * one_device_timeline(run.graph).makespan_us
    assert headline(bound, Step())["verdict"]["large"] == f"{gain:.2f} times as fast as one device, predicted"


def test_a_comparison_says_what_a_report_would(tmp_path: Path) -> None:
    folder = write_plan(tmp_path / "compared", towers())
    peaks = {"measured": [1, 2], "measured_by": "accounting"}
    methods = [{**comparison()["methods"][0], "peak_memory_bytes": peaks}, *comparison()["methods"][1:]]
    eager = {"median": 1200.0, "min": 1100.0, "samples": [1100.0, 1200.0, 1300.0]}
    summary = {"unplaced": {"name": "eager, one device", "measured_step_us": eager}}
    summary |= {"model": "towers", "command": ["baechi", "compare"], "recommended": "m_sct", "recommendation": "Split, with m_sct."}
    summary |= {"interval_error": 0.005}
    (folder / COMPARISON).write_text(json.dumps({**comparison(), **summary, "methods": methods}))
    data = embedded(write_page(str(folder), None).read_text())
    top = data["headline"]
    assert (top["title"], top["command"]) == ("towers", "baechi compare")
    assert top["verdict"] == {"tone": "good", "large": "1.33 times as fast as plain eager, with m_sct", "text": "Split, with m_sct."}
    summary["unplaced"]["name"] = "tf.function, one thread"
    (folder / COMPARISON).write_text(json.dumps({**comparison(), **summary, "methods": methods}))
    assert "as fast as plain tf.function, with m_sct" in embedded(write_page(str(folder), None).read_text())["headline"]["verdict"]["large"]
    assert data["peaks_found"] == "computed"
    assert data["recommendation"] == ""  # it is given once
    assert [figure["value"] for figure in top["figures"][1:3]] == ["900 us", "1.40 times as fast"]
    assert top["figures"][2]["detail"] == "range 1.30 to 1.50"  # of three steps
    assert data["peaks"] == [1, 2]
    engine = {"method": "ddp", "measured_step_us": eager, "ratio": {"median": 1.8, "low": 1.7, "high": 1.9}}
    for changes, tone, large in (
        ({"recommended": "single"}, "plain", "Don't split"),
        ({"recommended": None}, "plain", ""),
        ({"doubts": ["a reason"]}, "doubt", "Inconclusive"),
        ({"methods": [*methods, engine], "recommended": "ddp", "planned": "m_sct"}, "good", "1.80 times as fast as one device, with ddp"),
    ):
        (folder / COMPARISON).write_text(json.dumps({**comparison(), **summary, "methods": methods, **changes}))
        verdict = embedded(write_page(str(folder), None).read_text())["headline"]["verdict"]
        assert (verdict["tone"], verdict["large"]) == (tone, large)
    run = RunFolder.load(folder)
    (folder / "report.json").write_text(json.dumps(report_of(run)))
    data = embedded(write_page(str(folder), None).read_text())
    assert "Splitting pays" in data["headline"]["verdict"]["text"]
    assert data["recommendation"] == "Split, with m_sct."


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("report.json", {"speedup_interval": 3}, r"Expected `object .*` - at `\$.speedup_interval`; write it again with baechi train"),
        ("report.json", {"speedup_interval": {"median": 1, "low": 1}}, r"missing required field `high` - at `\$.speedup_interval`"),
        ("report.json", {"load_of_others": "half"}, r"Expected `float .*`, got `str` - at `\$.load_of_others`"),
        ("report.json", {"measured_step_us": {"placed": {"median": float("nan")}}}, "Expected `float` >= 0.0 - at"),
        ("report.json", {"measured_step_us": {"placed": {"samples": [1.0, 0.0]}}}, r"Expected `float` > 0.0 - at .*samples\[1\]"),
        ("report.json", {"measured_step_us": {**COMPILED["measured_step_us"], "placed": {"samples": [1.0] * 7}}}, "as many samples"),
        ("report.json", {"command": "baechi train"}, "\"command\" is 'baechi train'; expected a list"),
        ("compare.json", {"methods": {}}, r"Expected `array`, got `object` - at `\$.methods`; write it again with baechi compare"),
        ("compare.json", {"methods": ["m_sct"]}, r"Expected `object`, got `str` - at `\$.methods\[0\]`"),
        ("compare.json", {"methods": [{"ratio": []}]}, r"Expected `object .*`, got `array` - at `\$.methods\[0\].ratio`"),
    ],
)
def test_what_is_no_report_is_refused(run: RunFolder, name: str, changes: dict[str, Any], message: str) -> None:
    value = json.loads((run.path / name).read_text())
    (run.path / name).write_text(json.dumps({**value, **changes}))
    with pytest.raises(FileError, match=rf"{name}: .*{message}"):
        write_page(str(run.path), None)


def test_the_report_of_a_training_has_one_kind_of_step(run: RunFolder) -> None:
    older = {"losses": [], "measured_step_us": {"median": 2.0, "samples": [1.0, 2.0, 3.0]}, "predicted_step_us": 2.0}
    report = results_of(replace(run, report=older), Comparison())
    assert (type(report), report.measured) == (Training, Samples((1.0, 2.0, 3.0)))
    assert [figure["label"] for figure in headline(run, report)["figures"]] == ["predicted step", "measured step", "moved"]


def test_a_folder_without_a_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"has no graph\.json"):
        write_page(str(tmp_path), None)


def test_a_page_is_the_same_for_the_same_run(run: RunFolder) -> None:
    assert render(page_data(run)) == render(page_data(RunFolder.load(run.path)))


def test_the_shortest_op_of_a_cell_is_seen() -> None:
    """One after each long op of the other device; an op that takes no time is not."""
    nodes = [{"id": f"{name}.{i}", "compute_us": us} for i in range(20) for name, us in (("long", 1000), ("short", 0.1), ("none", 0))]
    edges = [(f"long.{i}", f"{name}.{i}") for i in range(20) for name in ("short", "none")]
    edges += [(f"short.{i}", f"long.{i + 1}") for i in range(19)]
    graph = OpGraph.from_json({"nodes": nodes, "edges": [{"source": s, "target": t, "bytes": 0} for s, t in edges]})
    rows = timeline_of(simulate(graph, Cluster.uniform(3), [0, 1, 2] * 20)).split("<g>")[1:]
    assert [len(re.findall(r"M[\d.]+ ", row)) for row in rows[1:]] == [20, 0]


def test_colours_are_told_apart_and_can_be_written_on() -> None:
    assert len(set(DEVICES)) == len(DEVICES)
    assert device_colour(len(DEVICES)) == device_colour(0)
    assert (text_colour("#000000"), text_colour("#ffffff"), text_colour("#0072b2")) == ("#ffffff", "#111111", "#ffffff")


@pytest.mark.parametrize(
    ("changes", "tone", "text"),
    [
        ({}, "good", "1.40 times as fast as eager, one thread: Splitting pays (95% interval 1.30 to 1.50)."),
        ({"doubts": ["too few"], "speedup_over_eager": None}, "doubt", "Inconclusive: too few. baechi compare measures in turn."),
        (over_eager(high=0.9), "bad", "0.90 times as fast as eager, one thread: Splitting do"),
    ],
)
def test_the_verdict_on_a_script(run: RunFolder, changes: dict[str, Any], tone: str, text: str) -> None:
    """It is compared with its own calls as they are, and names where its further modules are."""
    eager = {"median": 20.0, "min": 10.0, "samples": [10.0, 20.0, 30.0]}
    modules = [{"module": "Net", "folder": "."}, {"module": "Small", "folder": None}, {"module": "Judge", "folder": "placed_2"}]
    script = {"unplaced": "eager, one thread", "measured_step_us": {"eager": eager, "placed": None}, "speedup_interval": None}
    top = changed_headline(run, {**script, "modules": modules, "summary": [], **changes})
    assert top["verdict"]["tone"] == tone
    assert f"{top['verdict']['large']}: {top['verdict']['text']}".startswith(text)
    assert {"label": "eager, one thread", "value": "20 us", "detail": "10 us to 30 us, 3 steps"} in top["figures"]
    once = {"measured_step_us": {"eager": {"median": 20.0, "min": 20.0, "samples": [20.0]}, "placed": None}}
    figures = changed_headline(run, {**script, **changes, **once})["figures"]
    assert {"label": "eager, one thread", "value": "20 us", "detail": "1 step"} in figures
    assert [fact for fact in top["facts"] if fact[0] == "also placed"] == [("also placed", f"Judge: baechi report {run.path / 'placed_2'}")]


def test_the_prediction_of_a_script_is_compared_with_the_call_and_not_with_its_loop(run: RunFolder) -> None:
    """The recorded call is 1.25 times as long as predicted; a step of the loop ten times."""
    samples = {"placed": {"samples": [10 * run.timeline.makespan_us] * 8}}
    figures = changed_headline(run, {"unplaced": "eager, one thread", "measured_step_us": samples})["figures"]
    detail = {figure["label"]: figure["detail"] for figure in figures}
    assert detail["measured step"].endswith(", 8 steps; with all else that the script's loop does")
    assert detail["recorded call"] == "the one in the timeline; prediction 20.0% too low"
    figures = changed_headline(run, {"measured_step_us": samples})["figures"]
    detail = {figure["label"]: figure["detail"] for figure in figures}
    assert detail["measured step"].endswith("prediction 90.0% too low")
    assert "recorded call" not in detail


def test_a_page_has_some_of_the_dots_of_100_000_steps() -> None:
    steps = [float(1 + i * 7919 % 100_000) for i in range(100_000)]
    shown = Variant(measured_step_us=Samples(steps)).shown()["samples_us"]
    assert (len(shown), min(shown), max(shown)) == (300, 1.0, 100_000.0)
    assert max(b - a for a, b in pairwise(sorted(shown))) < 400
    assert Variant(measured_step_us=Samples(steps[:300])).shown()["samples_us"] == steps[:300]


@pytest.mark.parametrize(("steps", "said"), [(5, "range"), (6, "95% interval")])
def test_few_steps_have_a_range_and_no_interval(run: RunFolder, steps: int, said: str) -> None:
    figures = changed_headline(run, {"measured_step_us": {"placed": {"samples": [1000.0] * steps}}})["figures"]
    assert [f["detail"] for f in figures if f["label"] == "against plain eager"] == [f"{said} 1.30 to 1.50"]


def test_the_unplaced_step_of_tensorflow_is_called_so(run: RunFolder) -> None:
    figures = changed_headline(run, {"eager_step": "tf.function, one thread"})["figures"]
    assert "against plain tf.function" in {figure["label"] for figure in figures}
    assert "recorded call" not in {figure["label"] for figure in figures}  # no script's
