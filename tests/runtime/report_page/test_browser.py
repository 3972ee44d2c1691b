"""The page of a run in a real browser: it opens, draws every panel, answers clicks and keys, and asks nobody for anything."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baechi_ext.ir.measured import ResidentBytes
from baechi_runtime.files.run_folder import RunFolder
from baechi_runtime.report.page.writing import write_page
from tests.runtime import forked
from tests.runtime.report_page.pages import Page, needs_browser
from tests.runtime.report_page.runs import ENDING, HOSTILE, measured_step, parted, towers, write_plan, write_run

pytestmark = needs_browser()
ROOT = Path(__file__).parents[3]
SECTIONS = ["methods", "timeline", "whatif", "devices", "memory", "graph", "explanation"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(str(write_run(tmp_path_factory.mktemp("runs") / "small", towers())), None)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(str(write_plan(tmp_path_factory.mktemp("runs") / "large", towers(layers=120, towers=9), "contiguous")), None)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(str(write_run(tmp_path_factory.mktemp("runs") / "parts", parted())), None)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a user's own script with two models, long enough that both have taken their turns."""
    folder = tmp_path_factory.mktemp("runs")
    path, out = folder / "gan.py", folder / "script"
    path.write_text((ROOT / "tests/runtime/scripts/gan.py").read_text().replace("range(5)", "range(200)"))
    forked.output("train", "--placement_method=random", f"--out={out}", str(path))
    return out


def colours_of(page: Page) -> list[int]:
    """For each canvas, how many colours are in it."""
    return page.run("""
        return [...document.querySelectorAll("canvas")].map((canvas) => {
          const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
          copy.drawImage(canvas, 0, 0);
          return new Set(new Uint32Array(copy.getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size;
        });""")


@pytest.mark.parametrize("width", [1280, 390])
def test_every_panel_is_there_and_drawn(browser: Any, small: Path, width: int) -> None:
    page = Page(browser, small, width)
    assert page.run("return [...document.querySelectorAll('main > section')].map((s) => s.id)") == SECTIONS
    drawn = "[...document.querySelectorAll('header, section, canvas, svg, table')]"
    boxes = page.run(f"return {drawn}.map((e) => [e.nodeName, e.getBoundingClientRect().width, e.getBoundingClientRect().height])")
    assert len(boxes) > len(SECTIONS)
    assert [box for box in boxes if box[1] < 100 or box[2] < 30] == []
    assert len(colours_of(page)) == 3
    assert min(colours_of(page)) > 10
    assert page.run("return document.documentElement.scrollWidth") <= width
    assert page.errors() == []
    assert page.requests() == []


def test_no_number_is_out_of_sight_on_a_phone(browser: Any, small: Path) -> None:
    page = Page(browser, small, 420)
    tables = "[...document.querySelectorAll('main .scroll')]"
    assert page.run(f"return {tables}.length") > 3
    assert page.run(f"return {tables}.filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.innerText)") == []


def test_what_a_page_asks_for_is_seen(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "asking.html"
    path.write_text('<img src="picture.png">')
    assert Page(browser, path).requests() == [(tmp_path / "picture.png").as_uri()]


def test_what_stands_at_the_top(browser: Any, small: Path) -> None:
    page = Page(browser, small)
    assert page.text("h1") == f"towers {HOSTILE}"
    assert page.text("header .large") == "1.40 times as fast as plain eager"
    assert "Splitting pays (95% interval 1.30 to 1.50)." in page.text("header .verdict")
    tops = page.run("return ['h1', '.large', '.figures'].map((one) => document.querySelector('header ' + one).getBoundingClientRect().top)")
    assert tops == sorted(tops)
    assert "baechi train '--out=a folder'" in page.text("header pre")
    page.run("document.querySelector('header details').open = true")
    assert f"a note on {HOSTILE}" in page.text("header details")
    assert "one op was not seen to run" in page.text("header details")
    assert "baechi 1.0, torch 2.0" in page.text("header details")


@pytest.mark.parametrize(("folder", "model", "others"), [(".", "Maker", True), ("placed_2", "Judge", False)])
def test_the_page_of_a_script(browser: Any, script: Path, folder: str, model: str, others: bool) -> None:
    """Its own calls are measured beside the prediction; and it says where its other model is."""
    page = Page(browser, write_page(str(script / folder), None))
    assert page.text("h1") == f"{model} of gan.py"
    assert page.run("return [tracks.length, data.measured.start_us.includes(null)]") == [2, False]
    figures = page.text("header")
    assert "MEASURED STEP" in figures.upper()
    assert "THE SCRIPT UNPLACED" in figures.upper()
    assert "Inconclusive: " not in figures or "baechi compare" in figures
    assert "baechi train --placement_method=random" in page.text("header pre")
    page.run("document.querySelector('header details').open = true")
    facts = page.text("header details")
    assert "passed; " in facts
    assert "largest relative difference 0" in facts
    assert ("Judge: baechi report" in facts and str(script / "placed_2") in facts) == others
    op = page.run("return data.measured.end_us.indexOf(Math.max(...data.measured.end_us))")
    page.run("select(arguments[0])", op)
    assert page.run("return ops.id[arguments[0]]", op) in page.text("#details")
    assert min(colours_of(page)) > 10
    assert page.errors() == []
    assert page.requests() == []


def test_a_click_on_an_op_of_the_timeline_shows_its_costs_and_choices(browser: Any, small: Path) -> None:
    page = Page(browser, small)
    op = page.run("return ops.id.indexOf('grad conv.1.3')")
    page.click("timeline", "timeline.centre(arguments[0])", op)
    details = page.text("#details")
    assert page.run("return selection.op") == op
    assert "grad conv.1.3" in details
    assert "aten.conv_backward" in details
    assert "227 us" in details
    assert "8 KiB" in details
    rows = page.run("return [...document.querySelectorAll('#choices tbody tr')].map((row) => row.innerText)")
    assert len(rows) == 2
    assert sum("(here)" in row for row in rows) == 1
    assert not any("no room" in row for row in rows)
    assert "With 2 ops of its colocation group" in details
    assert page.errors() == []


def test_a_gap_of_the_timeline_says_what_it_waits_for(browser: Any, small: Path) -> None:
    page = Page(browser, small)
    gap = page.run("return data.explanation.idle.flatMap((device) => device.gaps).find((gap) => gap.op !== null)")
    said = page.run(
        "const gap = arguments[0];"
        "const y = timeline.y(tracks[0], gap.device) + 5;"
        "return timeline.describe(timeline.pick(timeline.x((gap.start_us + gap.end_us) / 2), y))",
        gap,
    )
    assert f"until {gap['op']} can start; it waits for" in said
    assert f"computing {gap['producer']}" in said


def test_a_click_opens_a_group_and_then_selects_an_op_in_it(browser: Any, small: Path) -> None:
    page = Page(browser, small)
    group = "graph.boxes.find((box) => box.op === undefined && !box.open)"
    before, inside = page.run(f"return [graph.boxes.length, {group}.items().length]")
    page.click("graph", f"graph.centre({group})")
    assert page.run("return graph.boxes.length") == before + inside
    op = page.run("return [...graph.boxOfOp.keys()].at(-1)")
    page.run("graph.reveal(arguments[0])", op)
    page.click("graph", "graph.centre(graph.boxOfOp.get(arguments[0]))", op)
    assert page.run("return selection.op") == op
    assert page.run("return ops.id[selection.op]") in page.text("#details")
    assert page.errors() == []


def test_the_limit_is_dashed_as_no_other_line(browser: Any, small: Path) -> None:
    """A device has the limit's colour, too."""
    page = Page(browser, small)
    found, limit, colour = page.run("""
        const found = [];
        devices[1].memory_bytes = memory.tops[1];
        memory.level = (context, d, bytes, colour, dashes) => found.push([bytes, colour, dashes]);
        memory.surface.draw();
        return [found, devices[1].memory_bytes, ink("limit")];""")
    dashes = [dash for bytes_, ink, dash in found if (bytes_, ink) == (limit, colour)]
    others = [dash for bytes_, ink, dash in found if (bytes_, ink) != (limit, colour)]
    assert dashes
    assert others
    assert dashes[0] not in ([], *others)


def test_a_critical_path_of_many_parts_is_summed_up(browser: Any, small: Path) -> None:
    page = Page(browser, small)
    rows = page.run(
        "data.explanation.critical_path.parts = Array(20).fill({ kind: 'transfer', device: 0, target: 1, us: 1.5, share: 0.05 });"
        "explanationSection();"
        "return [...document.querySelectorAll('#explanation')].at(-1).querySelector('tbody').innerText.split('\\n')"
    )
    assert len(rows) == 13
    assert rows[-1].split("\t") == ["8 further parts", "", "12 us", "40%"]


def test_some_of_many_transfers_were_tried(browser: Any, small: Path) -> None:
    page = Page(browser, small)
    titles = page.run("return [...document.querySelectorAll('#explanation h3')].map((title) => title.innerText)")
    count = page.run("return data.explanation.transfers.count")
    assert f"The costliest of {count} transfers" in titles
    titles = page.run(
        "data.explanation.transfers.count = 500; data.explanation.transfers.tried = 10; explanationSection();"
        "return [...[...document.querySelectorAll('#explanation')].at(-1).querySelectorAll('h3')].map((title) => title.innerText)"
    )
    assert "The costliest of 10 tried of 500 transfers" in titles


def test_memory_that_was_counted_is_called_so(browser: Any, small: Path) -> None:
    """The recorded step's is a sum of live tensors, also where the system says what the peak was."""
    note = Page(browser, small).text("#memory .note")
    assert "the thin line what was computed of the recorded step, the dotted line the measured peak." in note
    assert note.endswith("Computed is what live tensors sum up to.")


def test_a_canvas_of_hundreds_of_devices_is_not_higher_than_browsers_draw(browser: Any, small: Path) -> None:
    page = Page(browser, small)
    page.run("memory.surface.height = 60000; memory.surface.resize()")
    assert page.run("return [memory.surface.tall > 59000, memory.surface.canvas.height]") == [True, 32000]
    assert page.errors() == []


def test_the_critical_path_goes_along_a_busy_link(browser: Any, tmp_path: Path) -> None:
    """The op that ends the step reads what waits for a free link, behind a tensor that it does not read; both are on the path."""
    nodes = [{"id": name, "compute_us": us, "pin": d} for name, us, d in (("a", 10, 0), ("b", 10, 0), ("c", 1, 1), ("d", 50, 1))]
    edges = [{"source": "a", "target": "c", "bytes": 400_000}, {"source": "b", "target": "d", "bytes": 1000}]
    folder = write_plan(tmp_path / "busy", {"graph": {"name": "busy"}, "nodes": nodes, "edges": edges})
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**plan, "priority": {"a": 0, "b": 1, "c": 2, "d": 3}}))
    page = Page(browser, write_page(str(folder), None))
    names = "[...tracks[0].hops].map((hop) => hop.split('>')).map(([t, d]) => [ops.id[tensors.producer[t]], Number(d)])"
    assert page.run(f"return {names}") == [["a", 1], ["b", 1]]
    assert page.run("return [...tracks[0].critical].map((v) => ops.id[v])") == ["a", "d"]
    drawn = page.run("""
        const arrows = [];
        timeline.arrow = (context, t, tensor) => arrows.push(ops.id[tensors.producer[tensor]]);
        timeline.surface.draw();
        return arrows;""")
    assert drawn == ["a", "b"]
    assert page.errors() == []


def test_keys_move_zoom_and_select(browser: Any, small: Path) -> None:
    page = Page(browser, small)
    page.keys("timeline", "++")
    whole, shown = page.run("return [span.whole, span.to - span.from]")
    assert shown < whole / 2
    page.keys("timeline", "0n")
    assert page.run("return span.to - span.from") == whole
    first = page.run("return selection.op")
    page.keys("timeline", "n")
    assert page.run("return [arguments[0], selection.op].map((v) => tracks[0].lanes[placement[v]].indexOf(v))", first) == [0, 1]
    move = next(button for button in page.browser.find_elements("css selector", "#details button") if button.text == "Move it")
    page.press(move)
    assert page.run("return document.activeElement.value === (ops.module[selection.op] || ops.id[selection.op])")
    page.keys("timeline", "\ue00c")
    assert page.run("return selection.op") is None
    page.keys("graph", "nnn\ue007")
    assert page.run("return graph.focus !== null")
    assert page.errors() == []
    down = "return document.querySelector(arguments[0]).dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowDown', cancelable: true}))"
    scrolls = [page.run(down, f"#{section} canvas") for section in ("timeline", "memory", "graph")]
    assert scrolls == [True, True, False]  # only the graph goes on above and below


def test_keys_of_the_graph_go_on_where_they_were(browser: Any, small: Path) -> None:
    """Whatever was opened, closed or grouped otherwise since; and what they come to is told."""
    page = Page(browser, small)
    page.run("graph.openAll(true)")
    focus = "graph.focus && (graph.focus.op === undefined ? graph.focus.name : ops.id[graph.focus.op])"
    page.run("graph.focus = graph.boxes.findLast(({ op }, i) => ![op, graph.boxes[i + 1]?.op].includes(undefined))")
    op = page.run("return graph.focus.op")
    after = page.run("return graph.boxes[graph.boxes.indexOf(graph.focus) + 1].op")
    page.run("graph.reveal(0)")
    assert page.run("return [graph.boxes.includes(graph.focus), graph.focus.op]") == [True, op]
    page.keys("graph", "n")
    assert page.run("return graph.focus.op") == after
    assert page.run("return ops.id[arguments[0]]", after) in page.run("return document.querySelector('.spoken').textContent")
    page.run("graph.regroup('device')")
    assert page.run("return graph.boxes.includes(graph.focus) && graph.focus === graph.boxOf(arguments[0])", after)
    page.run("graph.openAll(false); graph.focus = graph.boxes.find((box) => box.op === undefined && !box.open)")
    closed = page.run(f"return {focus}")
    page.keys("graph", "\ue007")
    assert page.run(f"return [graph.focus.open, {focus}]") == [True, closed]
    told = page.run("return document.querySelector('.spoken').textContent").split("\n")
    assert (told[-1], "op" in told[1]) == ("open", True)
    page.run("graph.focus.parent.open = false; graph.layout()")
    assert page.run("return graph.boxes.includes(graph.focus) && !graph.focus.open")
    page.run("graph.regroup('module')")
    assert page.run("return graph.focus") is None
    assert page.errors() == []


def test_the_first_key_of_the_timeline_finds_an_op(browser: Any, tmp_path: Path) -> None:
    """The first device may have none."""
    value = towers(layers=1)
    for node in value["nodes"]:
        node["pin"] = 1
    page = Page(browser, write_page(str(write_plan(tmp_path / "run", value)), None))
    page.keys("timeline", "n")
    assert page.run("return selection.op === tracks[0].lanes[1][0]")
    assert page.errors() == []


def test_names_from_files_are_text_and_nothing_else(browser: Any, small: Path) -> None:
    page = Page(browser, small)
    assert page.run("return document.scripts.length") == 2
    assert page.run("return document.querySelectorAll('img, iframe, object, embed').length") == 0
    for name in (HOSTILE, ENDING):
        page.run("select(ops.id.indexOf(arguments[0]))", name)
        assert name in page.text("#details h3")
    field = page.browser.find_element("css selector", "#graph input[type=search]")
    field.send_keys("onerror")
    assert ENDING in page.text("#graph .found")
    assert ENDING in page.text("#methods")
    show_colours(page, "timeline", "module")
    assert f"{ENDING}.0 (Conv2d)" in page.text("#timeline .legend")
    assert page.run("return document.querySelectorAll('img').length") == 0
    assert page.errors() == []
    assert page.requests() == []


def test_no_other_script_runs_and_nothing_can_be_fetched(browser: Any, small: Path) -> None:
    page = Page(browser, small)
    page.run("const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s)")
    page.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.ran = 2\"><img src=\"http://127.0.0.1:9/x.png\">')")
    page.run("fetch('http://127.0.0.1:9/').catch(() => {})")
    page.drawn()
    assert page.run("return window.ran === undefined")
    assert len(page.errors()) >= 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_parts_of_a_batch_have_colours(browser: Any, parts: Path, scheme: str) -> None:
    """Each op that of its part, with a line under backward ones; a button shows the devices' instead."""
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    try:
        page = Page(browser, parts)
        forward = [page.run("return ops.id.indexOf(arguments[0])", f"layer.1@{k}") for k in range(2)]
        backward, update = (page.run("return ops.id.indexOf(arguments[0])", name) for name in ("grad.layer.1@1", "update.1"))
        expected = page.run("return [0, 1].map((part) => data.palette[part].colour)")
        assert len(set(expected)) == 2
        assert [inside(page, v, 5) for v in forward] == expected
        ink, muted = page.run("return [ink('ink'), ink('transfer')]")
        assert [inside(page, backward, 5), inside(page, backward, -2), inside(page, update, 5)] == [expected[1], ink, muted]
        assert [word in page.text("#timeline .legend") for word in ("part 0", "part 1", "all parts", "backward")] == [True] * 4
        show_colours(page, "timeline", "device")
        placed = page.run("return arguments[0].map((v) => devices[placement[v]].colour)", [*forward, backward])
        assert [inside(page, v, 5) for v in (*forward, backward)] == placed
        assert inside(page, backward, -2) == placed[2]
        assert "part 0" not in page.text("#timeline .legend")
        page.run("select(arguments[0])", forward[1])
        assert "part\n1" in page.text("#details")
        page.run("graph.regroup('part')")
        assert set(page.run("return [...graph.root.groups.keys()]")) == {"all parts", "part 0", "part 1"}
        assert page.errors() == []
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def show_colours(page: Page, section: str, by: str) -> None:
    """Chooses what colours show."""
    chooser = page.browser.find_element("css selector", f"#{section} select[aria-label='what colours show']")
    page.run("arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('change'))", chooser, by)
    page.drawn()


def inside(page: Page, op: int, below: int) -> str:
    """The colour near the right end of an op, so many pixels below its top; negative: above its bottom."""
    return page.run(
        """
        const [v, below] = arguments, t = tracks[0], top = timeline.y(t, placement[v]);
        const canvas = document.querySelector("#timeline canvas"), copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d");
        copy.drawImage(canvas, 0, 0);
        const x = timeline.x(t.step.end_us[v]) - 4, y = below < 0 ? top + timeline.lane + below : top + below;
        return "#" + [...copy.getImageData(x, y, 1, 1).data].slice(0, 3).map((c) => c.toString(16).padStart(2, "0")).join("");""",
        op,
        below,
    )


def test_a_whole_batch_has_no_colours_of_parts(browser: Any, small: Path) -> None:
    page = Page(browser, small)
    assert page.run("return [hasParts, colours.by, timeline.withPath]") == [False, "device", True]
    assert "part of the batch" not in page.text("#timeline select")


def test_colours_show_devices_phases_or_modules(browser: Any, small: Path) -> None:
    """Whichever bar they are chosen in, in the timeline and in the graph."""
    page = Page(browser, small)
    page.run("timeline.withPath = false")
    ops = [page.run("return ops.id.indexOf(arguments[0])", name) for name in ("conv.1.3", "grad conv.1.3", "conv.2.3")]
    for section, by, key in (
        ("timeline", "phase", "ops.phase[v]"),
        ("graph", "module", "colours.names.indexOf(around[v].slice(0, 2).join('.'))"),
        ("graph", "device", "placement[v]"),
    ):
        show_colours(page, section, by)
        expected = page.run(f"return arguments[0].map((v) => data.palette[{key} % data.palette.length].colour)", ops)
        assert [inside(page, v, 5) for v in ops] == expected
        names = page.run("return colours.names")
        assert all(name in page.text(f"#{where} .legend") for where in ("timeline", "graph") for name in names[:8])
        values = page.run("return [...document.querySelectorAll('select[aria-label=\"what colours show\"]')].map((one) => one.value)")
        assert values == [by, by]
    assert page.errors() == []


def test_no_two_names_of_a_legend_have_one_colour(browser: Any, tmp_path: Path) -> None:
    """Eight of eleven modules are named, as there are eight colours, and what is in none."""
    page = Page(browser, write_page(str(write_plan(tmp_path / "wide", towers(layers=1, towers=11))), None))
    show_colours(page, "timeline", "module")
    shown = page.run("""
        return [...document.querySelectorAll("#timeline .colours > span")].filter((one) => !one.querySelector(".backward"))
          .map((one) => [one.textContent, getComputedStyle(one.querySelector(".swatch")).backgroundColor]);""")
    names = page.run("return colours.names.map(called)")
    assert len(names) == 12
    assert [name for name, _ in shown] == [*names[:8], "no module"]
    assert len({colour for _, colour in shown}) == 9
    assert "and 3 more, in the same colours again" in page.text("#timeline .colours")


def test_what_was_measured_of_memory_is_never_cut_off(browser: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", towers())
    run, report = RunFolder.load(folder), json.loads((folder / "report.json").read_text())
    most = [10 * bytes_ for bytes_ in run.timeline.peak_memory_bytes]
    memory = tuple((ResidentBytes(0.0, 1), ResidentBytes(100.0, int(bytes_)), ResidentBytes(200.0, 1)) for bytes_ in most)
    replace(measured_step(run.plan, 1.25), memory=memory).save(folder / "measured.json")
    (folder / "report.json").write_text(json.dumps({**report, "peak_memory_bytes": None}))
    page = Page(browser, write_page(str(folder), None))
    assert page.run("return data.peaks") == []
    tops = page.run("return devices.map((_, d) => [memory.y(d, arguments[0][d]) - memory.each * d, memory.each])", most)
    assert [0 < y < each for y, each in tops] == [True, True]


def test_only_the_first_button_of_a_mouse_moves_what_is_shown(browser: Any, small: Path) -> None:
    """The menu that a right-click opens takes the release of its button."""
    page = Page(browser, small)
    page.run("graph.zoom(2, 100, 100)")
    moved = """
        const canvas = document.querySelector("#graph canvas"), before = [graph.dx, graph.dy];
        const event = (type, x, more) => canvas.dispatchEvent(new PointerEvent(type, { pointerId: 1, clientX: x, clientY: 50, ...more }));
        canvas.setPointerCapture = () => {};
        event("pointerdown", 100, { button: arguments[0] });
        event("pointermove", 160, {});
        event("pointermove", 220, {});
        if (arguments[0] === 0) event("pointerup", 220, { button: 0 });
        return [[graph.dx, graph.dy].map((at, i) => at - before[i]), graph.surface.pointers.size];"""
    assert page.run(moved, 2) == [[0, 0], 0]
    assert page.run(moved, 1) == [[0, 0], 0]
    assert page.run(moved, 0) == [[120, 0], 0]


def test_the_tooltip_never_covers_the_panel(browser: Any, small: Path) -> None:
    for width in (1280, 420):
        page = Page(browser, small, width)
        page.run("select(0)")
        canvas = browser.find_element("css selector", "#timeline canvas")
        page.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", canvas)
        page.drawn()
        apart = page.run("""
            const [box, panel] = [arguments[0], document.getElementById("details")].map((one) => one.getBoundingClientRect());
            const found = [];
            for (let x = timeline.left + 2; x < box.width; x += 7) for (const y of [32, 40, box.height - 40]) {
              const [clientX, clientY] = [box.x + x, box.y + y];
              if (document.elementFromPoint(clientX, clientY) !== arguments[0]) continue;
              arguments[0].dispatchEvent(new PointerEvent("pointermove", { clientX, clientY }));
              const { left, right, top, bottom } = tip.getBoundingClientRect();
              if (!tip.hidden) found.push(right <= panel.left || bottom <= panel.top || left >= panel.right || top >= panel.bottom);
            }
            return found;""", canvas)
        assert len(apart) > 10
        assert all(apart)


PICTURES = "[...document.querySelectorAll('canvas')].map((canvas) => canvas.toDataURL())"


def test_dark_pages_are_drawn_dark_and_printed_light(browser: Any, small: Path) -> None:
    page = Page(browser, small)
    page.run("document.querySelector('header details').open = true")
    page.drawn()
    pictures = page.run(f"return {PICTURES}")
    light = page.run("return getComputedStyle(document.body).backgroundColor")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]})
    try:
        page.drawn()
        assert page.run("return getComputedStyle(document.body).backgroundColor") != light
        assert min(colours_of(page)) > 10
        dark = page.run(f"return {PICTURES}")
        page.run("dispatchEvent(new Event('beforeprint'))")
        assert page.run("return getComputedStyle(document.body).backgroundColor") == light
        assert page.run(f"return {PICTURES}") == pictures != dark
        assert page.run("return [...document.querySelectorAll('details')].every(({ open }) => open)")
        page.run("dispatchEvent(new Event('afterprint'))")
        assert page.run(f"return {PICTURES}") == dark
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_every_colour_that_is_drawn_with_is_known(browser: Any, large: Path) -> None:
    page = Page(browser, large)
    unknown = page.run(r"""
        return [[TimelineView, timeline], [GraphView, graph]].map(([view, { colours }]) =>
          [...view.toString().matchAll(/this\.colours\.(\w+)/g)].map(([, name]) => name).filter((name) => !colours[name]));""")
    assert unknown == [[], []]


def test_passes_that_take_turns_share_blocks(browser: Any, tmp_path: Path) -> None:
    """As those of a pipeline's parts do, on one device."""
    nodes = [{"id": f"op.{i}", "compute_us": 5, "phase": ("forward", "backward")[i % 2]} for i in range(2000)]
    folder = write_plan(tmp_path / "turns", {"graph": {"name": "turns"}, "nodes": nodes, "edges": []}, "contiguous")
    page = Page(browser, write_page(str(folder), None))
    blocks = page.run("return devices.map((_, d) => timeline.blocks(tracks[0], d))")
    assert [1 <= len(found) <= 20 for found in blocks] == [True, True]
    assert {block["pass"] for found in blocks for block in found} == {"both passes"}
    assert sum(block["ops"] for found in blocks for block in found) == len(nodes)
    assert page.errors() == []


def test_thousands_of_ops_can_be_opened_and_one_found(browser: Any, large: Path) -> None:
    page = Page(browser, large)
    assert page.run("return opCount") > 3000
    blocks = page.run("return devices.map((_, d) => timeline.blocks(tracks[0], d))")
    assert [1 <= len(found) <= 20 for found in blocks] == [True, True]
    assert sum(block["ops"] for found in blocks for block in found) == page.run("return opCount")
    block = blocks[0][0]
    page.click("timeline", "[timeline.x((arguments[0].start_us + arguments[0].end_us) / 2), timeline.y(tracks[0], 0) + 6]", block)
    assert page.run("return [span.from, span.to]") == [block["start_us"], block["end_us"]]
    assert 5 < page.run("return graph.boxes.length") < 200
    page.run("graph.openAll(true)")
    page.drawn()
    assert page.run("return graph.boxOfOp.size === opCount")
    seen, named = page.run("const [seen, named] = graph.shown(); return [seen.size, [...named].map((box) => box.h * graph.scale)]")
    assert seen <= page.run("return graph.boxes.length")
    assert named
    assert min(named) >= page.run("return ROOM")
    page.run("graph.zoomTo([...graph.shown()[1]][0])")
    assert page.run("return graph.scale") > 0
    op = page.run("return ops.id.indexOf('grad conv.5.70')")
    page.run("select(arguments[0]); span.show(predicted.start_us[arguments[0]], predicted.end_us[arguments[0]])", op)
    page.click("timeline", "timeline.centre(arguments[0])", op)
    assert page.run("return selection.op") == op
    assert "Why it is here" in page.text("#details")
    assert page.run("return document.getElementById('methods')") is None
    assert min(colours_of(page)) > 10
    assert page.errors() == []
    assert page.requests() == []
