"""`baechi plot`: real PNG and PDF files, the same for the same run."""

import json
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from baechi_ext.errors import FileError, MissingBackendError
from baechi_ext.explain.path import critical_ops
from baechi_ext.ir import Cluster, Plan
from baechi_ext.ir.made_by import MadeBy
from baechi_runtime.files.run_folder import COMPARISON, RunFolder
from baechi_runtime.report.figure import save_figure
from baechi_runtime.report.palette import LIMIT
from baechi_runtime.report.reading import comparison_in
from baechi_runtime.report.report import Step
from baechi_runtime.report.run_plots import FORMATS, busy_figure, memory_figure, methods_figure, timeline_figure, write_plots
from tests.runtime.report_page.runs import comparison, towers, write_plan, write_run

PLOTS = ("timeline", "memory", "busy")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", towers())


def test_every_plot_is_a_picture_of_a_certain_size(folder: Path, tmp_path: Path) -> None:
    paths = write_plots(str(folder), str(tmp_path / "plots"))
    assert [path.name for path in paths] == [f"{name}{suffix}" for name in (*PLOTS, "methods") for suffix in FORMATS]
    for path in paths:
        content = path.read_bytes()
        assert len(content) > 4000
        if path.suffix == ".pdf":
            assert content.startswith(b"%PDF-")
            assert content.rstrip().endswith(b"%%EOF")
        else:
            assert content.startswith(b"\x89PNG\r\n\x1a\n")
            width, height = struct.unpack(">II", content[16:24])
            assert width == 1400
            assert 150 < height < 1000


def test_plots_are_the_same_for_the_same_run(folder: Path, tmp_path: Path) -> None:
    first, second = (write_plots(str(folder), str(tmp_path / name)) for name in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_plots_say_what_made_them(folder: Path, tmp_path: Path) -> None:
    """The run, and the command that plotted; PDF escapes parentheses."""
    said = f"baechi train '--out=a folder' (baechi 1.0, torch 2.0); plotted by {MadeBy(('baechi', 'plot', 'it'))}"
    for path in write_plots(str(folder), str(tmp_path / "plots"), ("baechi", "plot", "it")):
        content = path.read_bytes().replace(b"\\(", b"(").replace(b"\\)", b")")
        assert said.encode() in content
        assert f": {path.stem}".encode() in content  # the title


def test_plots_of_a_plan_that_was_not_run(tmp_path: Path) -> None:
    folder = write_plan(tmp_path / "plan", towers())
    assert [path.name for path in write_plots(str(folder), None)] == [f"{name}{suffix}" for name in PLOTS for suffix in FORMATS]
    assert len(timeline_figure(RunFolder.load(folder)).axes) == 1


def test_plots_of_a_step_that_takes_no_time(tmp_path: Path) -> None:
    folder = write_plan(tmp_path / "plan", {"nodes": [{"id": "a", "compute_us": 0}], "edges": []})
    assert RunFolder.load(folder).timeline.makespan_us == 0
    assert write_plots(str(folder), None)


def test_the_timeline_has_every_op_of_both_steps(folder: Path) -> None:
    run = RunFolder.load(folder)
    figure = timeline_figure(run)
    assert [axes.get_title(loc="left").split(":")[0] for axes in figure.axes] == ["predicted", "measured"]
    for axes, path in zip(figure.axes, (critical_ops(run.timeline), ()), strict=True):  # the path of the measured step nobody knows
        bars = [len(collection.get_paths()) for collection in axes.collections]
        assert sum(bars) == len(run.graph) + len(path) + len(run.timeline.transfers)


def test_of_hundreds_of_devices_the_busiest_are_plotted(tmp_path: Path) -> None:
    """matplotlib has no picture of 300 devices."""
    nodes = [{"id": f"op.{i}", "compute_us": 1 + i % 7} for i in range(300)]
    folder = tmp_path / "many"
    folder.mkdir()
    (folder / "graph.json").write_text(json.dumps({"nodes": nodes, "edges": []}))
    cluster = {"devices": [{"name": f"d{i}"} for i in range(300)], "links": {"default": {"us_per_byte": 1, "latency_us": 0}}}
    (folder / "plan.json").write_text(json.dumps({"cluster": cluster, "placement": {f"op.{i}": i for i in range(300)}}))
    run = RunFolder.load(folder)
    for figure in (timeline_figure(run), memory_figure(run, Step()), busy_figure(run)):
        assert figure.get_figheight() < 80
        assert figure.axes[-1].get_xlabel().endswith("; the 64 busiest devices, 236 more are not shown")
    (axes,) = timeline_figure(run).axes
    assert [label.get_text() for label in axes.get_yticklabels()][:3] == ["d5", "d6", "d12"]


def test_a_limit_is_no_line_that_a_device_has(tmp_path: Path) -> None:
    """One of six devices has the limit's colour, and its lines are solid; those of peaks are dotted."""
    run = RunFolder.load(write_plan(tmp_path / "plan", towers()))
    plan = replace(run.plan, cluster=Cluster.uniform(6, memory_bytes=1 << 18))
    lines = [line for axes in memory_figure(replace(run, plan=plan), Step()).axes for line in axes.lines]
    limits = [line for line in lines if line.get_label() == "limit"]
    assert LIMIT in [line.get_color() for line in lines if line not in limits]
    assert {line.get_linestyle() for line in limits} == {"--"}


def test_a_method_that_did_not_run_has_an_empty_row(folder: Path) -> None:
    figure = methods_figure(comparison_in(folder).rows)
    (axes,) = figure.axes
    assert len(axes.get_yticklabels()) == 2
    assert {y for line in axes.lines for y in line.get_ydata()} == {0}


def test_names_are_no_formulas(folder: Path, tmp_path: Path) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    plan["cluster"]["devices"][0]["name"] = r"$\frac{$"
    (folder / "plan.json").write_text(json.dumps(plan))
    assert Plan.load(folder / "plan.json", RunFolder.load(folder).graph).cluster.devices[0].name == r"$\frac{$"
    value = comparison()
    value["methods"][0]["method"] = "$x"
    (folder / COMPARISON).write_text(json.dumps(value))
    assert len(write_plots(str(folder), str(tmp_path / "plots"))) == 8


def test_without_matplotlib_the_message_says_how_to_get_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingBackendError, match=r"plots need matplotlib; pip install 'baechi-ext\[plots\]'"):
        write_plots(str(folder), None)


def test_a_plot_that_fails_leaves_the_earlier_one(folder: Path, tmp_path: Path) -> None:
    path = write_plots(str(folder), str(tmp_path))[0]
    before = path.read_bytes()
    figure = timeline_figure(RunFolder.load(folder))
    figure.text(0, 0, r"$\frac{$")
    with pytest.raises(ValueError, match="frac"):
        save_figure(figure, path, "", "")
    assert path.read_bytes() == before
    assert not list(tmp_path.glob("*.tmp")) + list(tmp_path.glob(".*.tmp"))


def test_where_no_folder_can_be_made_nothing_is_written(folder: Path) -> None:
    with pytest.raises(FileError, match="cannot make the folder"):
        write_plots(str(folder), str(folder / "plan.json" / "plots"))
