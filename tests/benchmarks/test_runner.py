"""The runner of benchmarks: flags, turns, the file that grows, processes of their own, tables."""

import argparse
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from baechi_ext.errors import FileError
from benchmarks.runner import Benchmark, Row, commit, in_fresh_process, in_turn, parsed, some_of, table, timed


def test_variants_take_turns() -> None:
    order: list[str] = []
    samples = in_turn({name: lambda name=name: order.append(name) or len(order) for name in "ab"}, 3)
    assert order == ["a", "b"] * 3
    assert samples == {"a": [1, 3, 5], "b": [2, 4, 6]}


def test_a_flag_is_of_the_type_of_its_default() -> None:
    flags = {"--sizes": (1, 2), "--ratios": (0.5,), "--names": (), "--rounds": 3, "--some": some_of(("x", "y", "z"), ["y"])}
    assert vars(parsed("", flags, [])) == {"sizes": [1, 2], "ratios": [0.5], "names": [], "rounds": 3, "some": ["y"]}
    given = vars(parsed("", flags, ["--sizes=7", "--ratios=1,2", "--names=p,q", "--some=x,z"]))
    assert given == {"sizes": [7], "ratios": [1.0, 2.0], "names": ["p", "q"], "rounds": 3, "some": ["x", "z"]}


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed("", {"--some": some_of("xy")}, ["--some=x,w"])
    assert "unknown: w; there are x, y" in capsys.readouterr().err


def test_the_file_has_what_there_is_so_far(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"

    def measure(args: argparse.Namespace) -> Iterator[Row]:
        yield {"rows": [args.first]}
        assert json.loads(out.read_text())["rows"] == [4]
        yield {"rows": [5]}

    benchmark = Benchmark("made_up", "", {"--first": 1}, measure, lambda found: f"{found['rows']} by {found['command']}", markdown=True)
    benchmark.main(["--first=4", f"--out={out}"])
    found = json.loads(out.read_text())
    assert list(found) == ["command", "date", "commit", "hardware", "versions", "rows"]
    said = f"[4, 5] by python -m benchmarks.made_up --first=4 --out={out}\n"
    assert capsys.readouterr().out == out.with_suffix(".md").read_text() == said
    with pytest.raises(FileError):
        benchmark.main([f"--out={tmp_path / 'missing' / 'result.json'}"])


def test_a_checkout_is_changed_by_anything_but_results(tmp_path: Path) -> None:
    assert commit(tmp_path) is None
    code, result = tmp_path / "code.py", tmp_path / "benchmarks" / "results" / "a.json"
    result.parent.mkdir(parents=True)
    for path in (code, result):
        path.write_text("old")
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "."), (*author, "commit", "-q", "-m", "first")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    clean = commit(tmp_path)
    assert clean is not None and len(clean) == 12
    result.write_text("new")
    assert commit(tmp_path) == clean
    code.write_text("new")
    assert commit(tmp_path) == f"{clean}-dirty"


def test_a_fresh_process() -> None:
    first, second = in_fresh_process(os.getpid), in_fresh_process(os.getpid)
    assert len({first, second, os.getpid()}) == 3


def test_times() -> None:
    value, took = timed(lambda: sum(range(10)))
    assert value == 45
    assert took["seconds"] > 0
    assert took["cpu_seconds"] >= 0


def test_a_table() -> None:
    rows = [{"name": "a", "us": 1.0}, {"name": "long", "us": 12.25}]
    assert table({"name": "{name}", "us": lambda row: f"{row['us']:.1f}"}, rows, "Title").splitlines() == [
        "",
        "Title",
        "",
        "| name | us   |",
        "|------|------|",
        "| a    | 1.0  |",
        "| long | 12.2 |",
    ]
