"""`baechi report` and `baechi plot`: what they write and say."""

import json
from collections.abc import Callable
from pathlib import Path

Run = Callable[..., tuple[int, str, str]]


def test_a_report_of_a_plan(run: Run, graph: Path, plan: Path) -> None:
    code, out, _ = run("report", graph.parent)
    page = graph.parent / "report.html"
    assert (code, out) == (0, f"the report is {page}; open it in a browser\n")
    assert page.read_text().startswith("<!doctype html>")


def test_a_report_goes_where_it_is_told_to(run: Run, graph: Path, plan: Path, tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    code, _, _ = run("report", graph.parent, f"--out={tmp_path / 'pages' / 'a.html'}")
    assert code == 0
    assert [path.name for path in (tmp_path / "pages").iterdir()] == ["a.html"]


def test_a_page_holds_what_has_no_utf_8_form_as_an_escape(run: Run, graph: Path, plan: Path) -> None:
    """JSON allows half a surrogate pair, and a plan's method may be any text."""
    plan.write_text(json.dumps({**json.loads(plan.read_text()), "method": "\ud800"}))
    code, _, err = run("report", graph.parent)
    assert (code, err) == (0, "")
    assert " - \\ud800</title>" in (graph.parent / "report.html").read_text(encoding="utf-8")


def test_a_folder_without_a_run_is_an_error(run: Run, tmp_path: Path) -> None:
    code, out, err = run("report", tmp_path)
    assert (code, out) == (1, "")
    assert "has no graph.json" in err
    assert err.splitlines()[-1].startswith("error:")
    assert "there is no folder" in run("report", tmp_path / "none")[2]


def test_plots_of_a_plan(run: Run, graph: Path, plan: Path, tmp_path: Path) -> None:
    code, out, _ = run("plot", graph.parent, f"--out={tmp_path / 'new' / 'plots'}")
    assert code == 0
    assert [Path(line).name for line in out.splitlines()] == [
        "timeline.png", "timeline.pdf", "memory.png", "memory.pdf", "busy.png", "busy.pdf",
    ]  # fmt: skip
    assert all(Path(line).is_file() for line in out.splitlines())
