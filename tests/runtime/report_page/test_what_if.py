"""The simulator of the page is the one of baechi_ext, and what a reader changes in the page is what baechi simulate says of it."""

import json
import random
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baechi_ext.explain import Mover
from baechi_ext.ir import Cluster, OpGraph, Plan
from baechi_ext.ir.cluster import Link
from baechi_ext.simulate import simulate
from baechi_runtime.cli.main import main
from baechi_runtime.report.page.data import graph_data
from baechi_runtime.report.page.writing import write_page
from tests.runtime.report_page.pages import Page, needs_browser
from tests.runtime.report_page.runs import HOSTILE, towers, write_plan
from tests.simulate.strategies import cases

pytestmark = needs_browser()
ROOT = Path(__file__).parents[3]
SIMULATOR = (files("baechi_runtime.report.page") / "simulate.js").read_text(encoding="utf-8") + """
    const { ops, tensors, cluster, placement, priority } = arguments[0];
    const { step_us, start_us, end_us, busy_us, transfers, peaks, memory } = simulate(new Flow(ops, tensors), cluster, placement, priority);
    return [step_us, start_us, end_us, busy_us, transfers, peaks, memory.map(([at_us]) => at_us.at(-1))];"""


def require_same(browser: Any, graph: OpGraph, cluster: Cluster, placement: list[int], priority: list[float] | None) -> None:
    """Asserts that the page's simulator gives every number that ours gives."""
    plan = {"cluster": cluster.to_json(), "placement": placement, "priority": priority}
    step_us, start_us, end_us, busy_us, transfers, peaks, last_us = browser.execute_script(SIMULATOR, graph_data(graph) | plan)
    expected = simulate(graph, cluster, placement, priority)
    assert step_us == expected.makespan_us
    assert tuple(start_us) == expected.start_us
    assert tuple(end_us) == expected.end_us
    assert tuple(busy_us) == expected.busy_us
    assert tuple(peaks) == expected.peak_memory_bytes
    assert [tuple(t) for t in transfers] == [(t.tensor, t.source, t.target, t.start_us, t.end_us) for t in expected.transfers]
    assert max(last_us) <= step_us


@given(cases(), st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_simulator_of_the_page_is_ours(browser: Any, case: tuple[OpGraph, Cluster], data: st.DataObject) -> None:
    graph, cluster = case
    placement = data.draw(st.lists(st.integers(0, len(cluster) - 1), min_size=len(graph), max_size=len(graph)))
    priority = data.draw(st.none() | st.lists(st.integers(-3, 3), min_size=len(graph), max_size=len(graph)))
    require_same(browser, graph, cluster, placement, priority)


@pytest.mark.parametrize("name", ["inception_v3", "nasnet", "gnmt_v2"])
def test_on_captured_graphs_too(browser: Any, name: str) -> None:
    """Costs are as they were measured; links charge their devices; every op is anywhere."""
    graph, rng = OpGraph.load(ROOT / f"benchmarks/graphs/{name}.json.gz"), random.Random(1)
    for devices in (2, 8):
        cluster = Cluster.uniform(devices, link=Link(0.0001754, 134.0, 3.3, 0.0001, 2.1, 0.00007))
        placement = [rng.randrange(devices) for _ in graph.ops]
        for priority in (None, [rng.random() for _ in graph.ops]):
            require_same(browser, graph, cluster, placement, priority)


def test_hundreds_of_devices_and_links_of_their_own(browser: Any, tmp_path: Path) -> None:
    """A simulation does nothing for each pair of devices, of which there are 65,280, and the form has no list of these."""
    count, value = 256, towers(layers=8, towers=40)
    (tmp_path / "graph.json").write_text(json.dumps(value))
    graph, names = OpGraph.load(tmp_path / "graph.json"), [device.name for device in Cluster.uniform(count).devices]
    usual = Link(0.001, 5, issue_us=0.3)
    pairs = {(names[a], names[(a + 1) % count]): Link(0.002, 9.5, 3.3, 0.0001, 2.1, 0.00007, issue_us=0.7 * a) for a in range(count)}
    cluster, rng = replace(Cluster.uniform(count, link=usual), pairs=pairs), random.Random(1)
    placement = [rng.randrange(count) for _ in graph.ops]
    groups = {op.colocation: d for op, d in zip(graph.ops, placement, strict=True) if op.colocation}
    placement = [groups.get(op.colocation, d) for op, d in zip(graph.ops, placement, strict=True)]
    require_same(browser, graph, cluster, placement, None)
    timeline = simulate(graph, cluster, placement)
    Plan(graph, "random", "feasible", cluster, tuple(placement), None, timeline.makespan_us, 0, timeline.peak_memory_bytes, 0.0).save(
        tmp_path / "plan.json"
    )
    page = Page(browser, write_page(str(tmp_path), None))
    assert page.run("return predicted.step_us") == timeline.makespan_us
    assert page.run("return document.querySelectorAll('#whatif form select option').length") == 3 * count + 1
    fill(page, 1, "7", "8", "0", "0.002")
    slowed = replace(cluster, pairs={**pairs, (names[7], names[8]): replace(pairs[names[7], names[8]], latency_us=0)})
    assert page.run("return whatIf.simulated().step.step_us") == simulate(graph, slowed, placement).makespan_us
    assert page.run("return whatIf.simulated().faster")
    assert page.errors() == []


def test_a_link_leads_to_another_device(page: Page) -> None:
    start, end = page.browser.find_elements("css selector", "#whatif form:nth-of-type(2) select")
    state = "return [arguments[0].disabled, arguments[0].value, [...arguments[0].options].map((one) => one.disabled)]"
    choose = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('change'))"
    assert page.run(state, end)[0]
    for source, target in (("0", "1"), ("1", "0")):
        page.run(choose, start, source)
        assert page.run(state, end) == [False, target, [target != "0", target != "1"]]


@pytest.fixture
def page(browser: Any, tmp_path: Path) -> Page:
    """The page of a plan for two devices, one of which is half full."""
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    return Page(browser, write_page(str(write_plan(tmp_path / "run", towers())), None))


def fill(page: Page, number: int, *values: str) -> None:
    """Fills one of the two forms in and sends it."""
    form = page.browser.find_elements("css selector", "#whatif form")[number]
    for node, value in zip(form.find_elements("css selector", "input, select"), values, strict=True):
        page.run("arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('change'))", node, value)
    page.press(form.find_element("css selector", "button"))


def cells(page: Page) -> dict[str, list[str]]:
    """The table as it is shown: by its first column, the others."""
    rows = page.run("return [...document.querySelectorAll('#whatif tbody tr')].map((row) => [...row.cells].map((cell) => cell.innerText))")
    return {name.strip(): values for name, *values in rows}


def test_what_if_a_module_were_elsewhere_and_a_link_slower(page: Page, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Step and memory are those that baechi simulate gives for the saved plan, and nothing else has changed in it."""
    graph = OpGraph.load(tmp_path / "run/graph.json")
    plan = Plan.load(tmp_path / "run/plan.json", graph)
    target = 1 - plan.placement[graph.index["conv.1.0"]]
    fill(page, 0, "towers.1", str(target))
    fill(page, 1, "0", "1", "80", "0.002")
    assert page.run("return tracks.map(({ title }) => title)") == ["predicted", "what if"]
    assert len(page.browser.find_elements("css selector", "#whatif .changes li")) == 2
    changed = cells(page)
    assert changed["lower bound"][2] == "the same"
    page.press(page.browser.find_element("xpath", "//button[text()='Save the plan']"))
    path = tmp_path / "plan_what_if.json"
    page.browser.execute_async_script("setTimeout(arguments[0], 300)") if not path.exists() else None
    saved = Plan.load(path, graph)
    moved = {op.id for op, here, there in zip(graph.ops, plan.placement, saved.placement, strict=True) if here != there}
    assert {name for name in moved if "conv.1" not in name} == set()
    assert {saved.placement[v] for v, op in enumerate(graph.ops) if (op.module or "").startswith("towers.1")} == {target}
    assert saved.priority == plan.priority
    assert saved.cluster.link(0, 1) == Link(us_per_byte=0.002, latency_us=80)
    assert saved.cluster.link(1, 0) == plan.cluster.link(1, 0)
    assert main(["simulate", str(tmp_path / "run/graph.json"), str(path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert page.run("return whatIf.simulated().step.step_us") == said["makespan_us"] == saved.predicted_step_us
    assert page.run("return whatIf.simulated().step.peaks") == said["peak_memory_bytes"]
    assert saved.lower_bound_us == plan.lower_bound_us
    while buttons := page.browser.find_elements("css selector", "#whatif .changes button"):
        page.press(buttons[0])
    assert page.run("return tracks.map(({ title }) => title)") == ["predicted"]
    assert cells(page) == {}
    assert page.errors() == []
    assert page.requests() == []


def test_a_faster_link_has_a_bound_that_no_link_beats(page: Page, tmp_path: Path) -> None:
    """It is the one of a cluster whose links take no time, or less."""
    graph = OpGraph.load(tmp_path / "run/graph.json")
    fill(page, 1, "", "1", "0", "0")
    assert cells(page)["lower bound"][2] == "of compute alone, as a link is faster"
    free = Cluster.uniform(2)
    bound_us = page.run("return whatIf.simulated().bound_us")
    longest = max(graph.total_compute_us() / 2, *graph.tails_us)
    assert longest - 1e-6 <= bound_us <= simulate(graph, free, Plan.load(tmp_path / "run/plan.json", graph).placement).makespan_us


def test_a_plan_without_a_lower_bound_has_none(browser: Any, tmp_path: Path) -> None:
    folder = write_plan(tmp_path / "run", towers())
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**plan, "lower_bound_us": 0}))
    page = Page(browser, write_page(str(folder), None))
    fill(page, 0, "towers.1", "0")
    assert cells(page)["lower bound"] == ["none", "none", ""]


def test_what_breaks_a_limit_or_is_called_by_nobody_says_so(page: Page) -> None:
    page.run("cluster.devices[1].memory_bytes = devices[1].memory_bytes = 1000")
    fill(page, 0, "towers", "1")
    assert "over its 1000 B" in cells(page)["device:1 memory"][2]
    fill(page, 0, "no such module", "1")
    assert page.run("return whatIf.changes.length") == 1
    assert "nothing is called so" in page.run("return document.querySelector('#whatif form input').validationMessage")


def test_why_an_op_is_where_it_is(page: Page, tmp_path: Path) -> None:
    """As baechi explain says it; with little memory, and two ops far from where they should be."""
    path = tmp_path / "run/plan.json"
    value, graph = json.loads(path.read_text()), OpGraph.load(tmp_path / "run/graph.json")
    value["placement"] |= {HOSTILE: 1 - value["placement"][HOSTILE], "loss": 1 - value["placement"]["loss"]}
    value["cluster"]["devices"][1]["memory_bytes"] = 150000
    path.write_text(json.dumps(value))
    page = Page(page.browser, write_page(str(tmp_path / "run"), None))
    mover = Mover(Plan.load(path, graph))
    verdicts = set()
    for v in range(len(graph)):
        moved, steps_us, fits, verdict = page.run(
            "const found = elsewhere(arguments[0]);"
            "return [found.moved, found.steps.map(({ step_us }) => step_us), found.fits, found.verdict]",
            v,
        )
        expected = mover.choices([v])
        assert sorted(moved) == list(expected.moved)
        assert steps_us == [choice.step_us for choice in expected.choices]
        assert fits == [choice.fits for choice in expected.choices]
        assert verdict == expected.verdict
        verdicts.add(verdict)
    assert len(verdicts) > 1


def test_pinned_ops_stay(browser: Any, tmp_path: Path) -> None:
    value = towers()
    for node in value["nodes"]:
        if node["id"] == "conv.1.0":
            node["pin"] = 0
    page = Page(browser, write_page(str(write_plan(tmp_path / "run", value)), None))
    names = "const { all, moved } = membersOf('towers.1', 1); return [all, moved].map((them) => them.map((v) => ops.id[v]))"
    everything, moved = page.run(names)
    assert set(everything) - set(moved) == {"conv.1.0", "grad conv.1.0", "update conv.1.0"}
    assert "conv.1.1" in moved
